"""Runs that are stopped, killed and resumed with other batches and ranks: progress only grows, and nothing is lost."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import training_runs as _runs
from torch import Tensor

from inline_attention.data import Batch
from inline_attention.tasks.classification.task import Classification
from inline_attention.training.checkpoint import find_damage
from inline_attention.training.loop import train
from inline_attention.training.run_folder import plan_run

EPOCHS, KEEP = 3, 2
SETTINGS = (f"schedule.epochs={EPOCHS}", f"checkpoint.keep={KEEP}", "log.every_steps=1", "log.eval_epochs=2")


@dataclass(frozen=True)
class Start:
    """One start of a run, and how it ends."""

    end: str  # "complete", "stop" or "kill"
    after: int  # batches (processes: milliseconds after the first record) until it is stopped or killed
    batch: int
    accumulate: int
    every_steps: int  # between checkpoints
    ranks: int = 1

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f"data.batch_size={self.batch // self.ranks}",
            f"optim.accumulate={self.accumulate}",
            f"checkpoint.every_steps={self.every_steps}",
        )


def draw_starts(seed: int, *, ranks: tuple[int, ...] = (1,), longest: int = 12) -> list[Start]:
    draw = random.Random(seed)
    starts = [
        Start(
            end=draw.choice(("stop", "kill")),
            after=draw.randrange(longest),
            batch=draw.choice((8, 16, 32, 64)),
            accumulate=draw.choice((1, 1, 2)),
            every_steps=draw.choice((1, 2, 5)),
            ranks=draw.choice(ranks),
        )
        for _ in range(4)
    ]
    return [*starts, Start("complete", 0, draw.choice((8, 32)), 1, 5, draw.choice(ranks))]


@dataclass(frozen=True)
class State:
    """The state of a run on the disk."""

    checkpoints: list[int]
    lines: set[str]  # of metrics, those that were set aside too

    @classmethod
    def read(cls, folder: Path) -> "State":
        saved = sorted((folder / "checkpoints").glob("step-*"))
        assert [find_damage(path) for path in saved] == [None] * len(saved)
        files = [path.read_text() for path in folder.glob("metrics*.jsonl")]
        return cls([int(path.name[5:]) for path in saved], {line for file in files for line in file.splitlines()})


def check_after(before: State, folder: Path) -> State:
    after = State.read(folder)
    newest = max(before.checkpoints, default=0)
    assert max(after.checkpoints, default=0) >= newest, "the newest checkpoint is older than before"
    removed = set(before.checkpoints) - set(after.checkpoints)
    assert max(removed, default=-1) < min(after.checkpoints, default=0), "a checkpoint was removed before older ones"
    assert before.lines <= after.lines, "records were lost"
    for kind in ("train", "eval"):
        records = _runs.metrics(folder, kind) if after.lines else []
        updates = [record["update"] for record in records]
        assert updates == sorted(set(updates))
        epochs = [record["epoch"] for record in records]
        assert epochs == sorted(epochs)
    return after


def check_sequence(folder: Path, starts: list[Start], run: Callable[[Start], None]) -> None:
    state = State([], set())
    for start in starts:
        run(start)
        state = check_after(state, folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["epochs"] == EPOCHS
    assert summary["updates"] == max(state.checkpoints)
    assert _runs.metrics(folder)[-1]["epoch"] == EPOCHS


class Killed(BaseException):
    pass


class Interrupted(Classification):
    """Classification that is interrupted in one of its batches."""

    start: ClassVar[Start]
    batches: ClassVar[int]

    def losses(self, forward: Callable[..., Any], batch: Batch, *, epoch: int, step: int) -> dict[str, Tensor]:
        Interrupted.batches += 1
        if Interrupted.batches > self.start.after and self.start.end == "kill":
            raise Killed
        if Interrupted.batches > self.start.after and self.start.end == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().losses(forward, batch, epoch=epoch, step=step)


def run_here(folder: Path, start: Start) -> None:
    """In this process: a kill is an exception that nothing catches, between two checkpoints."""
    Interrupted.start, Interrupted.batches = start, 0
    plan = plan_run(
        "inline_deit_tiny",
        task=Interrupted,
        overrides=(*_runs.TINY, *SETTINGS, *start.overrides),
        flags={"data": {"path": _runs.images()}, "device": "cpu"},
        output=str(folder),
        resume="auto",
    )
    with _runs.without_pictures(), contextlib.suppress(Killed):
        train(plan)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_any_sequence_of_stops_kills_and_batches(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    check_sequence(folder, draw_starts(seed), lambda start: run_here(folder, start))


def run_ranks(folder: Path, start: Start, log: Path) -> None:
    """In processes of their own, killed with SIGKILL."""
    ranks = _runs.start_ranks(
        _runs.arguments(folder, *SETTINGS, *start.overrides, "--resume=auto"), start.ranks, log=log
    )
    metrics = folder / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    while all(rank.is_alive() for rank in ranks) and (metrics.stat().st_size if metrics.exists() else 0) <= size:
        time.sleep(0.001)
    time.sleep(start.after / 1000)
    for rank in ranks if start.end != "complete" else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid or 0, signal.SIGKILL if start.end == "kill" else signal.SIGTERM)
    for rank in ranks:
        rank.join()
    expected = {"complete": {0}, "stop": {0, 143}, "kill": {0, -signal.SIGKILL}}[start.end]
    assert {rank.exitcode for rank in ranks} <= expected, log.read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_ranks(seed: int, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    starts = draw_starts(seed, ranks=(1, 2), longest=200)
    check_sequence(folder, starts, lambda start: run_ranks(folder, start, log))
