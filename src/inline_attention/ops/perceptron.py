"""The perceptron half of a transformer block: x + W2·gelu(W1·norm(x) + b1) + b2.

The reference is here; `fused_perceptron.py` has the same as one Triton kernel.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backends
from .backends import Backend, fused_perceptron
from .checks import check_shape, shape_of
from .precision import is_autocast_on, product_dtype


def add_perceptron(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    eps: float = 1e-5,
    backend: Backend = "auto",
) -> Tensor:
    """Layer norm, a linear layer, exact GELU, a second linear layer, and the sum with x.

    The kernel sums in float32. It writes hidden values only if gradients are needed: those that enter the GELU. "auto"
    takes it only for sizes and GPUs where it was measured to be faster than the compiled reference, without gradients
    or with them.

    Args:
        x: (…, C)
        norm_weight: (C,), the scale of the layer norm.
        norm_bias: (C,), its shift.
        w1: (H, C)
        b1: (H,)
        w2: (C, H)
        b2: (C,)
        eps: added to the variance.
        backend: as for `inline_attention`.

    Returns:
        (…, C), in the dtype of x, or of the products if that has more digits.
    """
    tensors = (norm_weight, norm_bias, w1, b1, w2, b2)
    _check(x, *tensors)
    dtype = product_dtype(x)
    tile = None
    if backends.HAS_TRITON:
        training = fused_perceptron.needs_gradients(x, *tensors)
        tile = fused_perceptron.winning_tile(x, w1.shape[0], dtype, training=training)
    if tile is None and backends.resolve(backend) == "auto":
        backend = "reference"
    if backends.choose(backend, x, why_not=lambda: fused_perceptron.why_not(x, dtype)) == "triton":
        return fused_perceptron.add_perceptron(x, tensors[:2], tensors[2:], eps, dtype, tile)
    hidden = F.linear(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps), w1, b1)
    return x + F.linear(F.gelu(hidden), w2, b2)


def pays_on(device: torch.device, width: int, hidden: int, *, training: bool) -> bool:
    """Whether the kernel was measured to be faster than the compiled reference on this GPU, for some number of tokens.

    In training, for forward and backward.
    """
    if not backends.HAS_TRITON or device.type != "cuda":
        return False
    return bool(fused_perceptron.wins_of(device, width, hidden, training=training))


def _check(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> None:
    if w1.ndim != 2:
        raise ValueError(f"w1 has shape {shape_of(w1)}; expected (hidden channels, channels)")
    hidden, width = w1.shape
    check_shape("norm_weight", norm_weight, (width,), w1=w1)
    check_shape("norm_bias", norm_bias, (width,), w1=w1)
    check_shape("b1", b1, (hidden,), w1=w1)
    check_shape("w2", w2, (width, hidden), w1=w1)
    check_shape("b2", b2, (width,), w1=w1)
    if x.ndim < 1 or x.shape[-1] != width:
        raise ValueError(f"x has shape {shape_of(x)}; expected (…, {width}), as w1 is {shape_of(w1)}")
    if w1.dtype != x.dtype and not is_autocast_on(x.device):
        raise ValueError(f"x is {x.dtype} and w1 is {w1.dtype}; cast one of them, or use torch.autocast")
