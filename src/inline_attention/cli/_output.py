"""Precision, sizes, progress and result files, for all commands."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from inline_attention.models.weights import architecture
from inline_attention.printing import STANDARD_OUTPUT, say


def autocast_dtype(precision: str | None) -> torch.dtype | None:
    """The dtype for autocast. None means float32, without autocast."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "fp32")


def parse_size(values: Sequence[int] | None, *, option: str = "--img-size") -> tuple[int, int] | None:
    """(height, width) from one or two numbers on the command line."""
    if values is None:
        return None
    if len(values) > 2 or min(values) < 1:
        raise ValueError(f"{option} is {' '.join(map(str, values))}; expected a side, or height and width")
    return values[0], values[-1]


def model_title(model: nn.Module) -> str:
    """The name of a model, and whether it was made linear: its name may still be that of a softmax model."""
    return f"{'linearised ' if hasattr(model, 'linearization') else ''}{architecture(model)}"


@contextmanager
def image_progress(what: str, *, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error: a bar on a terminal, otherwise a line for every tenth of the work.

    Yields a function to call with the number of images done.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _LineProgress(what, total=total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda images: progress.update(task, advance=images)


class _LineProgress:
    def __init__(self, what: str, *, total: int) -> None:
        self._what, self._total, self._done = what, total, 0

    def __call__(self, images: int) -> None:
        before, self._done = self._done, self._done + images
        if 10 * before // max(1, self._total) != 10 * self._done // max(1, self._total):
            say(f"{self._what}: {self._done}/{self._total}", file=sys.stderr)


def check_writable(*paths: Path | None, json: str | None = None) -> None:
    """Raise ValueError for a result file that cannot be written. Call this before the work starts.

    Only JSON can go to standard output.
    """
    for path in paths if json in (None, STANDARD_OUTPUT) else (*paths, Path(json)):
        if path is None:
            continue
        if str(path) == STANDARD_OUTPUT:
            raise ValueError("only --json takes - for standard output; expected a file's name")
        folder = path.absolute().parent
        if path.is_dir() or not folder.is_dir():
            raise ValueError(f"{str(path)!r} cannot be written: expected a file's name in a folder that exists")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(f"{str(path)!r} cannot be written: permission denied")
