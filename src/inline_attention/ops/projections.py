"""q, k and v as projections write them: tensors (B, N, m, heads, d) that hold m of them each, in this order."""

from collections.abc import Sequence

from torch import Tensor


def unstack(projections: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, N, heads, d) as views of their projections"""
    # The gradient of unbind copies, that of squeeze does not.
    q, k, v = [y for x in projections for y in (x.unbind(2) if x.shape[2] > 1 else (x.squeeze(2),))]
    return q, k, v
