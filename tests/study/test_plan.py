"""What is finished, what is missing, and how long that takes."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from documented import commands
from study_results import write_runs

from study.__main__ import build_parser, main
from study.grid import DEFAULT_GROUPS, MAIN, Run, build_runs
from study.plan import expected_seconds, finish_time, plan
from study.results import collect, read_report
from study.runner import START_SECONDS

ROOT = Path(__file__).parents[2]
RECORD, README = ROOT / "docs" / "results" / "study.json", ROOT / "study" / "README.md"


def test_finished_runs_are_not_missing(tmp_path: Path) -> None:
    write_runs(tmp_path, {row: [40.0, 40.1] for row in MAIN}, epochs=40)
    (found,) = plan(collect(tmp_path), ["main"])
    assert (len(found.runs), {run.seed for run in found.left}) == (15, {2})
    # Every recorded run took 10 seconds. Five runs start at the same time.
    assert found.minutes == pytest.approx((START_SECONDS + 10) / 60)


def test_runs_wait_for_a_place() -> None:
    """Two jobs: one trains 100 s and then 20 s, the other 30 s and then 50 s."""
    assert finish_time([100, 30, 50, 20], jobs=2) == 2 * START_SECONDS + 100 + 20
    assert finish_time([], jobs=2) == 0


def test_time_is_in_proportion_to_the_images(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [40.0]}, epochs=40)
    known = collect(tmp_path).runs
    assert expected_seconds(Run("tiny_imagenet", "inline", 120, 0, 4), known) == pytest.approx(30)
    assert expected_seconds(Run("tiny_imagenet", "inline_quarter_data", 160, 0, 4), known) == pytest.approx(10)


def test_nothing_is_guessed_of_other_data_and_other_costs(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [40.0]}, epochs=40)
    known = collect(tmp_path).runs
    for run in (
        Run("imagenette", "inline", 30, 0, 4),
        Run("tiny_imagenet", "inline_published", 300, 0, 4),  # other augmentation
        Run("tiny_imagenet", "swin_window2", 20, 0, 4),
        Run("tiny_imagenet", "softmax_pvt_tiny", 40, 0, 4),
    ):
        assert expected_seconds(run, known) is None
    assert plan(collect(tmp_path / "empty", may_be_empty=True), ["main"])[0].minutes is None


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--onto", str(RECORD), "--groups", "main", "gain"]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[:4]]
    assert lines[0] == ["group", "what it asks", "runs", "finished", "missing", "minutes"]
    assert lines[2][0::2] == ["main", "15", "0"]
    assert lines[3][0::2] == ["gain", "6", "6"]
    assert float(lines[3][5]) > 1
    assert main(["plan", str(tmp_path), "--groups", "mian"]) == 2
    assert "there is no mian in the grid" in capsys.readouterr().err


def test_recorded_runs_are_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = ["--list", "--output", str(tmp_path), "--groups", "shared_maps"]
    assert main(["train", *recorded]) == 0
    everything = capsys.readouterr().out.splitlines()
    assert main(["train", *recorded, "--onto", str(RECORD)]) == 0
    left = capsys.readouterr().out.splitlines()
    done = sum(
        len(row["seeds"])
        for setting in json.loads(RECORD.read_text())["settings"]
        if setting["epochs"] == 40
        for row in setting["rows"]
        if any(f"-e40-{row['row']}-s0" in line for line in everything)
    )
    assert len(left) == len(everything) - done


def test_one_command_makes_all_that_is_missing() -> None:
    lines = [
        command.words[3:] for command in commands(README) if command.words[:4] == ("python", "-m", "study", "train")
    ]
    first, *_ = (args for args in map(build_parser().parse_args, lines) if args.onto is not None)
    made = set(build_runs(first.groups or DEFAULT_GROUPS, rows=first.rows))
    left = {run for group in plan(read_report(RECORD)) for run in group.left}
    assert left
    assert left <= made


def test_the_minutes_of_the_page() -> None:
    """Those that recorded runs give: of the missing runs of each line."""
    found = read_report(RECORD)
    done = {result.run for result in found.runs}
    shown = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\d+) \| (\d+) \|", README.read_text(), flags=re.MULTILINE)
    assert len(shown) >= 5
    for names, runs, minutes in shown:
        left = [run for run in build_runs(re.findall(r"\w+", names)) if run not in done]
        seconds = [expected_seconds(run, found.runs) for run in left]
        assert (len(left), finish_time([s for s in seconds if s]) / 60) == (
            int(runs),
            pytest.approx(int(minutes), abs=0.5),
        )


def test_the_page_lists_every_file_in_plain_words() -> None:
    text = README.read_text(encoding="utf-8")
    modules = {path.name for path in README.parent.glob("*.py") if not path.name.startswith("__")}
    assert modules <= set(re.findall(r"`(\w+\.py)`", text))
    assert not re.findall(r"\b(?:visits?|travels?|comes? home|at home)\b", text, flags=re.IGNORECASE)


def test_what_is_packed_is_reported(tmp_path: Path) -> None:
    """The commands of the page pack runs without what is large."""
    there, home = tmp_path / "there", tmp_path / "home"
    write_runs(there / "runs" / "study", {"inline": [40.0], "linear": [39.0]}, epochs=120)
    write_runs(there / "runs" / "study", {"inline_published": [50.0]}, epochs=300)
    write_runs(there / "runs" / "study", {"softmax": [30.0]}, epochs=40)
    for folder in list((there / "runs" / "study").iterdir()):
        (folder / "checkpoints" / "step-1").mkdir(parents=True)
        for name in ("last.safetensors", "step-1/state.safetensors"):
            (folder / "checkpoints" / name).write_bytes(b"weights")
    (there / "runs" / "study" / ".compiled").mkdir()
    records, weights = re.findall(r"^(?:tar -czf|find) .*\bruns\b.*$", README.read_text(), flags=re.MULTILINE)
    for line in (records, weights):
        subprocess.run(line, shell=True, check=True, cwd=there)
    home.mkdir()
    subprocess.run(["tar", "-xzf", there / "runs.tar.gz"], check=True, cwd=home)
    assert [result.top1 for result in collect(home / "runs" / "study").runs] == [40.0, 39.0, 50.0, 30.0]
    assert not [path for path in home.rglob("*") if path.name in ("checkpoints", ".compiled")]
    subprocess.run(f"cat {there}/weights.tar.* | tar -xf -", shell=True, check=True, cwd=home)
    root = home / "runs" / "study"
    assert sorted(path.relative_to(root).parts for path in root.glob("*/checkpoints/*")) == [
        (f"tiny_imagenet-p4-{run}-s0", "checkpoints", "last.safetensors")
        for run in ("e120-inline", "e120-linear", "e300-inline_published")
    ]  # fmt: skip
