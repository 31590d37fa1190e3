"""What a run shows and leaves behind: progress, metrics, TensorBoard and Weights & Biases, pictures, a summary."""

import contextlib
import errno
import json
import math
import os
import sys
import threading
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
from inline_attention.training.run_folder import write_atomically
from inline_attention.training.task import Headline, Writer

METRICS, SUMMARY, CURVES = "metrics.jsonl", "summary.json", "curves.png"


class Reporter(AbstractContextManager["Reporter"]):
    """The report of one run; rank 0 has one that is `active`, the others' do nothing.

    A record is a flat dictionary with `kind` ("train" or "eval"), `update` (optimiser updates done) and `epoch`.
    """

    def __init__(self, folder: Path, config: LoopConfig, *, headline: Headline, active: bool) -> None:
        self.folder, self.config, self.headline, self.active = folder, config, headline, active
        self.formats = _formats(headline)
        self.console = Console(file=sys.stdout, soft_wrap=True, quiet=not active, highlight=False)
        self.latest: dict[str, Any] = {}
        self.bar: Progress | None = None
        self.board: Any = None
        self.excepthook = threading.excepthook
        self.wandb: Any = None
        self.told: set[str] = set()

    def start(self, *, total_updates: int, done_updates: int) -> None:
        """Open the report at `done_updates`. What a killed run recorded after that comes again, and is dropped."""
        if not self.active:
            return
        self._drop_records_after(done_updates)
        if self.config.log.tensorboard:
            self._tolerating(partial(self._open_tensorboard, done_updates))
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
        """A line for the user; the same line is shown once."""
        if self.active and text not in self.told:
            self.told.add(text)
            self._print(text)

    def record(self, record: Mapping[str, Any], *, eta_seconds: float | None = None, show: bool = True) -> None:
        """Keep a record; `show` it too, with what the records before it said."""
        if not self.active:
            return
        # JSON has no NaN.
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.latest |= record | ({} if eta_seconds is None else {"eta": eta_seconds})
        self._append(record)
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in ("update", "epoch")}
        if self.board is not None:
            for key, value in numbers.items():
                self._tolerating(partial(self.board.add_scalar, f"{record['kind']}/{key}", value, record["update"]))
        if self.wandb is not None:
            self.wandb.log({f"{record['kind']}/{k}": v for k, v in numbers.items()}, step=record["update"])
        line = "  ".join(
            form(self.latest[key]) for key, form in self.formats.items() if self.latest.get(key) is not None
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
            if error.errno != errno.ENOSPC:  # of a log on the full disk; a closed pipe ends the run
                raise

    def _position(self, record: Mapping[str, Any]) -> str:
        schedule = self.config.schedule
        if schedule.steps is not None:
            return f"update {record['update']}/{schedule.steps}"
        return f"epoch {record['epoch']:g}/{schedule.epochs + schedule.cooldown_epochs}"

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, but for one that a kill has cut short."""
        path = self.folder / METRICS
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def summarise(self, summary: Mapping[str, Any]) -> None:
        if self.active:
            self._tolerating(lambda: write_atomically(self.folder / SUMMARY, json.dumps(summary, indent=1).encode()))

    def leave_behind(self, files: Mapping[str, Writer]) -> None:
        """curves.png from metrics.jsonl, and the task's own `files`: name → what writes it."""
        if not self.active:
            return
        for name, write in {CURVES: self._draw_curves, **files}.items():
            try:
                self._tolerating(partial(write, self.folder / name))
            except ImportError:
                self.note(f"no {name}: matplotlib is not installed (pip install 'inline-attention[train]')")

    def _draw_curves(self, path: Path) -> None:
        from inline_attention.training import plots

        plots.draw_curves(self.records(), path, headline=self.headline)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self._tolerating(self.board.close)
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
        self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge_step)
        threading.excepthook = self._on_thread_error

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread on a full disk: its next call raises the same, which is told without a traceback."""
        if not isinstance(error.exc_value, OSError):
            self.excepthook(error)

    def _append(self, record: Mapping[str, Any]) -> None:
        def write() -> None:
            line = (json.dumps(record) + "\n").encode()
            with open(self.folder / METRICS, "ab", buffering=0) as file:
                end = file.tell()
                if file.write(line) < len(line):  # a disk that became full takes what fits
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._tolerating(write)

    def _tolerating(self, write: Callable[[], object]) -> None:
        """A full disk costs lines of the report, never the run."""
        try:
            write()
        except OSError as error:
            self.note(f"could not write to {self.folder} ({error.strerror or error}); the run goes on")

    def _drop_records_after(self, update: int) -> None:
        path = self.folder / METRICS
        if not path.exists():
            return
        # A checkpoint at the end of an epoch is written before the epoch is evaluated.
        kept = [r for r in self.records() if r["update"] < update or (r["update"] == update and r["kind"] == "train")]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        self._tolerating(lambda: write_atomically(path, lines.encode()))


class _Bar(Progress):
    """The figures stand below the bar: beside it, an ordinary terminal has no room for them."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["figures"], no_wrap=False, overflow="fold")


def memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: the allocator's on a GPU, the process's elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _formats(headline: Headline) -> dict[str, Callable[[float], str]]:
    """What of the records a line shows, and how."""
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


def _open_wandb(folder: Path, config: LoopConfig) -> Any:
    import wandb  # type: ignore[import-not-found]  # optional, without an extra of its own; see check_plan

    return wandb.init(
        project=config.log.wandb,
        name=folder.name,
        id=folder.name,
        resume="allow",
        dir=str(folder),
        config=settings.to_mapping(config),
    )
