"""What commands share: devices, progress, result files."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inline_attention.printing import NOT_UTF8, say, say_text

STANDARD_OUTPUT = "-"  # as the name of a result file


def choose_device(name: str | None) -> torch.device:
    """The device named, or the best there is."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def autocast_dtype(precision: str | None) -> torch.dtype | None:
    """What to compute in by autocast; None for float32, which needs none."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "fp32")


def parse_size(values: Sequence[int] | None, *, option: str = "--img-size") -> tuple[int, int] | None:
    """(height, width) from one or two numbers of the command line."""
    if values is None:
        return None
    if len(values) > 2 or min(values) < 1:
        raise ValueError(f"{option} is {' '.join(map(str, values))}; expected a side, or height and width")
    return values[0], values[-1]


def free_name(paths: Sequence[Path], index: int) -> str:
    """A name for what is made from a file: its own without the ending, with a number where several files share it."""
    name = paths[index].stem
    return name if sum(path.stem == name for path in paths) == 1 else f"{name}-{index}"


@contextmanager
def image_progress(what: str, *, total: int) -> Iterator[Callable[[int], None]]:
    """Progress on standard error: a bar on a terminal, elsewhere a line for every tenth. Yields what advances it."""
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


def check_writable(*paths: str | Path | None) -> None:
    """ValueError for a result file that cannot be written. To be called before the work starts."""
    for path in paths:
        if (
            path is not None
            and str(path) != STANDARD_OUTPUT
            and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir())
        ):
            raise ValueError(f"{str(path)!r} cannot be written: expected a file's name in a folder that exists")


def write_json(path: str | Path, content: Any) -> None:
    """- stands for standard output."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    if str(path) == STANDARD_OUTPUT:
        say_text(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8", errors=NOT_UTF8)
