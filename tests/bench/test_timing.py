"""The figures of one call, from the events of a profiler."""

import pytest
import torch

from inline_attention.bench.timing import Kernel, profiled, sample, synchronised


def test_launches_that_the_profiler_lost_are_made_up_for() -> None:
    kernel = Kernel.of("state_kernel", seconds=118e-6, launches=118, calls=10)
    assert kernel.launches == 12
    assert kernel.seconds == pytest.approx(12e-6)


def test_what_is_rare_stays_so() -> None:
    kernel = Kernel.of("Memset", seconds=6e-6, launches=2, calls=10)
    assert kernel.launches == 0.2
    assert kernel.seconds == pytest.approx(0.6e-6)


def test_operators_of_a_call() -> None:
    x = torch.ones(8, 8)
    kernels = {k.name: k for k in profiled(lambda: (x @ x) @ x, device=torch.device("cpu"), calls=3)}
    assert kernels["aten::mm"].launches == 2
    assert kernels["aten::mm"].seconds > 0


def test_a_call_without_operators_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw no kernel in 3 calls"):
        profiled(lambda: None, device=torch.device("cpu"), calls=3)


def test_mps_is_timed_until_it_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: events.append("wait"))
    device = torch.device("mps")
    sample(lambda: events.append("call"), device=device, repeats=2)
    assert events == ["wait", "call", "call", "wait"]
    events.clear()
    synchronised(lambda: events.append("call"), device)()
    assert events == ["call", "wait"]
