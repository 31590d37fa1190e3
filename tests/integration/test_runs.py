"""A miniature grid on the digits, from runs to report."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inline_attention.training.run_folder import LOCK
from study import runner as _runner
from study.__main__ import main
from study.claims import INCONCLUSIVE, NOT_TESTABLE
from study.grid import CHECK_EPOCHS, Run
from study.measures import analyse_runs
from study.runner import CLAIM, GridRunner, has_failed, is_finished

SHORT = ["schedule.epochs=2"]
ROWS = ["linear", "inline"]
DIGITS = {"digits": "digits"}
RUNS = [Run("digits", row, CHECK_EPOCHS, 0, 2) for row in ROWS]
ABSENT = "cuda" if torch.backends.mps.is_available() else "mps"  # no machine has both


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs."""
    out = tmp_path_factory.mktemp("study")
    outcome = GridRunner(out, paths=DIGITS, jobs=2, settings=[*SHORT, "device=cpu"]).make(RUNS)
    assert (outcome.failed, outcome.left) == ([], [])
    assert sorted(outcome.finished) == sorted(run.name for run in RUNS)
    return out


@pytest.mark.slow
def test_finished_runs_are_not_made_again(grid: Path) -> None:
    before = {run.name: (grid / run.name / "summary.json").stat().st_mtime_ns for run in RUNS}
    outcome = GridRunner(grid, paths=DIGITS).make(RUNS)
    assert (outcome.finished, outcome.failed, outcome.left) == ([], [], [])
    assert before == {run.name: (grid / run.name / "summary.json").stat().st_mtime_ns for run in RUNS}


@pytest.mark.slow
def test_runs_that_would_not_end_in_time_are_not_begun(grid: Path) -> None:
    """Finished runs give the time of a start and of an epoch."""
    long, of_a_row = Run("digits", "softmax", 100_000, 0, 2), Run("digits", ROWS[0], 100_000, 0, 2)
    lines: list[str] = []
    runner = GridRunner(grid, paths=DIGITS, minutes=1, whole_runs=True, log=lines.append)
    walls = [json.loads((grid / run.name / "wall.json").read_text()) for run in RUNS]
    assert all(0 < wall["under_way"] < wall["seconds"] for wall in walls)
    epochs = [(wall["seconds"] - wall["under_way"]) / CHECK_EPOCHS for wall in walls]
    slowest = max(wall["under_way"] for wall in walls) + 100_000 * max(epochs)
    assert runner.expected_seconds(long) == pytest.approx(slowest)
    assert runner.expected_seconds(of_a_row) == pytest.approx(walls[0]["under_way"] + 100_000 * epochs[0])
    assert runner.expected_seconds(Run("tiny_imagenet", "softmax", 20, 0, 4)) is None
    assert runner.make([long]).left == [long.name]
    assert not (grid / long.name).exists()
    assert lines == ["1 runs are left, but none can finish in time"]
    shutil.copytree(grid / RUNS[0].name, grid / "digits-p2-extra")  # no run of the grid's
    assert runner.expected_seconds(long) == pytest.approx(slowest)


@pytest.mark.slow
def test_report(grid: Path, tmp_path: Path) -> None:
    docs, readme = tmp_path / "docs", tmp_path / "README.md"
    readme.write_text("before\n<!-- results of the study -->\nof before\n<!-- end of the results -->\nafter\n")
    shutil.copytree(grid / RUNS[1].name, grid / "again" / RUNS[1].name)
    command = ["report", str(grid), "--max-images", "10", "--device", "cpu", "--docs", str(docs)]
    assert main(command) == 0
    results = json.loads((grid / "results.json").read_text())
    (setting,) = results["settings"]
    assert (setting["dataset"], setting["tokens"]) == ("digits", 17)
    by_row = {line["row"]: line for line in setting["rows"]}
    for run in RUNS:
        summary = json.loads((grid / run.name / "summary.json").read_text())
        line = by_row[run.row]
        assert line["top1"] == [summary["val_top1"]]
        assert line["std"] is None
        assert line["command"].startswith("inline train study/study.yaml --data DIGITS --seed 0")
        (analysis,) = line["analyses"]
        thresholds = [(found["tau"], found["rho"]) for found in analysis["confused"]]
        assert thresholds == [(0.03, 0.3), (0.1, 0.3), (0.1, 1.0), (0.3, 1.0)]
        for found in analysis["confused"]:
            assert 0 <= found["interval"][0] <= found["share_of_pairs"] <= found["interval"][1] <= 1
        for found in analysis["masking"]["outcomes"]:
            assert found["lost_interval"][0] <= found["lost"] <= found["lost_interval"][1]
        assert len(analysis["locality"]["interval"][0]) == len(analysis["locality"]["by_layer"])
        assert results["speed"]["rows"][f"digits-p2-{run.row}"]["train"] > 0
    # Digits are for trying the study out: no verdict rests on them.
    assert {claim["verdict"] for claim in results["claims"]} == {INCONCLUSIVE, NOT_TESTABLE}
    page = (grid / "tables.md").read_text()
    assert "| InLine (with residual) |" in page
    (commit,), (machine,) = setting["rows"][0]["commit"], setting["rows"][0]["machine"]
    assert f"not compiled, fp32, 16 images at a time, `{commit}` on {results['speed']['machine']}" in page
    assert f"\n- `{commit}` on {machine}, not as in the grid: `schedule.epochs=2`\n" in page  # below the table
    (again,) = results["again"]
    assert (again["run"], [again["top1"]]) == (RUNS[1].name, by_row["inline"]["top1"])
    assert f"| `{RUNS[1].name}` | {again['top1']:.2f} | {again['top1']:.2f} |" in page
    assert "| digits, 10 classes, 8 px, 17 tokens, 8 epochs | 1 |" in page  # of the gaps
    assert (
        "10 validation images, evenly spaced. The rank is that of 10. Masks of 9 tokens, where one image is 10 points"
        in page
    )
    assert "spread evenly has 0.69 times chance" in page  # 4 × 4 tokens: (10/4)² neighbours of 9
    open_ = [c["verdict"] for c in results["claims"]].count(INCONCLUSIVE)
    assert f"| 0 | 0 | {open_} |" in (grid / "results.md").read_text()
    assert all(line["command"] in page.splitlines() for line in setting["rows"])
    for name in ("curves.png", "speed.png", "causes.png"):
        assert (grid / name).stat().st_size > 5000
        assert f"({name})" in page
    linked = (docs / "results" / "study-tables.md").read_text()
    for name in ("curves", "speed", "causes"):
        assert f"(../images/study-{name}.png)" in linked
        assert (docs / "images" / f"study-{name}.png").read_bytes() == (grid / f"{name}.png").read_bytes()
    assert "(images/study-answer.png)" in (docs / "results.md").read_text()
    assert json.loads((docs / "results" / "study.json").read_text()) == results
    front = readme.read_text()
    assert front.startswith("before\n<!-- results of the study -->\n\nTrained here: digits")
    assert front.endswith("\n\n<!-- end of the results -->\nafter\n")
    assert "of before" not in front
    assert "| InLine (with residual) |" in front


@pytest.mark.slow
def test_an_interrupted_analysis_of_other_images_begins_again(grid: Path, tmp_path: Path) -> None:
    """Its parts would be of other images than the record says."""
    shutil.copytree(grid / RUNS[0].name, tmp_path / RUNS[0].name)
    path = tmp_path / RUNS[0].name / "analysis.json"
    path.write_text(json.dumps({"images": 5, "locality": {"images": 5}}))
    options = dict(paths=DIGITS, device=torch.device("cpu"), log=lambda line: None)
    analyse_runs(tmp_path, images=10, **options)
    found = json.loads(path.read_text())
    assert found["images"] == found["locality"]["images"] == found["masking"]["images"] == 10
    analyse_runs(tmp_path, images=5, **options)  # nothing is missing
    assert json.loads(path.read_text()) == found


@pytest.mark.slow
def test_what_fails_is_noted_and_made_again_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [Run("digits", "linear", CHECK_EPOCHS, seed, 2) for seed in (0, 1)]
    names = [run.name for run in runs]
    outcome = GridRunner(tmp_path, paths=DIGITS, settings=[*SHORT, "device=cpu", "optim.lr=1e30"]).make(runs[:1])
    assert outcome.failed == names[:1]
    shutil.copytree(tmp_path / names[0], tmp_path / names[1])
    assert all(has_failed(tmp_path / name) for name in names)
    assert "not finite" in (tmp_path / names[0] / "failure.txt").read_text()
    # The next call makes nothing, and says why.
    capsys.readouterr()
    assert main(["train", "--groups", "check", "--rows", "linear", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"failed earlier and skipped: {names[0]}, {names[1]}; --retry trains them again" in said
    assert "0 of 2 runs are finished" in said
    shown: list[tuple[int, int]] = []
    GridRunner(tmp_path, paths=DIGITS, show=lambda _, done, total: shown.append((done, total))).make(runs)
    assert shown == [(0, 2)]
    again = GridRunner(tmp_path, paths=DIGITS, settings=[*SHORT, "device=cpu"], retry=True).make(runs[:1])
    assert (again.finished, again.failed) == (names[:1], [])
    assert not has_failed(tmp_path / names[0])


@pytest.fixture
def hold() -> Iterator[Callable[[Path], None]]:
    """Has another process take the lock on a file, and keep it till the end of the test."""
    code = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'a')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "print('held', flush=True)\n"
        "time.sleep(600)"
    )
    processes: list[subprocess.Popen[str]] = []

    def start(path: Path) -> None:
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("file", [LOCK, CLAIM], ids=["trained", "claimed"])
def test_what_another_process_makes_is_skipped(file: str, tmp_path: Path, hold: Callable[[Path], None]) -> None:
    folder = tmp_path / RUNS[0].name
    folder.mkdir()
    hold(folder / file)
    lines: list[str] = []
    outcome = GridRunner(tmp_path, paths=DIGITS, log=lines.append).make(RUNS[:1])
    assert (outcome.elsewhere, outcome.left, outcome.failed) == ([folder.name], [folder.name], [])
    assert lines == [f"another process is training {folder.name}: skipped"]
    assert not (folder / "log.txt").exists()


@pytest.mark.slow
def test_a_run_whose_folder_was_locked_while_it_started_has_not_failed(
    tmp_path: Path, hold: Callable[[Path], None]
) -> None:
    folder = tmp_path / RUNS[0].name
    lines: list[str] = []

    def log(line: str) -> None:
        if line.startswith("inline train"):
            hold(folder / LOCK)
        lines.append(line)

    outcome = GridRunner(tmp_path, paths=DIGITS, settings=["device=cpu"], log=log).make(RUNS[:1])
    assert (outcome.elsewhere, outcome.failed) == ([folder.name], [])
    assert f"trains in {folder}: wait for it" in (folder / "log.txt").read_text()
    assert not has_failed(folder)
    assert lines[1:] == [f"another process is training {folder.name}: skipped"]


@pytest.mark.slow
def test_two_calls_share_a_grid(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "study", "train", "--groups", "check", "--rows", *ROWS,
               "--out", str(tmp_path), "--device", "cpu", "--set", *SHORT]  # fmt: skip
    calls = [subprocess.Popen(command) for _ in range(2)]
    assert [call.wait() for call in calls] == [0, 0]
    sessions = [json.loads(line) for line in (tmp_path / "sessions.jsonl").read_text().splitlines()]
    made = [name for session in sessions for name in session["finished"]]
    assert len(made) == len(set(made)) == 4
    assert all(session["finished"] for session in sessions)
    for name in made:
        assert len(json.loads((tmp_path / name / "environment.json").read_text())) == 1


@pytest.mark.slow
def test_interrupted_twice_nothing_is_waited_for_and_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halted run cannot save. Its time is recorded all the same."""
    monkeypatch.setattr(_runner, "STOP_SECONDS", 600.0)
    folder = tmp_path / RUNS[0].name
    processes: list[subprocess.Popen[bytes]] = []

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def show(epochs: dict[str, float | None], *_: int) -> None:
        if not processes and epochs.get(folder.name) is not None:
            processes.append(runner.running[0].process)
            processes[0].send_signal(signal.SIGSTOP)
            interrupt()
            threading.Timer(1, interrupt).start()

    settings = ["device=cpu", "schedule.epochs=10000"]
    runner = GridRunner(tmp_path, paths=DIGITS, settings=settings, show=show)
    outcome = runner.make(RUNS[:1])
    assert (outcome.interrupted, outcome.failed, outcome.left) == (True, [], [folder.name])
    assert processes[0].returncode == -signal.SIGKILL
    (session,) = (tmp_path / "sessions.jsonl").read_text().splitlines()
    assert json.loads(session)["seconds"] >= json.loads((folder / "wall.json").read_text())["seconds"] > 0


@pytest.mark.slow
def test_an_interrupted_grid_goes_on(tmp_path: Path) -> None:
    """SIGTERM to the grid: its run saves, and the next call continues it."""
    run = RUNS[1]
    command = [sys.executable, "-m", "study", "train", "--groups", "check", "--rows", run.row,
               "--out", str(tmp_path), "--device", "cpu", "--set", "schedule.epochs=40"]  # fmt: skip
    process = subprocess.Popen(command)
    metrics = tmp_path / run.name / "metrics.jsonl"
    while process.poll() is None and not metrics.exists():  # however long a busy machine takes to start it
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    assert not is_finished(tmp_path / run.name)
    assert not has_failed(tmp_path / run.name)
    assert list((tmp_path / run.name / "checkpoints").glob("step-*"))
    outcome = GridRunner(tmp_path, paths=DIGITS, settings=["schedule.epochs=40", "device=cpu"]).make([run])
    assert outcome.finished == [run.name]
    starts = json.loads((tmp_path / run.name / "environment.json").read_text())
    assert len(starts) == 2


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list", "--rows", "inline", "--data", "tiny_imagenet=images"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("inline train study/study.yaml --data ") for line in lines)
    assert any("--data images" in line for line in lines)
    assert any("--data IMAGENETTE" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "cifar=x"], "expected NAME=FOLDER with a name of tiny_imagenet"),
        (["--rows", "softmax"], "no data for imagenette, tiny_imagenet"),
        (["--set", "optim.lrr=1"], "did you mean optim.lr"),
        (
            ["--groups", "check", "--data", "digits=nowhere"],
            "--data digits=nowhere: data path 'nowhere' does not exist",
        ),
        (["--groups", "check", "--main-epochs", "0"], "--main-epochs is 0; expected 1 or more"),
        (["--groups", "check", "--rows", "hydra"], "there is no hydra in check; expected some of softmax"),
        (["--groups", "check", "--device", ABSENT], f"device {ABSENT} is not available here"),
        (["--groups", "check", "--jobs", "0"], "--jobs is 0"),
        (["--groups", "check", "--minutes", "0.1"], "--minutes is 0.1"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_has_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "neither finished runs nor probes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("summary.json", "", "summary.json' is not JSON"),
        ("metrics.jsonl", "", "there is no evaluation in metrics.jsonl"),
        ("metrics.jsonl", '{"kind": "ev', "metrics.jsonl' is not JSON"),
        ("environment.json", None, "environment.json"),
        ("config.yaml", "[", "config.yaml is not YAML"),
        ("analysis.json", "{", "analysis.json' is not JSON"),
    ],
)
@pytest.mark.slow
def test_a_damaged_run_is_named(
    file: str, content: str | None, message: str, grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / RUNS[0].name
    shutil.copytree(grid / RUNS[0].name, folder)
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)
    assert main(["report", str(tmp_path), "--no-analyses", "--no-speed", "--device", "cpu"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"the run {str(folder)!r} is damaged" in said
    assert message in said


def test_a_report_on_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--max-images", "0"]) == 2
    assert "--max-images is 0; expected 1 or more" in capsys.readouterr().err
