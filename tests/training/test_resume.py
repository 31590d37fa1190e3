"""A run that is killed or stopped and resumed ends with the weights, bit for bit, of one that was left alone."""

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import _runs
import pytest
import torch

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


def kill_and_resume(output: Path, *, kills: int, seconds: float, seed: int) -> None:
    """Every other kill comes while a checkpoint is being written, the rest at random moments; then the run may end."""
    draw = random.Random(seed)
    command = _runs.arguments(output, *SETTINGS, "--resume=auto")
    log = output.parent / "log.txt"
    done = saving = 0
    while done < kills:
        process = _runs.start(command, log=log)
        if done % 2:
            after = draw.randrange(3)  # checkpoints that may be completed first
            seen: set[str] = set()

            def is_saving() -> bool:
                unfinished = {path.name for path in (output / "checkpoints").glob(".step-*.saving")}  # noqa: B023
                seen.update(unfinished)  # noqa: B023
                return bool(unfinished) and len(seen) > after  # noqa: B023

            killed = kill_when(process, is_saving)
            saving += killed
        else:
            deadline = time.monotonic() + draw.uniform(0.1, seconds)
            killed = kill_when(process, lambda: time.monotonic() > deadline)  # noqa: B023
        assert_checkpoints_are_intact(output)
        if not killed:  # the run was complete: begin again
            assert process.exitcode == 0
            output = output.with_name(output.name + "x")
            command = _runs.arguments(output, *SETTINGS, "--resume=auto")
        done += 1
    assert saving > 0
    assert _runs.run(command, log=log) == 0, log.read_text()[-2000:]


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    reference, seconds = undisturbed
    kill_and_resume(tmp_path / "run", kills=kills, seconds=seconds, seed=kills)
    runs = sorted(tmp_path.glob("run*"))
    for run in runs:
        if (run / "summary.json").exists():
            _runs.assert_same_weights(run, reference)
    assert (runs[-1] / "summary.json").exists()
    # The record of the run has no gaps and no repetitions either.
    timeless = ("update", "epoch", "lr")
    records = [{key: record[key] for key in timeless} for record in _runs.metrics(runs[-1])]
    updates = [record["update"] for record in records]
    assert updates == sorted(set(updates))
    assert _runs.metrics(runs[-1], "eval") == _runs.metrics(reference, "eval")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on(
    number: int, status: int, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    process = _runs.start(_runs.arguments(output, *SETTINGS, "checkpoint.every_steps=null"), log=log)
    metrics = output / "metrics.jsonl"
    while process.is_alive() and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 1):
        time.sleep(0.0005)
    os.kill(process.pid or 0, number)
    process.join()
    assert process.exitcode == status, log.read_text()
    saved = sorted((output / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    assert not (output / "summary.json").exists()
    assert "continue with --resume" in log.read_text()
    assert _runs.run(["train", f"--resume={output}"], log=log) == 0, log.read_text()
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
