"""Runs of one model share what they compile, and do not compile it at the same time."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from study import compiling, runner
from study.compiling import FOLDER, INTERRUPTED, CompileCache
from study.grid import Run
from study.runner import GridRunner

# In the place of a training: after a while the first record, then the summary.
RECORDS = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
time.sleep(0.3)
(folder / "metrics.jsonl").write_text('{"epoch": 1}')
time.sleep(0.3)
(folder / "summary.json").write_text('{"val_top1": 10.0}')
"""
RUNS = [Run("digits", row, 8, seed, 2) for seed in (0, 1) for row in ("linear", "inline")]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compiling, runner):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


def make(out: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """The runs in the order of their starts, each with those that had a record at that time."""
    starts: list[tuple[str, set[str]]] = []
    environments = []

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        folder = Path(arguments[arguments.index("--output") + 1])
        starts.append((folder.name, {path.parent.name for path in out.glob("*/metrics.jsonl")}))
        environments.append(options["env"])
        return real([sys.executable, "-S", "-c", RECORDS, str(folder)], **options)

    real = subprocess.Popen
    monkeypatch.setattr(runner.subprocess, "Popen", start)
    outcome = GridRunner(out, paths={"digits": "digits"}, jobs=4).make(RUNS)
    monkeypatch.setattr(runner.subprocess, "Popen", real)
    assert outcome.left == []
    assert all(Path(of["TRITON_CACHE_DIR"]).is_relative_to(out / FOLDER) for of in environments)
    return starts


def test_a_second_run_of_a_model_waits_for_the_first_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = make(tmp_path, monkeypatch)
    assert [name for name, _ in starts[:2]] == [run.name for run in RUNS[:2]]  # two models at the same time
    assert starts[1][1] == set()
    for name, recorded in starts[2:]:
        assert name.replace("-s1", "-s0") in recorded


def test_a_later_call_knows_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, monkeypatch)
    for run in RUNS:
        for name in ("metrics.jsonl", "summary.json"):
            (tmp_path / run.name / name).unlink()
    assert [recorded for _, recorded in make(tmp_path, monkeypatch)] == [set()] * 4


def test_seeds_and_rates_are_not_compiled() -> None:
    def model(row: str, seed: int = 0, epochs: int = 20) -> str:
        return Run("tiny_imagenet", row, epochs, seed, 4).model

    assert model("linear", 1, 40) == model("linear_half_rate") == model("linear_quarter_data") == model("linear")
    assert model("inline_published") == model("inline")
    assert len({model(row) for row in ("linear", "inline", "inline_gain", "inline_larger_start", "linear_deep")}) == 5
    assert Run("imagenette", "linear", 20, 0, 4).model != Run("imagenette", "linear", 20, 0, 8).model


def test_threads_take_turns_until_a_model_is_compiled(tmp_path: Path) -> None:
    cache, seen = CompileCache(tmp_path), []
    script = RECORDS.replace("time.sleep(0.3)", "print((folder / 'metrics.jsonl').exists()); time.sleep(0.3)", 1)

    def run() -> None:
        with open(tmp_path / f"{threading.get_ident()}.txt", "wb") as log:
            words = [sys.executable, "-S", "-c", script, str(tmp_path)]
            seen.append(cache.run(words, model="a", metrics=tmp_path / "metrics.jsonl", log=log))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.read_text() for path in tmp_path.glob("*.txt")) == ["False\n", "True\n", "True\n"]
    assert seen == [0, 0, 0]
    cache.closed = True
    with open(os.devnull, "wb") as log:
        assert cache.run([], model="a", metrics=tmp_path / "none", log=log) == INTERRUPTED


@pytest.mark.slow
def test_a_second_seed_compiles_nothing(tmp_path: Path) -> None:
    """What it needs is in the folder: it adds no graph."""

    def graphs() -> set[str]:
        return {path.name for path in (tmp_path / FOLDER).glob("inductor/fxgraph/*/*")}

    settings, found = ["run.compile=true", "schedule.epochs=1", "device=cpu"], []
    for seed in (0, 1):
        runs = [Run("digits", "linear", 8, seed, 2)]
        outcome = GridRunner(tmp_path, paths={"digits": "digits"}, settings=settings).make(runs)
        assert outcome.finished == [run.name for run in runs]
        found.append(graphs())
    assert found[0]
    assert found[0] == found[1]
