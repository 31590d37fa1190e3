"""The local residual: a 3×3 neighbourhood sum of v with one kernel per channel and sample.

It is written as nine shifted products. A grouped convolution would have batch·channels groups, which exporters cannot
keep dynamic, and would need channels first. A compiler fuses products of a zero-padded map. In eager mode each product
covers only the overlap of the map with its shifted self, and memory is reused, because allocating costs more than the
product.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .tracing import needs_plain_operations

Grid = tuple[int, int]  # (height, width) of a token map

TAPS = 9
CENTRE = 4


class LocalSource(NamedTuple):
    """What a local weight is made from: tokens, of which it takes the mean, and the parameters of `make_local_weight`.

    In inference, `fused.short.WINS` names sizes for which the attention's kernel makes the weight.
    """

    x: Tensor  # (B, N, heads·d); absent tokens may hold anything
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


Region = tuple[slice, slice, slice]  # of a map (B, H, W, C)


def _shifted(x: Tensor) -> list[Tensor]:
    """What each tap reads at every position of a map (B, H, W, C): nine views of the zero-padded map"""
    height, width = x.shape[1:3]
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    return [padded[:, ky : ky + height, kx : kx + width] for ky, kx in (divmod(tap, 3) for tap in range(TAPS))]


def _overlaps(x: Tensor) -> list[tuple[Region, Region]]:
    """For each tap, the positions of a map (B, H, W, C) whose neighbour is on the map, and those neighbours."""

    def along(length: int) -> list[tuple[slice, slice]]:
        last = length - 1
        return [(slice(1, length), slice(last)), (slice(length), slice(length)), (slice(last), slice(1, length))]

    batch = slice(None)
    columns = along(x.shape[2])
    return [((batch, y, z), (batch, from_y, from_z)) for y, from_y in along(x.shape[1]) for z, from_z in columns]


def local_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_t weight_t ⊙ x at tap t of the 3×3 neighbourhood, zeros outside the map.

    x (B, H, W, C), weight (B, C, 9) with taps row-major (ky, kx) → (B, H, W, C)
    """
    # Nine contiguous rows (B, 1, 1, C), one per tap. With a stride of nine, products are five times slower on a CPU.
    rows = weight.mT.contiguous()[:, :, None, None].unbind(1)
    out = x * rows[CENTRE]
    if needs_plain_operations():
        for tap, term in enumerate(_shifted(x)):
            if tap != CENTRE:
                out = out + term * rows[tap]  # every converter has these two; coremltools has no addcmul
        return out
    if torch.compiler.is_compiling():
        for tap, term in enumerate(_shifted(x)):
            if tap != CENTRE:
                out = torch.addcmul(out, term, rows[tap])
        return out
    for tap, (at, neighbours) in enumerate(_overlaps(x)):
        if tap != CENTRE:
            out[at].addcmul_(x[neighbours], rows[tap])
    return out


def local_sum_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `local_sum` for x (B, H, W, C) and weight (B, C, 9)."""
    # Tap t of position i reads i + offset_t, so position j is read by j − offset_t: the same sum with reversed taps.
    grad_x = local_sum(grad, weight.flip(-1))
    if torch.compiler.is_compiling():
        taps = [(term * grad).sum((1, 2)) for term in _shifted(x)]
    else:
        memory = x.new_empty(x.numel())
        taps = []
        for at, neighbours in _overlaps(x):
            term = x[neighbours]
            product = torch.mul(term, grad[at], out=memory[: term.numel()].view(term.shape))
            taps.append(product.sum((1, 2)))
    return grad_x, torch.stack(taps, dim=1).mT
