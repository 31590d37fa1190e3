"""Runs that are killed and resumed: what the tests of resuming and the soak share."""

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import training_runs

from inline_attention.training.checkpoint import find_damage

SETTINGS = ("checkpoint.every_steps=3", "log.every_steps=4")


def run_undisturbed(folder: Path) -> tuple[Path, float]:
    """(run folder, seconds that the run took)"""
    output = folder / "run"
    training_runs.run(["train", "--list-recipes"], log=folder / "warm-up.txt")  # starts the fork server
    begin = time.monotonic()
    status = training_runs.run(training_runs.arguments(output, *SETTINGS), log=folder / "log.txt")
    assert status == 0, (folder / "log.txt").read_text()[-2000:]
    return output, time.monotonic() - begin


def kill_when(process: BaseProcess, happens: Callable[[], bool]) -> bool:
    """SIGKILL as soon as something `happens`; False: the process ended before that."""
    try:
        while process.is_alive():
            if happens():
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
                return process.exitcode == -signal.SIGKILL
            time.sleep(0.0005)
        return False
    finally:
        process.kill()  # a run in a session of its own would outlive an interrupted test


def assert_checkpoints_are_intact(output: Path) -> None:
    for checkpoint in (output / "checkpoints").glob("step-*"):
        assert find_damage(checkpoint) is None
        torch.load(checkpoint / "state.pt", weights_only=True)
    if (output / "checkpoints" / "last.safetensors").exists():
        training_runs.weights(output)


def when_saving(output: Path, *, after: int) -> Callable[[], bool]:
    """True while a checkpoint is being written, from the one that follows `after` others on."""
    seen: set[str] = set()

    def is_saving() -> bool:
        unfinished = {path.name for path in (output / "checkpoints").glob(".step-*.saving")}
        seen.update(unfinished)
        return bool(unfinished) and len(seen) > after

    return is_saving


def after_seconds(seconds: float) -> Callable[[], bool]:
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline


def kill_and_resume(folder: Path, *, kills: int, seconds: float, seed: int) -> list[Path]:
    """Runs in `folder`, killed `kills` times in all and resumed after each.

    Every other time while a checkpoint is being written, otherwise at a random moment. A run that ended before it was
    to be killed is followed by another.
    """
    draw = random.Random(seed)
    log = folder / "log.txt"
    runs = [folder / "run0"]
    killed_in_saving = killed = 0
    while killed < kills:
        process = training_runs.start(training_runs.arguments(runs[-1], *SETTINGS, "--resume=auto"), log=log)
        in_saving = killed % 2 == 1
        moment = (
            when_saving(runs[-1], after=draw.randrange(3)) if in_saving else after_seconds(draw.uniform(0, seconds))
        )
        if kill_when(process, moment):
            killed += 1
            killed_in_saving += in_saving
        else:
            assert process.exitcode == 0, log.read_text()[-2000:]
            runs.append(folder / f"run{len(runs)}")
        assert_checkpoints_are_intact(runs[-1])
    assert killed_in_saving == kills // 2
    assert training_runs.run(training_runs.arguments(runs[-1], *SETTINGS, "--resume=auto"), log=log) == 0, (
        log.read_text()[-2000:]
    )
    return runs


def assert_same_run(run: Path, reference: Path) -> None:
    """The weights bit for bit, and a record without gaps or repetitions."""
    training_runs.assert_same_weights(run, reference)
    updates = [record["update"] for record in training_runs.metrics(run)]
    assert updates == sorted(set(updates))
    assert training_runs.metrics(run, "eval") == training_runs.metrics(reference, "eval")
