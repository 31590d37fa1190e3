"""The students of the study: their commands, their table, and one of them made."""

import json
from pathlib import Path

import pytest
from PIL import Image

from inline_attention.cli import build_parser, parse
from inline_attention.cli._training import split_settings
from inline_attention.cli.linearize import _flags
from inline_attention.models import create_model
from inline_attention.tasks.linearization import plan_linearization
from inline_attention.tasks.linearization.task import load_teacher, make_student
from study.__main__ import main
from study.expansion import TEACHER_SHA256
from study.grid import RECIPE, SEEDS
from study.linearization import (
    ACCURACY,
    CARRIED,
    EPOCHS,
    FIRST_EPOCHS,
    MAIN,
    RECIPES,
    STUDENTS,
    Result,
    Run,
    TeacherRun,
    build_runs,
    cells_of,
    collect,
    write_results,
)


def test_every_command_can_be_planned() -> None:
    for run in build_runs():
        words = run.arguments({}, Path("out"))
        if isinstance(run, TeacherRun):
            assert words[:2] == ["train", str(RECIPE)]
            continue
        args = parse(build_parser(words[0]), words[1:])
        model, overrides = split_settings(args.arguments)
        config = plan_linearization(overrides=overrides, flags=_flags(args, model)).config
        assert config.distill.enabled == (run.epochs > 0)
        assert run.epochs in (CARRIED, 0, config.schedule.epochs)
        assert bool(config.match.steps) == (run.epochs == 0 or run.row == "matched")
        assert config.seed == run.seed
        assert config.optim.lr == (4e-3 if run.row == "half_rate" else 8e-3)


def test_the_runs() -> None:
    made = build_runs()
    runs = [run for run in made if isinstance(run, Run)]
    assert len({run.name for run in made}) == len(made)
    assert {run.seed for run in runs if run.row == "tangent"} == {0, 1, 2}
    assert {run.epochs for run in runs if run.row == "inline"} == set(EPOCHS)
    order = [(run.row, run.epochs, run.seed) for run in runs]
    first = {(row, epochs, seed) for row in MAIN for epochs in FIRST_EPOCHS for seed in SEEDS}
    assert set(order[: len(first)]) == first
    assert order[0][1] == max(FIRST_EPOCHS)
    assert {row for row, _, _ in order[-6:]} <= set(RECIPES)
    teacher = made.index(TeacherRun("swin"))
    assert made[teacher + 1].row.startswith("swin_")
    assert not any(run.row.startswith("swin_") for run in made[:teacher])
    with pytest.raises(ValueError, match="there is no student mala; expected some of tangent, inline"):
        build_runs(["mala"])


def test_no_run_is_made_twice() -> None:
    """Without training the seeds are the same, and so are rows that differ in what training does."""
    runs = [run for run in build_runs() if isinstance(run, Run)]
    untrained = [run for run in runs if run.epochs == CARRIED]
    assert {run.seed for run in untrained} == {0}

    def made_with(run: Run) -> tuple[object, ...]:
        args = parse(build_parser("linearize"), run.arguments({}, Path("out"))[1:])
        model, overrides = split_settings(args.arguments)
        config = plan_linearization(overrides=overrides, flags=_flags(args, model)).config
        wanted = config.model
        form = (wanted.attention, wanted.anchors, wanted.feature_map, tuple(wanted.keep_softmax))
        return run.student.teacher, run.img_size, *form

    assert len({made_with(run) for run in untrained}) == len(untrained)
    assert not any(run.row == "no_labels" and run.epochs == 0 for run in runs)
    cells = cells_of([Result("tangent", CARRIED, 0, 37.7, 0, 1), Result("no_labels", 20, 0, 46.0, 50, 1)])
    assert cells["no_labels", CARRIED] == [37.7]
    assert ("tangent_plain", CARRIED) not in cells  # a row that has no run of its own is not shown


def test_the_control_has_no_linear_layer() -> None:
    args = parse(build_parser("linearize"), Run("softmax", 20, 0).arguments({}, Path("out"))[1:])
    model, overrides = split_settings(args.arguments)
    config = plan_linearization(overrides=overrides, flags=_flags(args, model)).config
    student, report = make_student(load_teacher(config), config.model, seed=0)
    assert not report.linear()
    assert student.state_dict().keys() == create_model("softmax_deit_study").state_dict().keys()


def test_the_readme_counts_the_runs_that_are_missing() -> None:
    root = Path(__file__).parents[2]
    record = root / "docs" / "results" / "linearization.json"
    recorded = {result.name for result in collect(Path("nowhere"), record)}
    assert f"| `linearize` | {len(build_runs(recorded=recorded))} |" in (root / "study" / "README.md").read_text()


def finish(out: Path, run: Run, top1: float) -> None:
    (out / run.name).mkdir(parents=True)
    found = {"top1": top1, "training_seconds": 50.0, "jobs": 2, "version": "0.2.0"}
    (out / run.name / ACCURACY).write_text(json.dumps(found))


def test_the_table(tmp_path: Path) -> None:
    for run, top1 in ((Run("tangent", 0, 0), 38.0), (Run("tangent", 20, 0), 46.0), (Run("tangent", 20, 1), 48.0)):
        finish(tmp_path, run, top1)
    text = write_results(tmp_path, scratch={"softmax_deit_study": 45.8})
    cells = [cell.strip() for cell in text.splitlines()[2].split("|")]
    assert cells == ["", STUDENTS["tangent"].title, "", "38.00", "", "", "", "47.00 ± 1.41", "", ""]
    assert json.loads((tmp_path / "linearization.json").read_text())["scratch"] == {"softmax_deit_study": 45.8}
    assert json.loads((tmp_path / "linearization.json").read_text())["teacher"] == TEACHER_SHA256
    assert (tmp_path / "linearization.png").exists()


def test_recorded_runs_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(tmp_path / "before", Run("inline", 20, 0), 49.0)
    write_results(tmp_path / "before", scratch={"softmax_deit_study": 45.8})
    record = tmp_path / "before" / "linearization.json"
    finish(tmp_path / "now", Run("inline", 20, 1), 47.0)
    words = ["linearize", "--rows", "inline", "--output", str(tmp_path / "now"), "--onto", str(record), "--list"]
    assert main(words) == 0
    listed = capsys.readouterr().out
    assert "inline-e20-s2 " in listed
    assert "inline-e20-s0 " not in listed
    assert "inline-e20-s1 " not in listed
    assert "48.00 ± 1.41" in write_results(tmp_path / "now", scratch={}, onto=record)


def test_the_last_epoch_is_judged(tmp_path: Path) -> None:
    stages = {CARRIED: "student.safetensors", 0: "match/checkpoints/last.safetensors"}
    stages[20] = "distill/checkpoints/last.safetensors"
    for epochs, place in stages.items():
        run = Run("tangent", epochs, 0)
        assert run.weights(tmp_path) == tmp_path / run.name / place


def test_jobs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["linearize", "--rows", "tangent", "--data", "tiny_imagenet=x", "--output", str(tmp_path)]
    assert main([*words, "--jobs", "0"]) == 2
    assert "--jobs is 0; expected 1 or more" in capsys.readouterr().err


def test_data_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["linearize", "--rows", "imagenette", "--output", str(tmp_path)]) == 2
    assert "no data for imagenette, tiny_imagenet: give --data imagenette=FOLDER" in capsys.readouterr().err


@pytest.mark.slow
def test_one_student_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        for name in ("n01443537", "n01644900"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            Image.new("RGB", (64, 64), "red").save(tmp_path / "data" / split / name / "a.png")
    small = ["data.batch_size=2", "match.steps=1", "data.workers=0", "run.compile=false"]
    words = ["linearize", "--data", f"tiny_imagenet={tmp_path / 'data'}", "--output", str(tmp_path / "out")]
    words += ["--rows", "tangent_plain", "--jobs", "2", "--device", "cpu", "--set", *small, "schedule.epochs=1"]
    assert main(words) == 0
    assert (tmp_path / "out" / "tangent_plain-e20-s0" / "student.safetensors").exists()
    accuracy = json.loads((tmp_path / "out" / "tangent_plain-e20-s0" / ACCURACY).read_text())
    assert accuracy["training_seconds"] > 0
    assert capsys.readouterr().out.count(": top-1") == 2  # carried over, it is the tangent with residual
    assert main(words) == 0  # nothing is left to train
    assert ": top-1" not in capsys.readouterr().out
