"""A run that is killed or stopped and resumed ends with the weights, bit for bit, of one that was left alone."""

import os
import signal
import time
from pathlib import Path

import pytest
import training_runs as _runs
from killed_runs import SETTINGS, assert_same_run, kill_and_resume, run_undisturbed

from inline_attention.training.checkpoint import find_damage


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """(run folder, seconds that the run took)"""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    reference, seconds = undisturbed
    for run in kill_and_resume(tmp_path, kills=kills, seconds=seconds, seed=kills):
        assert_same_run(run, reference)


@pytest.mark.parametrize(("number", "status", "workers"), [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 0)])
def test_a_signal_saves_and_the_run_can_be_continued(
    number: int, status: int, workers: int, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    """All processes get the signal at once, data loader workers too, as from a terminal or a scheduler."""
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


def test_a_damaged_newest_checkpoint_is_skipped(undisturbed: tuple[Path, float], tmp_path: Path) -> None:
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
