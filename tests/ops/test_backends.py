"""How a user chooses a backend."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small import create_small, image

pytest.importorskip("triton")

from kernel_cases import DEVICE

import inline_attention
from inline_attention import InLineAttention, set_backend, use_backend
from inline_attention.ops import backends, get_backend


@pytest.fixture(autouse=True)
def _default() -> Iterator[None]:
    yield
    set_backend("auto")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends chosen, in order."""
    seen: list[str] = []
    choose = backends.choose

    def recorded(*args: Any, **kwargs: Any) -> str:
        seen.append(choose(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(backends, "choose", recorded)
    return seen


def call(backend: Any = "auto") -> torch.Tensor:
    q = torch.ones(1, 2, 1, 16, device=DEVICE)
    return inline_attention.inline_attention(q, q, q, backend=backend)


def test_the_switch_is_what_auto_means(ran: list[str]) -> None:
    call()
    set_backend("triton")
    call()
    with use_backend("reference"):
        call()
        call(backend="triton")  # an argument wins
    call()
    assert get_backend() == "triton"
    assert ran[1:] == ["triton", "reference", "triton", "triton"]


def test_the_context_manager_restores_after_an_error() -> None:
    with pytest.raises(RuntimeError), use_backend("reference"):
        raise RuntimeError
    assert get_backend() == "auto"


def test_a_module_has_its_own(ran: list[str]) -> None:
    x = torch.ones(1, 4, 32, device=DEVICE)
    with use_backend("reference"):
        InLineAttention(32, 2, backend="triton").to(DEVICE)(x, (2, 2))
    assert ran == ["triton", "triton"]  # the local weight and the attention


def test_a_model_follows_the_switch(ran: list[str]) -> None:
    model, x = create_small("inline_deit_tiny", depth=1).to(DEVICE), image().to(DEVICE)
    with use_backend("triton"), torch.no_grad():
        fast = model(x)
    with use_backend("reference"), torch.no_grad():
        torch.testing.assert_close(fast, model(x))
    assert ran == ["triton", "triton", "reference", "reference"]


def test_a_compiled_call_follows_the_switch() -> None:
    """It is compiled again, once for each backend."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(lambda x: inline_attention.inline_attention(x, x, x), backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 4, 1, 16, device=DEVICE)
    expected = compiled(x)
    for backend in ("triton", "reference", "triton"):
        with use_backend(backend):
            torch.testing.assert_close(compiled(x), expected)
    assert 2 <= counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("use", [set_backend, lambda name: InLineAttention(32, 2, backend=name), call])
def test_unknown_names(use: Any) -> None:
    with pytest.raises(ValueError, match="backend='cuda' is unknown; expected one of auto, reference, triton"):
        use("cuda")
