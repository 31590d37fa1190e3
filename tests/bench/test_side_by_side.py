"""Settings that are prepared side by side and timed in turn."""

import json
import os
from pathlib import Path

import pytest
import torch

from inline_attention.bench.model import Setting
from inline_attention.bench.side_by_side import READY, Worker
from inline_attention.bench.timing import Effort
from inline_attention.cli import main

SETTING = Setting("inline_deit_tiny", 32, 1, training=False)


def test_the_command_measures_all_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    sizes = ["--img-sizes", "32", "64", "48", "--batch-sizes", "1", "--infer"]
    options = ["--device", "cpu", "--threads", "1", "--quick", "--contenders", "reference", "--json", str(record)]
    assert main(["bench", "model", "inline_deit_tiny", *sizes, *options, "--jobs", "2"]) == 0
    results = json.loads(record.read_text())["results"]
    assert [r["img_size"] for r in results] == [32, 64, 48]  # the third is prepared after the others
    assert all(r["timing"] is not None for r in results)
    assert "ready: reference eager" in capsys.readouterr().out


def test_no_jobs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", "inline_deit_tiny", "--device", "cpu", "--jobs", "0"]) == 2
    assert "--jobs 0: expected 1 or more" in capsys.readouterr().err


def end(connection, *args):
    os._exit(3)


def end_after_an_answer(connection, *args):
    connection.send("a line")
    connection.send(READY)
    connection.recv()
    os._exit(3)


@pytest.mark.parametrize("work", [end, end_after_an_answer])
def test_a_process_that_ends_is_a_failed_result(work) -> None:
    options = dict(
        device=torch.device("cpu"), effort=Effort(2, 0.01), contenders=["reference", "peer"], modes=["eager"]
    )
    worker = Worker(SETTING, options, work)
    lines: list[str] = []
    worker.wait_until_ready(lines.append)
    results = worker.results(lines.append)
    assert [(r.contender, r.mode, r.timing) for r in results] == [
        (name, "eager", None) for name in ("reference", "peer")
    ]
    assert {r.error for r in results} == {"its process ended with exit status 3"}
    assert lines[-1] == f"failed: {SETTING}: its process ended with exit status 3"
