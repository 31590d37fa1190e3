"""The kernel functions φ of linear attention that have no parameters, with the gradient each one passes on."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAKY_SLOPE = 0.01
EXP_RATE = 0.2


class FeatureMap(NamedTuple):
    """`apply(x)` is φ(x); `backward(x, grad)` is φ'(x)·grad. Both element by element, in the dtype they are given."""

    apply: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _leaky_relu_backward(x: Tensor, grad: Tensor) -> Tensor:
    return torch.where(x > 0, grad, LEAKY_SLOPE * grad)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "identity": FeatureMap(lambda x: x, lambda x, grad: grad),
    "relu": FeatureMap(F.relu, lambda x, grad: grad * (x > 0)),
    "leaky_relu": FeatureMap(lambda x: F.leaky_relu(x, LEAKY_SLOPE), _leaky_relu_backward),
    "exp": FeatureMap(lambda x: torch.exp(EXP_RATE * x), lambda x, grad: EXP_RATE * torch.exp(EXP_RATE * x) * grad),
}
"""φ by name."""


def get_feature_map(name: str) -> FeatureMap:
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map={name!r} is unknown; expected one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]
