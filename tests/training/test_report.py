import io
import itertools
import json
import re
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import training_runs as _runs
from matplotlib.figure import Figure
from PIL import Image

from inline_attention.tasks.classification.config import load_config
from inline_attention.tasks.classification.task import Classification
from inline_attention.training import plots
from inline_attention.training.report import Reporter, read_records, wandb_id


def reporter(folder: Path, *overrides: str, active: bool = True) -> Reporter:
    config = load_config("inline_deit_tiny", overrides=overrides)
    return Reporter(folder, config, headline=Classification.headline, active=active)


def record(update: int, **values: object) -> dict[str, object]:
    return {"kind": "train", "update": update, "epoch": update / 10, "loss": 2.0 / update, "lr": 1e-3, **values}


def test_records_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    with reporter(tmp_path, "log.tensorboard=false") as report:
        report.start(total_updates=10, done_updates=0)
        for update in (1, 2, 3):
            report.record(record(update))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "tra')  # a kill in the middle of a line
    with reporter(tmp_path, "log.tensorboard=false") as report:
        report.start(total_updates=10, done_updates=2)
        report.record(record(3, loss=float("nan")))
        assert [r["update"] for r in read_records(report.folder)] == [1, 2, 3]
        assert read_records(report.folder)[-1]["loss"] is None
    # They are repeated from there on, but nothing that was recorded is thrown away.
    aside = (tmp_path / "metrics-aside.jsonl").read_text().splitlines()
    assert json.loads(aside[0]) == record(3)
    assert aside[1:] == ['{"kind": "tra']


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\n", b"[1]\n", b"3\n", b'{"loss": 1}\n', b'{"kind": "train", "update": "x"}\n']
)
def test_damaged_metrics_do_not_stop_a_resume(
    damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [json.dumps(record(update)).encode() + b"\n" for update in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes(good[0] + damage + good[1])
    with reporter(tmp_path, "log.tensorboard=false") as report:
        report.start(total_updates=10, done_updates=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(good)
    assert (tmp_path / "metrics-aside.jsonl").read_bytes() == damage
    assert f"{tmp_path / 'metrics.jsonl'} has 1 damaged lines" in capsys.readouterr().out


def test_a_record_without_its_newline_stays_a_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)))  # a kill before the last byte
    with reporter(tmp_path, "log.tensorboard=false") as report:
        report.start(total_updates=10, done_updates=1)
        report.record(record(2))
        assert [r["update"] for r in read_records(report.folder)] == [1, 2]


def test_a_run_that_continues_has_no_summary(tmp_path: Path) -> None:
    """A job script asks the summary whether the run is complete."""
    with reporter(tmp_path, "log.tensorboard=false") as report:
        report.write_summary({"epochs": 1})
        report.start(total_updates=10, done_updates=10)
        assert (tmp_path / "summary.json").exists()
        report.start(total_updates=20, done_updates=10)
        assert not (tmp_path / "summary.json").exists()


def test_runs_of_equal_names_are_two_at_wandb(tmp_path: Path) -> None:
    one, other, old = (tmp_path / name / "seed0" for name in ("exp1", "exp2", "exp3"))
    for folder in (one, other, old / "wandb"):
        folder.mkdir(parents=True)
    assert wandb_id(one) != wandb_id(other)
    assert wandb_id(one) == wandb_id(one)
    assert wandb_id(old) == "seed0"  # of a run that version 0.1 began


def test_lines_of_a_schedule_in_steps_count_its_cool_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("schedule.steps=30", "schedule.cooldown_epochs=2", "schedule.warmup_steps=0", "log.tensorboard=false")
    with reporter(tmp_path, *overrides) as report:
        report.start(total_updates=50, done_updates=0)
        report.record(record(50))
    assert capsys.readouterr().out.startswith("update 50/50 ")


def test_tensorboard_holds_the_curves(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with reporter(tmp_path) as report:
        report.start(total_updates=10, done_updates=0)
        for update in (1, 2, 3):
            report.record(record(update))
        report.record({"kind": "eval", "update": 3, "epoch": 1, "val_top1": 50.0})
    with reporter(tmp_path) as report:  # resumed after update 2
        report.start(total_updates=10, done_updates=2)
        report.record(record(3, loss=7.0))
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0), (3, 7.0)]


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, active=False) as report:
        report.start(total_updates=10, done_updates=0)
        report.note("nothing")
        report.record(record(1))
        report.write_summary({})
        report.write_files({})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_plain_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, "log.tensorboard=false") as report:
        report.start(total_updates=300, done_updates=0)
        values = {"images_per_second": 1234.5, "waiting": 0.25, "memory": 2**31, "grad_norm": 1.5}
        report.record(record(1, epoch=1 / 6, **values), eta_seconds=3725)
        report.record({"kind": "eval", "update": 1, "epoch": 1, "val_top1": 61.5, "val_top5": 90.0})
        report.note("[bold]")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "epoch 0.17/300  loss 2.0000  lr 1.00e-03  gradient 1.50  1,234 images/s  waiting 25%  2.00 GiB  left 1:02:05",
        "epoch 1/300  loss 2.0000  val top-1 61.50%  lr 1.00e-03  gradient 1.50  1,234 images/s  waiting 25%  2.00 GiB"
        "  left 1:02:05",
        "[bold]",
    ]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_bar_on_a_terminal(tmp_path: Path, columns: int) -> None:
    settings = ("schedule.epochs=1", "log.every_steps=1")
    status, shown = _runs.run_on_terminal(_runs.arguments(tmp_path / "run", *settings), columns=columns)
    assert status == 0, shown
    for part in ("━", "10/10", "0:00:0", "loss ", "val top-1", "lr ", "images/s", "waiting", "GiB"):
        assert part in shown
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()
    assert max(len(line) for line in lines if "loss" in line) <= columns
    assert any("val top-1" in " ".join(pair) and "GiB" in " ".join(pair) for pair in itertools.pairwise(lines))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_full_disk_costs_only_lines_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines are complete, TensorBoard's thread prints no traceback, and the curves are drawn at the end."""
    pytest.importorskip("tensorboard")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with reporter(tmp_path) as report:
        report.start(total_updates=100, done_updates=0)
        report.record(record(1))
        # Python ignores SIGXFSZ, so that writing past the limit is an OSError like that of a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            for update in range(2, 40):
                report.record(record(update))
            report.write_summary({"padding": "x" * 2000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        report.record(record(40))
        updates = [r["update"] for r in read_records(report.folder)]
        report.write_files({})
    assert updates[0] == 1
    assert updates[-1] == 40
    assert 2 < len(updates) < 40
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(updates)
    assert (tmp_path / "curves.png").exists()
    assert not list(tmp_path.glob(".*.saving"))
    shown = capsys.readouterr()
    assert "could not write metrics.jsonl to" in shown.out
    assert "could not write summary.json to" in shown.out
    assert "Traceback" not in shown.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with reporter(tmp_path, "log.tensorboard=false") as report:
            report.start(total_updates=2, done_updates=0)
            report.note("hello")
            report.record(record(1))
            assert len(read_records(report.folder)) == 1
        monkeypatch.undo()


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints one line when writing begins to fail, and one when it works again."""
    with reporter(tmp_path, "log.tensorboard=false") as report:
        for _ in range(2):
            (tmp_path / "metrics.jsonl").mkdir()
            report.record(record(1))
            report.record(record(2))
            (tmp_path / "metrics.jsonl").rmdir()
            report.record(record(3))
            (tmp_path / "metrics.jsonl").unlink()
    shown = capsys.readouterr().out
    assert shown.count("could not write metrics.jsonl to") == 2
    assert shown.count("metrics.jsonl can be written to") == 2


def test_curves(tmp_path: Path) -> None:
    top1 = Classification.headline
    evaluations = [
        {"kind": "eval", "update": u, "epoch": u / 10, "val_loss": 1.0, "val_top1": 5.0 * u, "ema_top1": 4.0 * u}
        for u in (10, 20)
    ]
    plots.draw_curves([*map(record, range(1, 21)), *evaluations], tmp_path / "curves.png", headline=top1)
    plots.draw_curves([], tmp_path / "empty.png", headline=top1)
    for name in ("curves.png", "empty.png"):
        assert np.asarray(Image.open(tmp_path / name).convert("L")).std() > 5  # something was drawn
    assert len(list(tmp_path.iterdir())) == 2


def test_names_in_a_script_that_the_font_lacks(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def draw(path: Path) -> None:
        figure = Figure()
        figure.suptitle("\u732b")  # cat
        plots.save_figure(figure, path)

    with reporter(tmp_path) as report:
        report.write_files({"name.png": draw})
    assert (tmp_path / "name.png").exists()
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_summary_is_json(tmp_path: Path) -> None:
    with reporter(tmp_path, "log.tensorboard=false") as report:
        report.write_summary({"val_top1": 98.5})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"val_top1": 98.5}
