"""The feature maps φ of linear attention that have no parameters, each for PyTorch and for the Triton kernels.

A new φ is an entry of `FEATURE_MAPS`. PyTorch then applies it before the kernels. To have it inside them, add a branch
to the Triton functions below and name that branch in the entry's `kernel`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LEAKY_SLOPE = 0.01
EXP_RATE = 0.2


class FeatureMap(NamedTuple):
    """φ of the last dimension, in the dtype of its input."""

    apply: Callable[[Tensor], Tensor]  # φ(x)
    backward: Callable[[Tensor, Tensor], Tensor]  # (x, grad) → φ'(x)·grad
    kernel: str | None = None  # its branch in the Triton functions below; None: PyTorch applies φ before the kernels
    expansion: int = 1  # features for each channel of x


def _leaky_relu_backward(x: Tensor, grad: Tensor) -> Tensor:
    return torch.where(x > 0, grad, LEAKY_SLOPE * grad)


def _elu_plus_one_backward(x: Tensor, grad: Tensor) -> Tensor:
    return torch.where(x > 0, grad, torch.exp(x.clamp(max=0)) * grad)


def _signed_halves(x: Tensor) -> Tensor:
    return torch.cat([F.relu(x), F.relu(-x)], -1)


def _signed_halves_backward(x: Tensor, grad: Tensor) -> Tensor:
    positive, negative = grad.chunk(2, -1)
    return positive * (x > 0) - negative * (x < 0)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "identity": FeatureMap(lambda x: x, lambda x, grad: grad, "identity"),
    "relu": FeatureMap(F.relu, lambda x, grad: grad.masked_fill(x <= 0, 0), "relu"),
    "leaky_relu": FeatureMap(lambda x: F.leaky_relu(x, LEAKY_SLOPE), _leaky_relu_backward, "leaky_relu"),
    "exp": FeatureMap(
        lambda x: torch.exp(EXP_RATE * x), lambda x, grad: EXP_RATE * torch.exp(EXP_RATE * x) * grad, "exp"
    ),
    "elu_plus_one": FeatureMap(lambda x: F.elu(x) + 1, _elu_plus_one_backward, "elu_plus_one"),
    "signed_halves": FeatureMap(_signed_halves, _signed_halves_backward, expansion=2),
}
"""φ by name."""

# The branches whose φ(0) is not zero. The kernels use φ(x) − φ(0) and add what φ(0) contributes at the end.
NONZERO_AT_ZERO = ("exp", "elu_plus_one")


def get_feature_map(name: str) -> FeatureMap:
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map={name!r} is unknown; expected one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]


if triton is not None:
    K_LEAKY_SLOPE = tl.constexpr(LEAKY_SLOPE)
    K_EXP_RATE = tl.constexpr(EXP_RATE)
    # exp(x) is exp2(x·log₂e), as a GPU computes it. `tl.exp` adds three instructions for results that are subnormal.
    K_LOG2E = tl.constexpr(math.log2(math.e))

    @triton.jit
    def feature_map(b_x, MAP: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types
        """φ(x) − φ(0), element by element, of float32"""
        if MAP == "relu":
            b_x = tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        elif MAP == "leaky_relu":
            b_x = tl.where(b_x > 0, b_x, b_x * K_LEAKY_SLOPE)
        elif MAP == "exp":
            b_x = tl.exp2(b_x * (K_EXP_RATE * K_LOG2E)) - 1.0
        elif MAP == "elu_plus_one":
            # The larger of x and exp(x) − 1, the second at most zero. The GPU clamps a sum to 0 … 1 for nothing. With a
            # comparison instead the compiler would convert both sides to half precision one by one.
            b_below = tl.clamp(1.0 - tl.exp2(b_x * K_LOG2E), 0.0, 1.0)
            b_x = tl.maximum(b_x, -1.0 * b_below, propagate_nan=tl.PropagateNan.ALL)
        else:
            tl.static_assert(MAP == "identity", "this feature map has no branch in the kernels")
        return b_x

    @triton.jit
    def feature_map_backward(b_x, b_grad, MAP: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types
        """φ'(x)·grad"""
        if MAP == "relu":
            b_grad = tl.where(b_x <= 0, 0.0, b_grad)
        elif MAP == "leaky_relu":
            b_grad = tl.where(b_x > 0, b_grad, b_grad * K_LEAKY_SLOPE)
        elif MAP == "exp":
            b_grad = tl.exp2(b_x * (K_EXP_RATE * K_LOG2E)) * K_EXP_RATE * b_grad
        elif MAP == "elu_plus_one":
            b_grad = tl.minimum(tl.exp2(b_x * K_LOG2E), 1.0, propagate_nan=tl.PropagateNan.ALL) * b_grad
        else:
            tl.static_assert(MAP == "identity", "this feature map has no branch in the kernels")
        return b_grad

    @triton.jit
    def add_map_at_zero(b_sum, b_x, MAP: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types
        """b_sum + φ(0)·b_x"""
        if MAP == "exp" or MAP == "elu_plus_one":
            b_sum += b_x
        return b_sum
