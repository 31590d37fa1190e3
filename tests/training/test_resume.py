"""A run that is killed or stopped and resumed ends with the weights, bit for bit, of one that was left alone."""

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import training_runs as _runs

from inline_attention.training.checkpoint import find_damage

SETTINGS = ("checkpoint.every_steps=3", "log.every_steps=4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """(run folder, seconds that the run took)"""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    _runs.run(["train", "--list-recipes"], log=output.parent / "warm-up.txt")  # starts the fork server
    begin = time.monotonic()
    assert _runs.run(_runs.arguments(output, *SETTINGS), log=output.parent / "log.txt") == 0
    return output, time.monotonic() - begin


def kill_when(process: BaseProcess, happens: Callable[[], bool]) -> bool:
    """SIGKILL as soon as something `happens`; False: the process ended before that."""
    while process.is_alive():
        if happens():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            return process.exitcode == -signal.SIGKILL
        time.sleep(0.0005)
    return False


def assert_checkpoints_are_intact(output: Path) -> None:
    for checkpoint in (output / "checkpoints").glob("step-*"):
        assert find_damage(checkpoint) is None
        torch.load(checkpoint / "state.pt", weights_only=True)
    if (output / "checkpoints" / "last.safetensors").exists():
        _runs.weights(output)


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
        process = _runs.start(_runs.arguments(runs[-1], *SETTINGS, "--resume=auto"), log=log)
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
    assert _runs.run(_runs.arguments(runs[-1], *SETTINGS, "--resume=auto"), log=log) == 0, log.read_text()[-2000:]
    return runs


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    reference, seconds = undisturbed
    for run in kill_and_resume(tmp_path, kills=kills, seconds=seconds, seed=kills):
        _runs.assert_same_weights(run, reference)
        # The record of the run has no gaps and no repetitions either.
        updates = [record["update"] for record in _runs.metrics(run)]
        assert updates == sorted(set(updates))
        assert _runs.metrics(run, "eval") == _runs.metrics(reference, "eval")


@pytest.mark.parametrize(("number", "status", "workers"), [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 0)])
def test_a_signal_saves_and_the_run_goes_on(
    number: int, status: int, workers: int, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    """To all its processes at once, data loader workers too, as a terminal or a scheduler does."""
    output, log = tmp_path / "run", tmp_path / "log.txt"
    settings = (*SETTINGS, "checkpoint.every_steps=null", f"data.workers={workers}")
    process = _runs.start(_runs.arguments(output, *settings), log=log)
    metrics = output / "metrics.jsonl"
    while process.is_alive() and not metrics.exists():
        time.sleep(0.0005)
    os.killpg(process.pid or 0, number)
    process.join()
    assert process.exitcode == status, log.read_text()
    saved = sorted((output / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    assert not (output / "summary.json").exists()
    assert "continue with --resume" in log.read_text()
    assert _runs.run(["train", f"--resume={output}", "data.workers=0"], log=log) == 0, log.read_text()
    assert f"continuing from {saved[0]}" in log.read_text()
    _runs.assert_same_weights(output, undisturbed[0])


def test_damaged_newest_checkpoint_is_passed_over(undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    assert _runs.run(_runs.arguments(output, *SETTINGS, "schedule.epochs=2"), log=log) == 0
    before, newest = sorted((output / "checkpoints").glob("step-*"))
    with open(newest / "state.pt", "r+b") as file:
        file.seek(1000)
        file.write(b"\0\1\2\3")
    assert _runs.run(["train", f"--output={output}", "--resume=auto"], log=log) == 0
    assert (
        "checkpoint step-00000020 is damaged (state.pt: checksum differs): trying the one before it" in log.read_text()
    )
    assert f"continuing from {before}" in log.read_text()
    assert find_damage(newest) is None
    _runs.assert_same_weights(output, undisturbed[0])
