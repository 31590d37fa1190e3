"""The weight of the local residual, made from the mean token by a two-layer MLP per head.

The reference is here; `fused_local_weight.py` has the same as one Triton kernel.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backends
from .backends import Backend, fused_local_weight
from .checks import check_local_parameters, shape_of
from .local import TAPS


def make_local_weight(
    token_mean: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """W2·gelu(W1·x + b1) + b2 of each head, x the head's part of the mean token.

    Args:
        token_mean: (B, heads·d)
        w1: (heads, d, d), output channels first.
        b1: (heads, d)
        w2: (heads, 9·d, d); output c·9 + t is tap t of channel c, taps row-major.
        b2: (heads, 9·d)
        backend: as for `inline_attention`.

    Returns:
        (B, heads, d, 9), the `local_weight` of `inline_attention`, in the dtype that a linear layer would return.
    """
    check_local_parameters(w1, b1, w2, b2)
    heads, d, _ = w1.shape
    if token_mean.ndim != 2 or token_mean.shape[1] != heads * d:
        raise ValueError(f"the mean token has shape {shape_of(token_mean)}; expected (B, {heads * d})")
    if backends.choose(backend, token_mean, why_not=lambda: fused_local_weight.why_not(token_mean, d)) == "triton":
        return fused_local_weight.make_local_weight(token_mean, w1, b1, w2, b2)
    x = token_mean.unflatten(1, (heads, d))
    return _linear(F.gelu(_linear(x, w1, b1)), w2, b2).unflatten(2, (-1, TAPS))


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer per head: x (B, heads, in), weight (heads, out, in), bias (heads, out) → (B, heads, out)"""
    out = torch.einsum("bgi,goi->bgo", x, weight)
    return out + bias.to(out.dtype)  # under autocast in half precision, as a linear layer
