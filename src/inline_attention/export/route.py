"""What all formats share: the request, the route from a model to a file and back, and the comparison."""

import contextlib
import importlib.util
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Runtimes sum in different orders. A larger difference means that the graph is wrong.
TOLERANCE = 1e-4
METADATA = "metadata.json"  # the entry with the description, in files that are archives

Run = Callable[[Tensor], Tensor]


class Request(NamedTuple):
    """What a file should hold."""

    model: nn.Module
    example: Tensor  # (B, in_chans, H, W), which the graph is traced with
    axes: dict[int, str]  # the input's dynamic axes and their names
    about: dict[str, str]  # the description, see `describe`

    def program(self) -> torch.export.ExportedProgram:
        dynamic = dict.fromkeys(self.axes, torch.export.Dim.DYNAMIC)
        with torch.no_grad():
            return torch.export.export(self.model, (self.example,), dynamic_shapes=(dynamic,))


def _model(request: Request) -> Run:
    return request.model


class Route(NamedTuple):
    """A format. Missing packages are an error before anything is computed."""

    write: Callable[[Request, Path], None]
    load: Callable[[Path, Request], Run]
    suffix: str
    packages: tuple[str, ...] = ()
    install: str = ""  # argument of pip install
    is_dynamic: bool = False  # whether batch and size may be dynamic
    prepare: Callable[[Request], Request] = lambda request: request
    reference: Callable[[Request], Run] = _model  # the expected outputs of the file
    covers: str | None = None  # set if the file is not tied to the sizes of the request
    note: str = ""

    def check_packages(self) -> None:
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"this format needs {package}: pip install '{self.install}'")


class Check(NamedTuple):
    """The difference between the file's and the model's output, for one input."""

    shape: tuple[int, ...]  # of the input
    difference: float  # largest, absolute

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE  # False for NaN


class Exported(NamedTuple):
    path: Path
    covers: str  # which inputs, in words
    checks: list[Check]
    about: dict[str, str]  # the description inside the file
    note: str = ""  # what else a user should know of this file, such as the error of quantisation


@contextlib.contextmanager
def quiet(package: str) -> Iterator[None]:
    """Hides the progress and the warnings of a converter. Errors are exceptions, and the comparison follows."""
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
