"""`optimize` changes how a model runs, and nothing else."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from inline_attention import optimize
from inline_attention.ops.backends import HAS_TRITON


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode='fastest' is unknown; expected one of default, reduce-overhead"):
        optimize(small(), mode="fastest")


def test_without_a_compiler_the_model_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    model = small()
    x = torch.randn(3, 4)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"not compiled: there is no C\+\+ compiler"):
        assert optimize(model) is model
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


@pytest.mark.skipif(not HAS_TRITON, reason="nothing is compiled for a GPU without Triton")
@pytest.mark.parametrize(
    ("device", "training", "mode", "expected"),
    [
        ("cuda", False, None, "reduce-overhead"),
        ("cuda", True, None, "default"),
        ("cpu", False, None, "default"),
        ("cuda", True, "reduce-overhead", "reduce-overhead"),
    ],
)
def test_graphs_are_replayed_where_it_is_safe(
    device: str, training: bool, mode: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(), torch.device(device):
        model = small().train(training)
    modes = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *, mode: modes.append(mode))
    optimize(model, mode=mode)
    assert modes == [expected]


@pytest.mark.slow
def test_compiled_model_keeps_its_type_names_and_results() -> None:
    model = small()
    x = torch.randn(3, 4)
    expected = model(x)
    names = list(model.state_dict())
    assert optimize(model) is model
    counter = torch._dynamo.utils.counters["stats"]
    before = counter["unique_graphs"]
    torch.testing.assert_close(model(x), expected)
    assert counter["unique_graphs"] == before + 1, "the call did not go through the compiler"
    assert list(model.state_dict()) == names
    assert isinstance(model, nn.Sequential)
