"""Exact GELU, x·Φ(x), without the error function, which takes most of a compiled kernel's instructions.

The Triton kernels compute the same (`kernels/blocks.py`). It is made for half precision: the error is up to 5e-7, and
that of the derivative up to 3e-6.
"""

import math
from typing import Any

import torch
from torch import Tensor

# log₂ Φ(−y) as a polynomial, lowest power first. Where y·Φ(−y) matters, up to GELU_END, its exponential is exact to
# float32: the largest error of y·Φ(−y) is 5e-8.
GELU_TAIL = (
    -0.999993085861206,
    -1.1512017250061035,
    -0.4587709903717041,
    -0.05341210216283798,
    0.008080714382231236,
    -0.0007692191866226494,
    3.309276144136675e-05,
)
GELU_END = 6.5


def _tail(x: Tensor) -> tuple[Tensor, Tensor]:
    """y = min(|x|, GELU_END) and Φ(−y) of float32 x"""
    y = x.abs().clamp(max=GELU_END)
    log = GELU_TAIL[-1] * y + GELU_TAIL[-2]
    for coefficient in GELU_TAIL[-3::-1]:
        log = log * y + coefficient
    return y, torch.exp2(log)


class _Gelu(torch.autograd.Function):
    """The backward has a formula of its own: the derivative of the polynomial takes twice the instructions."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        y, tail = _tail(wide)
        return (wide.relu() - y * tail).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives: the formula below has none at zero
            return torch.ops.aten.gelu_backward(grad, x)
        wide = x.float()
        _, tail = _tail(wide)
        density = torch.exp2(wide * wide * (-0.5 / math.log(2))) * (2 * math.pi) ** -0.5
        slope = torch.where(wide < 0, tail, 1 - tail) + wide * density
        return (grad * slope).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """max(x, 0) − |x|·Φ(−|x|). Compiled, it is one kernel with half the instructions of `F.gelu`; uncompiled, many."""
    out: Tensor = _Gelu.apply(x)
    return out
