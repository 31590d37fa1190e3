"""The local residual: a 3×3 neighbourhood sum of v with one kernel per channel and sample.

It is written as nine shifted products rather than as a grouped convolution: the groups would number batch·channels,
which no exporter can keep dynamic, and tokens stay rows of channels from end to end.
"""

from torch import Tensor
from torch.nn import functional as F

TAPS = 9


def local_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_t weight_t ⊙ x at tap t of the 3×3 neighbourhood, zeros outside the map.

    x (B, H, W, C), weight (B, C, 9) with taps row-major (ky, kx) → (B, H, W, C)
    """
    height, width = x.shape[1:3]
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    out = None
    for tap in range(TAPS):
        ky, kx = divmod(tap, 3)
        term = padded[:, ky : ky + height, kx : kx + width] * weight[:, None, None, :, tap]
        out = term if out is None else out + term
    assert out is not None
    return out


def local_sum_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `local_sum` for x (B, H, W, C) and weight (B, C, 9)."""
    height, width = x.shape[1:3]
    # Tap t of position i reads i + offset_t, so j is read by j − offset_t: the same sum with the taps reversed.
    grad_x = local_sum(grad, weight.flip(-1))
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    grad_weight = weight.new_empty(weight.shape)
    for tap in range(TAPS):
        ky, kx = divmod(tap, 3)
        grad_weight[..., tap] = (padded[:, ky : ky + height, kx : kx + width] * grad).sum((1, 2))
    return grad_x, grad_weight
