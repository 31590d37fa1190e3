"""The contenders of the operation compute what they are named after, and a run gives a result for each."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inline_attention.bench import op
from inline_attention.bench.record import read_record
from inline_attention.bench.timing import Effort, Timing, measure
from inline_attention.cli import main
from inline_attention.ops import attention_matrix, linear_attention, tangent_attention

CPU = torch.device("cpu")
SHORT = Effort(rounds=2, seconds=0)
CASES = ("2,3x4+1,2x8", "1,5,4x8", "3,1+2,2x16")


def inputs(text: str) -> op.Inputs:
    torch.manual_seed(0)
    return op.Inputs.draw(op.Case.parse(text), device=CPU, dtype=torch.float64)


@pytest.mark.parametrize(
    ("textbook", "attention"),
    [
        (op.linear_textbook, linear_attention),
        (op.mala_textbook, partial(linear_attention, normalization="magnitude", feature_map="elu_plus_one")),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_textbook_forms_of_the_family(case: str, textbook: Callable[..., Tensor], attention: Any) -> None:
    x = inputs(case)
    torch.testing.assert_close(textbook(x), attention(x.q, x.k, x.v, **op._options(x)))


@pytest.mark.parametrize("case", CASES)
def test_textbook_form_of_the_tangent(case: str) -> None:
    x = inputs(case)
    expected = tangent_attention(x.q, x.k, x.v, anchor=x.anchor, **op._options(x))
    torch.testing.assert_close(op.tangent_textbook(x), expected)


@pytest.mark.parametrize("name", ["rala", "polaformer"])
@pytest.mark.parametrize("case", CASES)
def test_textbook_forms_of_what_prepares_its_inputs(case: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(case)
    attend = op.linear_attention_projected
    monkeypatch.setattr(op, "linear_attention_projected", lambda *q, **o: attend(*q, **o | dict(backend="reference")))
    torch.testing.assert_close(op.CONTENDERS[f"{name}_textbook"].call(x), op.CONTENDERS[name].call(x))


def test_an_attention_is_compared_with_its_own_textbook_form() -> None:
    def result(name: str, seconds: float) -> dict[str, Any]:
        timing = Timing(seconds, seconds, seconds, 2)
        return asdict(op.OpResult("1, 2², 2×4", "forward", name, timing, 1.0, None, captured=True))

    names = {"linear": 1, "linear_plain": 2, "linear_textbook": 4, "textbook": 8, "fused": 2, "softmax": 4}
    rows = op.op_table([result(name, seconds) for name, seconds in names.items()]).splitlines()[2:]
    assert [row.split("|")[8].strip() for row in rows] == ["4.00", "", "1.00", "1.00", "4.00", "2.00"]


def gradients(name: str, x: op.Inputs) -> tuple[Tensor, ...]:
    contender = op.CONTENDERS[name]
    return torch.autograd.grad(contender.call(x), contender.leaves(x), x.grad_out)


@pytest.mark.parametrize("case", CASES)
def test_textbook_is_inline_attention(case: str) -> None:
    x = inputs(case)
    torch.testing.assert_close(op.textbook(x), op.reference(x))
    for one, other in zip(gradients("textbook", x), gradients("reference", x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", CASES)
def test_softmax_is_softmax(case: str) -> None:
    x = inputs(case)
    matrix = attention_matrix(x.q, x.k, kind="softmax")
    torch.testing.assert_close(op.softmax(x), (matrix @ x.v.transpose(1, 2)).transpose(1, 2))
    torch.testing.assert_close(op.softmax_math(x), op.softmax(x))
    assert op.softmax_wide(x).shape == x.q.shape


def test_odd_heads_have_no_half() -> None:
    with pytest.raises(ValueError, match="3 heads cannot be halved"):
        op.softmax_wide(inputs("1,2,3x8"))


def test_inputs_share_one_projection() -> None:
    """Contenders get views, as in a model. Contiguous q, k and v would favour those that copy them."""
    x = inputs(CASES[0])
    for i, y in enumerate((x.q, x.k, x.v)):
        assert y.untyped_storage().data_ptr() == x.qkv.untyped_storage().data_ptr()
        torch.testing.assert_close(y, x.qkv[:, :, i], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256,14+1,6x32", op.Case(256, 14, 14, 1, 6, 32)), ("2,3x4,1x8", op.Case(2, 3, 4, 0, 1, 8))],
)
def test_case_is_read(text: str, expected: op.Case) -> None:
    assert op.Case.parse(text) == expected


def test_cases_that_differ_are_written_differently() -> None:
    """The text of a case identifies its results."""
    texts = ["8,14,6x32", "8,14+1,6x32", "8,14+4,6x32", "8,14x7,6x32", "8,7x14,6x32"]
    assert len({str(op.Case.parse(text)) for text in texts}) == len(texts)


@pytest.mark.parametrize(
    "text", ["", "8,14", "8,14,6", "0,14,6x32", "8,14,6x0", "00,14,6x32", "8;14;6x32", "8,-14,6x32"]
)
def test_case_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected BATCH,SIDE"):
        op.Case.parse(text)


def test_floor_counts_bytes() -> None:
    """Forward: q, k, v, out. With the backward: seven more."""
    case = op.Case.parse("2,4,2x8")
    run = op.run_case(
        case,
        contenders=["textbook"],
        directions=list(op.FLOOR_UNITS),
        device=CPU,
        dtype=torch.float32,
        bandwidth=1.0,
        effort=SHORT,
    )
    forward, both = [results[0] for results in run]
    unit = 2 * 16 * 2 * 8 * 4
    assert (forward.floor_seconds, both.floor_seconds) == (4 * unit, 11 * unit)
    assert forward.timing is not None
    assert forward.timing.samples == SHORT.rounds


@pytest.mark.parametrize("captured", [True, False])
def test_table_says_whether_launches_were_timed(captured: bool) -> None:
    timing = Timing(1e-3, 9e-4, 1.1e-3, 5)
    result = op.OpResult("8, 14²+1, 6×32", "forward", "textbook", timing, 1e-4, None, captured)
    header, _, row = ([cell.strip() for cell in line.split("|")] for line in op.op_table([asdict(result)]).split("\n"))
    assert row[header.index("timed")] == ("graph" if captured else "calls")


def test_kernels_are_no_contender_on_a_cpu() -> None:
    everything = op.choose_contenders(None, torch.device("cuda"))
    assert op.choose_contenders(None, CPU) == [name for name in everything if name != "fused"] != everything


def test_a_contender_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: op.Inputs) -> Tensor:
        raise torch.OutOfMemoryError("no memory\nand much more text")

    monkeypatch.setitem(op.CONTENDERS, "softmax", op.Contender("softmax", fail, lambda x: (x.q,)))
    options = dict(device=CPU, dtype=torch.float32, bandwidth=1.0, effort=SHORT)
    case = op.Case.parse("1,2,2x4")
    [results] = op.run_case(case, contenders=["softmax", "textbook"], directions=["forward"], **options)
    assert results[0].timing is None
    assert results[0].error == "OutOfMemoryError: no memory"
    assert results[1].timing is not None


def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(x: op.Inputs) -> Tensor:
        if x.case.batch == 2:
            raise KeyboardInterrupt
        return op.softmax(x)

    monkeypatch.setitem(op.CONTENDERS, "softmax", op.Contender("softmax", interrupt, lambda x: (x.q,)))
    record = tmp_path / "op.json"
    cases = ["--case", "1,2,2x4", "2,2,2x4", "--contenders", "textbook,softmax", "--forward"]
    assert main(["bench", "op", "--device", "cpu", "--quick", *cases, "--json", str(record)]) == 130
    _, facts, results = read_record(record, kinds=["op"])
    assert (facts["device"], facts["compile modes"]) == ("cpu", "eager")
    assert [(r["case"], r["contender"]) for r in results] == [("1, 2², 2×4", "textbook"), ("1, 2², 2×4", "softmax")]


def test_json_can_take_the_place_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    case = ["--case", "1,2,2x4", "--contenders", "textbook", "--forward"]
    assert main(["bench", "op", "--device", "cpu", "--quick", *case, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert [result["contender"] for result in json.loads(out)["results"]] == ["textbook"]
    assert "InLine, textbook" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("direction", "expected"), [("forward", False), ("forward+backward", True)])
def test_a_forward_alone_keeps_nothing_for_a_backward(direction: str, expected: bool) -> None:
    seen = []

    def attend(x: op.Inputs) -> Tensor:
        out = 2 * x.q
        seen.append(out.requires_grad)
        return out

    op.bind(op.Contender("", attend, lambda x: (x.q,)), inputs(CASES[0]), direction)()
    assert seen == [expected]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock: calls append their duration to it, and nothing else takes time."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: sum(seconds))
    return seconds


def test_a_sample_lasts_as_long_as_it_should(clock: list[float]) -> None:
    timings = measure({"call": lambda: clock.append(0.25)}, device=CPU, effort=Effort(rounds=3, seconds=1.0))
    assert timings["call"] == Timing(0.25, 0.25, 0.25, 3)
    assert len(clock) == 4 + 3 * 4  # warm-up, and rounds of a second each


def test_a_figure_is_of_one_call_however_many_sets_of_inputs(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(x: op.Inputs) -> Tensor:
        clock.append(0.25)
        return x.q

    monkeypatch.setitem(op.CONTENDERS, "softmax", op.Contender("softmax", attend, lambda x: (x.q,)))
    monkeypatch.setattr(op, "draw_sets", lambda case, **options: [op.Inputs.draw(case, **options) for _ in range(3)])
    options = dict(device=CPU, dtype=torch.float32, bandwidth=1.0, effort=SHORT)
    [[result]] = op.run_case(op.Case.parse("1,2,2x4"), contenders=["softmax"], directions=["forward"], **options)
    assert result.timing == Timing(0.25, 0.25, 0.25, SHORT.rounds)


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = measure(calls, device=CPU, effort=Effort(rounds=3, seconds=0))
    assert list(timings) == ["a", "b", "c"]
    assert all(isinstance(timing, Timing) and timing.samples == 3 for timing in timings.values())
    # Warm-up of four calls each; then a sample of one call each, three times, and each begins once.
    assert "".join(order) == "aaaabbbbcccc" + "bca" + "cab" + "abc"


def test_nothing_to_measure() -> None:
    """No contender can run."""
    assert measure({}, device=CPU, effort=SHORT) == {}


def test_an_error_halfway_stops_one_contender_only() -> None:
    calls = iter(range(100))

    def fail_later() -> None:
        if next(calls) >= 5:
            raise RuntimeError("broken")

    timings = measure({"bad": fail_later, "good": lambda: None}, device=CPU, effort=SHORT)
    assert timings["bad"] == "RuntimeError: broken"
    assert isinstance(timings["good"], Timing)


def test_timing_is_the_median_and_quartiles() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(median=3.0, low=2.0, high=4.0, samples=5)
