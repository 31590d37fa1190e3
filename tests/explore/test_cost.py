"""Costs are those of the named models. Measurements run one at a time, within a limit, and time each model."""

import pytest
import torch
from explored import CPU

from inline_attention.explore import cost
from inline_attention.explore.cost import Stopwatch
from inline_attention.explore.gate import Busy, Gate
from inline_attention.models.summary import SUMMARIES


def test_counts_are_those_of_the_registered_models() -> None:
    for kind in ("softmax", "inline"):
        counted = cost.count(kind, 224)
        assert counted.tokens == 197
        assert counted.macs == SUMMARIES[f"{kind}_deit_tiny"].macs


def test_softmax_alone_grows_faster_than_the_tokens() -> None:
    growth = {}
    for kind in ("softmax", "linear", "inline"):
        small, large = cost.count(kind, 224), cost.count(kind, 896)
        tokens = large.tokens / small.tokens
        growth[kind] = (large.macs / small.macs / tokens, large.activation_bytes / small.activation_bytes / tokens)
    for kind in ("linear", "inline"):
        assert growth[kind] == pytest.approx((1, 1), abs=0.02)
    macs, memory = growth["softmax"]
    assert macs > 2
    assert memory == pytest.approx(1, abs=0.02)  # no N×N weights are kept


def test_softmax_memory_is_what_a_forward_pass_keeps() -> None:
    """Counted without computing, and measured on a CPU."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    model = cost.deit_tiny("softmax")
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(torch.randn(1, 3, 224, 224))
    measured = sum(storage.nbytes() for place, storage in kept.items() if place not in parameters)
    assert cost.count("softmax", 224).activation_bytes == pytest.approx(measured, rel=0.02)


def test_a_measurement() -> None:
    events = list(Stopwatch(CPU, Gate(waiting=0)).measure((32,)))
    last = {event["kind"]: event for event in events if "kind" in event}
    assert set(last) == {"softmax", "linear", "inline"}
    assert all(event["samples"] == cost.ROUNDS for event in last.values())
    assert all(0 < event["low"] <= event["median"] <= event["high"] for event in last.values())
    assert [event["done"] for event in events] == list(range(events[0]["total"] + 1))


def test_a_measurement_ends_in_time() -> None:
    events = list(Stopwatch(CPU, Gate(waiting=0)).measure((32,) * 1000, seconds=0))
    assert len(events) == 3  # the start, one sample, and the message that it has ended
    assert "0 seconds, is over" in events[-1]["stopped"]


def test_a_measurement_ends_when_there_is_no_turn() -> None:
    gate = Gate(waiting=0, seconds=0.01)
    measurement = Stopwatch(CPU, gate).measure((32,))
    assert "stopped" not in next(measurement)
    with gate.turn():  # another computes
        (event,) = measurement
    assert "too many people" in event["stopped"]


def test_one_measurement_at_a_time() -> None:
    stopwatch = Stopwatch(CPU, Gate(waiting=0))
    first = stopwatch.measure((32,))
    next(first)
    with pytest.raises(Busy, match="another measurement is running"):
        next(stopwatch.measure((32,)))
    first.close()  # its visitor has gone
    assert next(stopwatch.measure((32,)))["done"] == 0
