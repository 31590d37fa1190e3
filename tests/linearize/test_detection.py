"""Modules that compute attention are found by their code, whatever they are called."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import timm.layers
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.linearize import linearize
from inline_attention.linearize.detection import computes_attention


class Mixer(nn.Module):
    """A base without a telling name."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(*self.rows(x)).transpose(1, 2).flatten(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Fused(Mixer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class WrittenOut(Mixer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(12)).softmax(-1) @ v


class Einsum(Mixer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhij,bhjd->bhid", F.softmax(torch.einsum("bhid,bhjd->bhij", q, k), dim=-1), v)


class WithSoftmaxModule(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.normalise = nn.Softmax(dim=-1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(self.normalise(torch.matmul(q, k.mT)), v)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class OfAnotherFunction(Mixer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


class OfAFunctionThatItHolds(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.how: Callable[..., Tensor] = functools.partial(attend)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.how(q, k, v)


class InALambda(Mixer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (lambda: F.scaled_dot_product_attention(q, k, v))()


KINDS = [Fused, WrittenOut, Einsum, WithSoftmaxModule, OfAnotherFunction, OfAFunctionThatItHolds, InALambda]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_unknown_attention_beside_a_known_one_is_named_and_nothing_changes(kind: type[nn.Module]) -> None:
    model = nn.Sequential(timm.layers.Attention(24, 2), kind())
    assert model(torch.randn(2, 5, 24)).shape == (2, 5, 24)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"nothing was changed. 1 \(.*{kind.__name__}\): this module is not known"):
        linearize(model, local_residual=False)
    assert [type(module) for module in model.modules()] == kinds
    report = linearize(model, local_residual=False, keep_softmax="1")
    assert [layer.action for layer in report.layers] == ["→ tangent", "kept"]


class Both(Fused):
    """A block with an attention of its own beside a module that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.known = timm.layers.Attention(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.known(x) + super().forward(x)


def test_a_block_that_attends_itself_beside_a_known_module_is_named() -> None:
    for model, name in ((nn.Sequential(Both()), r"0 \("), (Both(), r"\(the model itself\) \(")):
        with pytest.raises(ValueError, match=rf"nothing was changed. {name}.*Both\): its own code computes attention"):
            linearize(model, local_residual=False)


class Classifier(nn.Module):
    """A softmax of classes, and one of a gate: neither is attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.gate, self.head = timm.layers.Attention(24, 2), nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x) * self.gate(x).softmax(-1)
        return F.softmax(self.head(x.mean(1)), dim=-1)


def test_a_softmax_alone_is_no_attention() -> None:
    assert len(linearize(Classifier(), local_residual=False).linear()) == 1


def test_an_overridden_method_is_not_read() -> None:
    class Mean(WrittenOut):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return v.mean(2, keepdim=True).expand_as(v)

    assert not computes_attention(Mean())
    assert computes_attention(WrittenOut())


@pytest.mark.parametrize(
    "build",
    [
        lambda: timm.create_model("convnext_tiny"),
        lambda: timm.create_model("mixer_s32_224"),
        lambda: timm.create_model("resnest14d"),
        lambda: torchvision.models.efficientnet_b0(),
    ],
)
def test_models_without_attention_between_tokens_have_none(build: Callable[[], Any]) -> None:
    with torch.device("meta"):
        model = build()
    assert not any(computes_attention(module) for module in model.modules())


@pytest.mark.parametrize("name", ["gcresnext26ts", "efficientvim_m1"])
def test_softmax_of_another_kind_is_left_alone(name: str) -> None:
    """A pooling with products, and a state space model."""
    if not timm.is_model(name):
        pytest.skip("this release of timm has no such model")
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=r"there is nothing to convert in .*left alone: it (is linear|pools)"):
        linearize(model)
