"""The linear layers around an attention: what the first ones write, and what the last one needs."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class OutputProjection(NamedTuple):
    """The last step of an attention, before it is computed."""

    attended: Tensor  # (…, C), the outputs of the heads
    weight: Tensor  # (C, C)
    bias: Tensor  # (C,)


def unstack(projections: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, N, heads, d) as views of their projections

    A projection (B, N, m, heads, d) holds m of them, in this order.
    """
    # The gradient of unbind copies, that of squeeze does not.
    q, k, v = [y for x in projections for y in (x.unbind(2) if x.shape[2] > 1 else (x.squeeze(2),))]
    return q, k, v
