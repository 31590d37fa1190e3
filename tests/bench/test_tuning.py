"""`inline bench tune`, with a tiny space, in Triton's interpreter. Times are made up: later calls are faster.

`tests/ops/test_tuned.py` has files that other programs wrote.
"""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from inline_attention.bench.timing import Timing
from inline_attention.bench.tuning import candidates, one_launch, session, steps, tiles
from inline_attention.bench.tuning.one_launch import Sizes
from inline_attention.bench.tuning.steps import Group
from inline_attention.cli import main
from inline_attention.ops import fused_mlp, gpu, tuned
from inline_attention.ops.fused import config, short
from inline_attention.ops.fused.config import Steps
from inline_attention.ops.fused.plan import make_plan, step_settings

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the space is not tiny")

DEVICE = torch.device("cpu")
OPTIONS = dict(device=DEVICE, dtype=torch.float16)
STATE = Group("plain", "state", 32)
SIZES, LOWER = one_launch.sizes_to_tune()[0], Sizes(1, 2, 2, 16)
PARTS = ("steps", "short", "inference", "normed")


class Clock:
    """In the place of `measure`. What is timed later is faster, unless `gain` says otherwise."""

    def __init__(self):
        self.seconds, self.gain, self.timed = 1.0, 1.1, []

    def __call__(self, calls, **_):
        timings = {}
        for name in calls:
            self.timed.append(name)
            timings[name] = Timing(self.seconds, self.seconds, self.seconds, 2)
            self.seconds /= self.gain
        return timings


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(candidates, "measure", clock)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    return clock


@pytest.fixture
def folder(tmp_path, monkeypatch, clock):
    """Where files are, for few measurements."""
    monkeypatch.setenv("INLINE_TUNED", str(tmp_path / "tuned"))
    tuned.tables_of.cache_clear()
    items = dict(steps=[STATE], short=[SIZES, LOWER])
    for name, some in items.items():
        monkeypatch.setitem(session.PARTS, name, replace(session.PARTS[name], items=lambda some=some: some))
    yield tmp_path / "tuned"
    tuned.tables_of.cache_clear()


def tune(names=PARTS, **options):
    lines = []
    path, content = session.tune(names, log=lines.append, **OPTIONS, **options)
    return path, content, lines


def steps_in_use(kernel="state", effort="plain"):
    return tuned.rows(DEVICE, "steps", effort, kernel, 32)


# The file


def test_what_is_measured_is_in_the_file_and_the_operations_choose_it(folder):
    path, content, lines = tune()
    assert path == tuned.place_of(tuned.card_of(DEVICE))
    assert json.loads(path.read_text()) == content
    assert list(folder.iterdir()) == [path], "no unfinished file"
    assert content["facts"] == tuned.facts_of(tuned.card_of(DEVICE))
    assert sum(line.startswith("[") for line in lines) == 6
    assert "[1/6] steps plain state 32: 16 tokens, 1 warps, 2 stages (1.10 times as fast)" in lines

    tuned.tables_of.cache_clear()  # another process
    assert steps_in_use() == (((16, 1, 2, 0),),)
    assert steps_in_use("grad") is None
    cuda = torch.device("cuda")  # the kernels' choices ask for a GPU
    (first, second) = fused_mlp.wins_of(cuda, 16, 32, "inference")
    assert (first[:2], second[:2]) == ((13, 27), (28, fused_mlp.ANY))
    assert fused_mlp.fits(fused_mlp.Tile(*first[2]), 16, torch.float16, gpu.INTERPRETER)
    assert [win[:2] for win in fused_mlp.wins_of(cuda, 16, 48, "normed")] == [(13, fused_mlp.ANY)]
    assert [win[:4] for win in short.wins_of(cuda, 16, True)] == [(2, 6, 1, 3), (6, 13, 1, 3)]


def test_the_next_call_measures_nothing_again(folder, clock):
    tune()
    number = len(clock.timed)
    tune()
    assert len(clock.timed) == number
    tune(again=True)
    assert len(clock.timed) == 2 * number


def test_an_interrupted_call_keeps_what_it_measured(folder, clock, monkeypatch):
    _, whole, _ = tune()
    monkeypatch.setenv("INLINE_TUNED", str(folder / "interrupted"))
    clock.seconds = 1.0
    part, left = session.PARTS["inference"], [2]

    def time(item, **options):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return part.time(item, **options)

    monkeypatch.setitem(session.PARTS, "inference", replace(part, time=time))
    with pytest.raises(KeyboardInterrupt):
        tune()
    content = tuned.read(tuned.place_of(tuned.card_of(DEVICE)), tuned.card_of(DEVICE))
    assert set(content["measured"]["inference"]) == {"20 16 32"}
    assert "inference" not in content["tables"], "other numbers of rows decide too"
    assert "steps" in content["tables"]

    monkeypatch.setitem(session.PARTS, "inference", part)
    _, content, lines = tune()
    assert [line.split(":")[0] for line in lines if line.startswith("[")] == [
        "[1/2] inference 40 16 32", "[2/2] normed 20 16 48"
    ]  # fmt: skip
    assert content["tables"] == whole["tables"]


def test_no_measurement_begins_after_the_time(folder, clock):
    _, content, _ = tune(minutes=0)
    assert clock.timed == []
    assert session.missing(content, PARTS)["steps"] == [STATE]


def test_a_failed_measurement_is_tried_again(folder, monkeypatch):
    part = session.PARTS["short"]

    def time(item, **options):
        if item == LOWER:
            raise torch.OutOfMemoryError("out of memory")
        return part.time(item, **options)

    monkeypatch.setitem(session.PARTS, "short", replace(part, time=time))
    _, content, lines = tune()
    assert any("short 1 2 2 16: failed: OutOfMemoryError: out of memory" in line for line in lines)
    assert "short" not in content["tables"]
    assert "normed" in content["tables"]
    monkeypatch.setitem(session.PARTS, "short", part)
    _, content, lines = tune()
    assert sum(line.startswith("[") for line in lines) == 1
    assert len(content["tables"]["short"]["16 made"]) == 2


def test_a_measurement_that_breaks_the_gpu_is_not_tried_again(folder, monkeypatch):
    """After an illegal access every call of the process fails, and what it would measure is worth nothing."""

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(session.torch.cuda, "is_available", lambda: True)
        patch.setattr(session.torch.cuda, "synchronize", broken)
        row = dict(half=[20, 16, 48], micros={}, failed={})
        part = replace(session.PARTS["normed"], time=lambda item, **options: row)
        patch.setitem(session.PARTS, "normed", part)
        with pytest.raises(ValueError, match=r"failed: RuntimeError: CUDA .*; the same command goes on"):
            tune(["normed"])
    _, content, lines = tune(["normed", "steps"])
    assert [line.split(":")[0] for line in lines if line.startswith("[")] == ["[1/1] steps plain state 32"]
    assert set(content["tables"]) == {"steps"}


def test_a_file_of_other_versions_is_measured_anew(folder):
    path, content, _ = tune()
    content["facts"]["triton"] = "3.0.0"
    path.write_text(json.dumps(content))
    _, content, lines = tune(["normed"])
    assert any("measured again: it was measured with triton 3.0.0" in line for line in lines)
    assert set(content["tables"]) == {"normed"}


@pytest.mark.parametrize("text", ["my thesis", None])
def test_a_file_of_something_else_stays(text, tmp_path, folder, monkeypatch):
    path = tmp_path / "named.json"
    monkeypatch.setenv("INLINE_TUNED", str(path))
    facts = tuned.facts_of(tuned.card_of(DEVICE)._replace(name="A GPU"))
    text = text or json.dumps(dict(facts=facts, tables={}, measured={}))
    path.write_text(text)
    with pytest.raises(ValueError, match=r"named\.json cannot be used: it is .*; remove it, or name another in INLINE"):
        tune()
    assert path.read_text() == text


def test_every_table_has_a_part():
    assert set(session.PARTS) == set(tuned.SHAPES)
    assert set(fused_mlp.USES) < set(session.PARTS)
    with pytest.raises(ValueError, match="there is no part step; expected some of steps, short, inference"):
        session.tune(["step"], log=print, **OPTIONS)


def test_every_part_is_what_its_kernels_take(folder):
    """A measurement of each part, and an entry from it."""
    for name in ("projected", "training"):
        _, content, _ = tune([name])
        assert content["tables"][name]["16 32"], name


@pytest.mark.slow
def test_processes_compile_the_kernels(folder, capfd):
    _, content, lines = tune(["steps"], jobs=2)
    assert "steps: compiles 2 kernels" in lines
    assert content["tables"]["steps"]
    assert "Traceback" not in capfd.readouterr().err


# Candidates


def test_a_candidate_that_cannot_run_or_is_wrong_is_not_timed(clock):
    right = torch.ones(4)
    calls = dict(
        base=lambda: [lambda: right],
        close=lambda: [lambda: (right + 1e-3).half()],
        wrong=lambda: [lambda: right + 1],
        nan=lambda: [lambda: right * torch.nan],
        unmade=lambda: 1 / 0,
        fails=lambda: [lambda: right.view(5)],
        several=lambda: [lambda: right] * 4,
    )
    timings, failed = candidates.time_calls(calls, device=DEVICE, effort=None)
    assert list(timings) == ["base", "close", "several"]
    assert timings["several"].median * 4 * 1.1**2 == pytest.approx(timings["base"].median), "of one call"
    assert failed["wrong"].startswith("wrong: differs")
    assert failed["nan"].startswith("wrong: differs")
    assert "ZeroDivisionError" in failed["unmade"]
    assert "RuntimeError" in failed["fails"]
    assert candidates.differs((right, right), (right, right)) is None
    assert candidates.differs((right, right * 0), (right, right))


def test_all_are_timed_alike(clock, monkeypatch):
    """If one call cannot be captured, no graph is timed: it would win against launches from Python."""
    right = torch.ones(4)
    in_turn, graphs = candidates.in_turn, iter([True, False])
    timed = []

    def capture(calls, device):
        if device.type == "cuda":
            return (lambda: timed.append("graph")), next(graphs)
        return in_turn(calls, device)

    monkeypatch.setattr(candidates, "in_turn", capture)
    monkeypatch.setattr(candidates, "measure", lambda calls, **_: [call() for call in calls.values()] and {})
    calls = dict(one=lambda: [lambda: right], other=lambda: [lambda: right])
    candidates.time_calls(calls, device=torch.device("cuda"), effort=None)
    assert timed == []


# Steps


def test_a_small_gain_changes_nothing(folder, clock):
    clock.gain = 1.02
    _, content, lines = tune(["steps"])
    assert any(line.endswith("as it is") for line in lines)
    assert content["tables"]["steps"] == {}
    assert steps_in_use() is None


def test_the_fastest_is_timed_with_fewer_registers(folder, monkeypatch):
    """Their number reaches the launch, in half precision, and the file."""
    monkeypatch.setattr(steps, "REGISTERS", (128,))
    _, content, lines = tune(["steps"])
    assert any("16 tokens, 1 warps, 2 stages, 128 registers" in line for line in lines)
    assert content["tables"]["steps"] == {"plain state 32": [[[16, 1, 2, 128]]]}
    tuned.tables_of.cache_clear()
    q = torch.empty(1, 9, 1, 32)
    plan = make_plan(q, q, q, None, (3, 3), 0)
    limits = [step_settings("state", "plain", plan, dtype).get("maxnreg") for dtype in (torch.float16, torch.float32)]
    assert limits == [128, None]


def test_the_fastest_on_all_cases_counts():
    rows = [
        dict(steps=each, case=case, micros=micros)
        for each, (a, b) in {None: (4.0, 9.0), Steps(16, 1, 2): (1.0, 16.0), Steps(32, 1, 2): (0.1, None)}.items()
        for case, micros in (("a", a), ("b", b))
    ]
    assert steps.mean_micros(rows) == pytest.approx({None: 6.0, Steps(16, 1, 2): 4.0})


@pytest.mark.parametrize("masked", [False, True])
def test_steps_that_do_not_fit_are_skipped(masked, folder, clock, monkeypatch):
    """Whether that shows in the measured call, or only with masks, which nobody timed."""
    monkeypatch.setattr(steps, "SPACE", [Steps(16, 1, 2), Steps(16, 2, 4)])
    launch = gpu.launch

    def limited(kernel, grid):
        def start(*args, **options):
            if options.get("num_stages") == 4 and options["HAS_MASK"] >= masked:
                raise RuntimeError("out of resource: shared memory")
            return launch(kernel, grid)(*args, **options)

        return start

    monkeypatch.setattr(gpu, "launch", limited)
    _, content, _ = tune(["steps"])
    assert content["tables"]["steps"] == {"plain state 32": [[[16, 1, 2, 0]]]}
    rows = content["measured"]["steps"]["plain state 32"]["rows"]
    errors = {tuple(row["steps"] or ()): row["error"] for row in rows}
    assert errors[16, 1, 2, 0] is None
    assert ("out of resource" in (errors[16, 2, 4, 0] or "")) != masked


def test_steps_of_wrong_results_are_skipped(folder, monkeypatch):
    monkeypatch.setattr(steps, "SPACE", [Steps(16, 1, 2), Steps(16, 2, 4)])
    launch = gpu.launch

    def wrong(kernel, grid):
        def start(*args, **options):
            launch(kernel, grid)(*args, **options)
            if options.get("num_stages") == 4:
                args[6].mul_(2)  # the sums of the kernel's parts

        return start

    monkeypatch.setattr(gpu, "launch", wrong)
    _, content, _ = tune(["steps"])
    assert content["tables"]["steps"] == {"plain state 32": [[[16, 1, 2, 0]]]}


def test_no_steps_fit(folder, monkeypatch):
    def full(kernel, grid):
        raise RuntimeError("out of resource")

    monkeypatch.setattr(gpu, "launch", full)
    _, content, lines = tune(["steps"])
    assert "out of resource" in lines[-1]
    assert content["tables"] == {}


def test_settings_are_applied_to_one_kernel_of_one_attention(folder):
    with steps.applied(steps.Setting("tangent", "grad", Steps(32, 4, 3))):
        assert steps_in_use("grad", "weighted") == (((32, 4, 3, 0),),)
        assert steps_in_use("grad") is steps_in_use("state", "weighted") is None
    assert steps_in_use("grad", "weighted") is None


def test_every_kernel_and_attention_is_tuned():
    groups = set(steps.groups())
    assert {(group.effort, group.kernel) for group in groups} == {
        (effort, kernel) for effort, kernels in config.STEPS.items() for kernel in kernels
    }
    assert all(group.settings for group in groups)


# Tiles


def half(rows, compiled, **micros):
    named = {"(64, 32, 4, 2, 1)": micros["tile"]} | (
        {"(16, 32, 4, 2, 8)": micros["split"]} if "split" in micros else {}
    )
    return dict(half=[rows, 192, 768], micros={"compiled": compiled} | named, failed={}, flops=1)


def test_a_win_reaches_halfway_to_what_was_timed():
    timed = [half(100, 10.0, tile=9.0, split=5.0), half(400, 10.0, tile=5.0), half(1600, 10.0, tile=9.9)]
    first, second = (16, 32, 4, 2, 8), (64, 32, 4, 2, 1)
    assert tiles.wins_of(timed) == {(192, 768): [(66, 199, first), (200, 799, second)]}
    timed[2] = half(1600, 10.0, tile=9.0)
    assert tiles.wins_of(timed)[192, 768][-1] == (800, fused_mlp.ANY, second)
    lost = [half(100, 5.0, tile=5.0), dict(half=[400, 192, 768], micros={}, failed={"compiled": "no memory"}, flops=1)]
    assert tiles.wins_of(lost) == {(192, 768): []}
    assert tiles.describe(lost[1]) == "failed: no memory"
    assert "failed" in tiles.line_of(lost[1])


def test_tiles_are_split_where_multiprocessors_are_idle(monkeypatch):
    monkeypatch.setattr(fused_mlp, "TILES", (fused_mlp.Tile(64, 64, 4, 2), fused_mlp.Tile(128, 64, 8, 3)))
    monkeypatch.setattr(gpu, "limits_of", lambda device: gpu.Limits(108, 227 * 1024))

    def found(rows, use):
        return {(tile.rows, tile.splits) for tile in tiles.tiles_for(tiles.Half(rows, 192, 768), use, **OPTIONS)}

    assert found(4097, "inference") == {(64, 1), (64, 2), (64, 4), (128, 1), (128, 2), (128, 4), (128, 8)}
    assert found(50_432, "inference") == {(64, 1), (128, 1)}
    assert found(197, "training") > found(197, "inference"), "which reads float32 weights, and has less room"


# One launch


def sizes_row(batch, side, heads, today, one):
    each = {"today": today, "(64, 32, 4, 2, 7)": one}
    return dict(sizes=[batch, side, heads, 32], made=each, given={"today": today}, failed={}, quartiles={})


def test_a_win_of_one_launch_does_not_reach_a_shape_that_lost(monkeypatch):
    rows = [sizes_row(1, 14, 6, 10.0, 5.0), sizes_row(2, 14, 6, 10.0, 5.0), sizes_row(1, 24, 6, 10.0, 9.9)]
    tile = (64, 32, 4, 2, 7)
    monkeypatch.setattr(config, "CONFIG", config.Config())
    assert one_launch.wins_of(rows) == {(32, True): [(130, 294, 4, 9, tile), (130, 294, 8, 18, tile)], (32, False): []}
    rows.append(sizes_row(8, 14, 2, 10.0, 10.0))  # 16 heads
    assert one_launch.wins_of(rows)[32, True] == [(130, 294, 4, 9, tile), (130, 294, 12, 12, tile)]
    assert one_launch.describe(rows[0]) == "5.0 µs, several launches 10.0 µs (2.00)"
    assert "failed" in one_launch.line_of(rows[0]), "the given weight has no tile"


def test_several_launches_are_several_although_a_file_has_a_win(folder, monkeypatch):
    """A later measurement compares with the same as the first."""
    launched = []
    launch = gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda kernel, grid: launched.append(kernel.__name__) or launch(kernel, grid))
    monkeypatch.setattr(short, "winning_tile", lambda *_: pytest.fail("asked with a tile"))
    inputs = one_launch.draw(SIZES, 1, **OPTIONS)
    tile = short.TILES[0]
    for made in (True, False):
        (call,) = one_launch.calls_of(inputs, SIZES.side, made=made, tile=tile)
        launched.clear()
        call()
        assert launched == ["short_kernel"]
    tune(["short"])
    cuda = torch.device("cuda")
    assert short.wins_of(cuda, 16, True)
    seen = []
    monkeypatch.setattr(short, "winning_tile", lambda *_: None)
    monkeypatch.setattr(
        one_launch.fused, "attention", lambda *_, **__: seen.append(short.wins_of(cuda, 16, True)) or inputs[0][0]
    )
    one_launch.calls_of(inputs, SIZES.side, made=True, tile=None)[0]()
    assert seen == [()]


# The command


def test_the_command_prints_the_file_and_goes_on(folder, tmp_path, capsys, monkeypatch):
    words = ["bench", "tune", "--device", "cpu", "--jobs", "1", "--parts", "steps,normed"]
    assert main([*words, "--minutes", "0"]) == 0
    assert "2 measurements left or failed; the same command goes on" in capsys.readouterr().out
    copy = tmp_path / "copy.json"
    assert main([*words, "--json", str(copy)]) == 0
    path = tuned.place_of(tuned.card_of(DEVICE))
    assert f"processes that start from now on compute with {path}" in capsys.readouterr().out
    assert json.loads(copy.read_text()) == json.loads(path.read_text())
    assert main([*words, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(path.read_text())
    assert "all is measured" in printed.err

    # The copy, on another machine.
    monkeypatch.setenv("INLINE_TUNED", str(copy))
    tuned.tables_of.cache_clear()
    assert steps_in_use() == (((16, 1, 2, 0),),)


def test_ctrl_c_says_that_the_results_are_kept(folder, capsys, monkeypatch):
    def interrupt(item, **options):
        raise KeyboardInterrupt

    monkeypatch.setitem(session.PARTS, "normed", replace(session.PARTS["normed"], time=interrupt))
    assert main(["bench", "tune", "--device", "cpu", "--jobs", "1", "--parts", "normed,steps"]) == 130
    assert "what was measured is kept; the same command goes on" in capsys.readouterr().out
    assert steps_in_use()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "0"], "--jobs is 0; expected at least 1"),
        (["--minutes", "nan"], "--minutes is nan; expected at least 0"),
        (["--parts", "all"], "there is no part all; expected some of steps"),
        (["--json", "missing/folder.json"], "cannot be written"),
    ],
)
def test_bad_options_are_named(words, message, folder, capsys):
    assert main(["bench", "tune", *words]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_without_a_gpu_there_is_nothing_to_tune(folder, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    assert main(["bench", "tune"]) == 2
    assert "--device cpu: the kernels are Triton's and run on a GPU" in capsys.readouterr().err
