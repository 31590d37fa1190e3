"""The report of a run: progress on the terminal, metrics, TensorBoard, Weights & Biases, figures, a summary."""

import errno
import json
import math
import os
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from inline_attention.printing import printable
from inline_attention.training import settings
from inline_attention.training.config import LoopConfig
from inline_attention.training.files import write_atomically
from inline_attention.training.task import Headline, Writer

METRICS, SUMMARY, CURVES = "metrics.jsonl", "summary.json", "curves.png"
SET_ASIDE = "metrics-aside.jsonl"  # lines removed from METRICS: records of repeated updates, and damaged lines
TENSORBOARD, WANDB_ID = "tensorboard", ".wandb-id"


class Reporter(AbstractContextManager["Reporter"]):
    """The report of one run. Only that of rank 0 is `active`; the others do nothing.

    A record is a flat dictionary with `kind` ("train" or "eval"), `update` (optimizer updates done) and `epoch`.
    """

    def __init__(self, folder: Path, config: LoopConfig, *, headline: Headline, active: bool) -> None:
        self.folder, self.config, self.headline, self.active = folder, config, headline, active
        self.console = Console(file=sys.stdout, soft_wrap=True, quiet=not active, highlight=False)
        self.latest: dict[str, Any] = {}
        self.bar: Progress | None = None
        self.board: Any = None
        self.excepthook = threading.excepthook
        self.wandb: Any = None
        self.total_updates = 0
        self.failing: set[str] = set()  # files of the run folder that could not be written the last time

    def start(self, *, total_updates: int, done_updates: int) -> None:
        """Open the report of a run that has done `done_updates` and will end at `total_updates`.

        A killed run may have recorded later updates. They will be repeated, so their records are set aside.
        """
        self.total_updates = total_updates
        if not self.active:
            return
        if done_updates < total_updates:  # to job scripts, a summary means a complete run
            self._try(SUMMARY, lambda: (self.folder / SUMMARY).unlink(missing_ok=True))
        self._try(METRICS, partial(self._set_aside_records_after, done_updates))
        if self.config.log.tensorboard:
            self._try(TENSORBOARD, partial(self._open_tensorboard, done_updates))
        if self.config.log.wandb is not None:
            self.wandb = _open_wandb(self.folder, self.config)
        if self.console.is_terminal:
            self.bar = _Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("training", total=total_updates, completed=done_updates, figures="")
            self.bar.start()

    def advance(self, update: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=update)

    def note(self, text: str) -> None:
        """Show a line to the user."""
        if self.active:
            self._print(text)

    def record(self, record: Mapping[str, Any], *, eta_seconds: float | None = None, show: bool = True) -> None:
        """Write a record. With `show`, also print it together with the latest other figures."""
        if not self.active:
            return
        record = _without_nan(record)
        self.latest |= record | ({} if eta_seconds is None else {"eta": eta_seconds})
        self._append(record)
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in ("update", "epoch")}
        if self.board is not None:
            for key, value in numbers.items():
                write = partial(self.board.add_scalar, f"{record['kind']}/{key}", value, record["update"])
                self._try(TENSORBOARD, write)
        if self.wandb is not None:
            self.wandb.log({f"{record['kind']}/{k}": v for k, v in numbers.items()}, step=record["update"])
        line = "  ".join(
            form(self.latest[key]) for key, form in _formats(self.headline).items() if self.latest.get(key) is not None
        )
        if self.bar is not None:
            self.bar.update(self.task, figures=line)
        elif show:
            left = f"  left {_clock(self.latest['eta'])}" if "eta" in self.latest else ""
            self._print(f"{self._position(record)}  {line}{left}")

    def _print(self, text: str) -> None:
        try:
            self.console.print("\n".join(map(printable, text.split("\n"))), markup=False)
        except OSError as error:
            if error.errno != errno.ENOSPC:  # a log on a full disk loses lines; a closed pipe ends the run
                raise

    def _position(self, record: Mapping[str, Any]) -> str:
        schedule = self.config.schedule
        if schedule.steps is not None:
            return f"update {record['update']}/{self.total_updates}"
        return f"epoch {round(record['epoch'], 2):g}/{schedule.epochs + schedule.cooldown_epochs}"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        if self.active:
            content = json.dumps(_without_nan(summary), indent=1).encode()
            self._try(SUMMARY, lambda: write_atomically(self.folder / SUMMARY, content))

    def write_files(self, files: Mapping[str, Writer]) -> None:
        """Write curves.png from metrics.jsonl, and `files` of the task: name → function that writes it."""
        if not self.active:
            return
        for name, write in {CURVES: self._draw_curves, **files}.items():
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="Glyph")  # class names in a script that the font lacks
                    self._try(name, partial(write, self.folder / name))
            except ImportError:
                self.note(f"no {name}: matplotlib is not installed (pip install 'inline-attention[train]')")

    def _draw_curves(self, path: Path) -> None:
        from inline_attention.training import plots

        plots.draw_curves(read_records(self.folder), path, headline=self.headline)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self._try(TENSORBOARD, self.board.close)
            threading.excepthook = self.excepthook
        if self.wandb is not None:
            self.wandb.finish(exit_code=0 if kind is None else 1)

    def _open_tensorboard(self, done_updates: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.note("no TensorBoard files: tensorboard is not installed (pip install 'inline-attention[train]')")
            return
        purge_step = done_updates + 1 if done_updates else None
        self.board = SummaryWriter(str(self.folder / TENSORBOARD), purge_step=purge_step)
        threading.excepthook = self._on_thread_error

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Suppress the traceback of TensorBoard's thread on a full disk. Its next call raises the same error."""
        if not isinstance(error.exc_value, OSError):
            self.excepthook(error)

    def _append(self, record: Mapping[str, Any]) -> None:
        def write() -> None:
            line = (json.dumps(record) + "\n").encode()
            with open(self.folder / METRICS, "ab", buffering=0) as file:
                end = file.tell()
                if file.write(line) < len(line):  # the disk is full, and only part of the line was written
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._try(METRICS, write)

    def _try(self, name: str, write: Callable[[], object]) -> None:
        """Write to a file of the run folder. A full disk costs lines of the report, never the run."""
        try:
            write()
        except OSError as error:
            if name not in self.failing:
                self.note(f"could not write {name} to {self.folder} ({error.strerror or error}); the run goes on")
            self.failing.add(name)
        else:
            if name in self.failing:
                self.note(f"{name} can be written to {self.folder} again")
            self.failing.discard(name)

    def _set_aside_records_after(self, update: int) -> None:
        """Move the records after `update`, from which the run resumes, and damaged lines to another file."""
        kept: list[bytes] = []
        aside: list[bytes] = []
        damaged = 0
        lines = _lines(self.folder)
        for line in lines:
            record = _parse_record(line)
            damaged += record is None
            # A checkpoint at the end of an epoch is written before the evaluation of the epoch.
            done = record is not None and (record["update"], record["kind"] == "eval") <= (update, False)
            (kept if done else aside).append(line + b"\n")
        if damaged > 1 or (damaged and _parse_record(lines[-1]) is not None):  # a kill may cut the last line short
            self.note(f"{self.folder / METRICS} has {damaged} damaged lines: they were moved to {SET_ASIDE}")
        if aside:
            with open(self.folder / SET_ASIDE, "ab") as file:
                file.writelines(aside)
        if lines:  # even if nothing moved: the last line may lack its newline
            write_atomically(self.folder / METRICS, b"".join(kept))


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records in metrics.jsonl, without damaged lines (a kill may cut one short)."""
    return [record for line in _lines(folder) if (record := _parse_record(line)) is not None]


def _lines(folder: Path) -> list[bytes]:
    path = folder / METRICS
    return path.read_bytes().splitlines() if path.exists() else []


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None: it is not a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(record, dict) and isinstance(record.get("update"), int) and isinstance(record.get("kind"), str)
    return record if fits else None


class _Bar(Progress):
    """A progress bar with the figures below it, since 80 columns are too few to show both side by side."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["figures"], no_wrap=False, overflow="fold")


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the CUDA allocator on a GPU, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _formats(headline: Headline) -> dict[str, Callable[[float], str]]:
    """The figures that a line shows, and their formats."""
    return {
        "loss": lambda v: f"loss {v:.4f}",
        f"val_{headline.key}": lambda v: f"val {headline.label} {v:.2f}%",
        f"ema_{headline.key}": lambda v: f"EMA {v:.2f}%",
        "lr": lambda v: f"lr {v:.2e}",
        "grad_norm": lambda v: f"gradient {v:.2f}",
        "images_per_second": lambda v: f"{v:,.0f} images/s" if v >= 10 else f"{v:.2g} images/s",
        "waiting": lambda v: f"waiting {v:.0%}",
        "memory": lambda v: f"{v / 2**30:.2f} GiB",
    }


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def wandb_id(folder: Path) -> str:
    """The id of a run at Weights & Biases. It is stored in the folder, because folders of two runs may share a name."""
    path = folder / WANDB_ID
    if not path.exists():
        # Version 0.1 used the folder's name, and left the files of wandb in the folder.
        identity = folder.name if (folder / "wandb").exists() else uuid.uuid4().hex
        write_atomically(path, identity.encode())
    return path.read_text()


def _open_wandb(folder: Path, config: LoopConfig) -> Any:
    import wandb  # type: ignore[import-not-found]  # optional, without an extra of its own; see check_plan

    return wandb.init(
        project=config.log.wandb,
        name=folder.name,
        id=wandb_id(folder),
        resume="allow",
        dir=str(folder),
        config=settings.to_mapping(config),
    )
