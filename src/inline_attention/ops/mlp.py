"""The MLP half of a transformer block: x + W2·gelu(W1·norm(x) + b1) + b2, and the projection before it.

The reference is here; `fused_mlp.py` has the same as one Triton kernel.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backends
from .backends import Backend, fused_mlp
from .checks import check_linear, check_shape, shape_of
from .precision import product_dtype
from .projections import OutputProjection
from .tracing import needs_gradients


def add_mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    projection: OutputProjection | None = None,
    eps: float = 1e-5,
    backend: Backend = "auto",
) -> Tensor:
    """Layer norm, a linear layer, exact GELU, a second linear layer, and the sum with x.

    The kernel sums in float32. It writes hidden values only if gradients are needed: those that enter the GELU. "auto"
    takes it only for sizes and GPUs where it was measured to be faster than the compiled reference: without gradients,
    with them, or with a projection. Where gradients are needed, PyTorch computes the projection.

    Args:
        x: (…, C)
        norm_weight: (C,), the scale of the layer norm.
        norm_bias: (C,), its shift.
        w1: (H, C)
        b1: (H,)
        w2: (C, H)
        b2: (C,)
        projection: the end of the attention before this half. Its output is added to x first.
        eps: added to the variance.
        backend: as for `inline_attention`.

    Returns:
        (…, C), in the dtype of x, or of the products if that has more digits.
    """
    tensors = (norm_weight, norm_bias, w1, b1, w2, b2)
    _check(x, *tensors, projection)
    has_gradients = needs_gradients(x, *tensors, *(projection or ()))
    if projection is not None:
        if not has_gradients and (out := _by_kernel(x, tensors, projection, eps, "projected", backend)) is not None:
            return out
        x = x + F.linear(*projection)
    if (out := _by_kernel(x, tensors, None, eps, "training" if has_gradients else "inference", backend)) is not None:
        return out
    hidden = F.linear(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps), w1, b1)
    return x + F.linear(F.gelu(hidden), w2, b2)


def _by_kernel(
    x: Tensor,
    tensors: tuple[Tensor, ...],
    projection: OutputProjection | None,
    eps: float,
    use: str,
    backend: Backend,
) -> Tensor | None:
    """None: the kernel does not run here."""
    dtype = product_dtype(x)
    tile = fused_mlp.winning_tile(x, tensors[2].shape[0], dtype, use) if backends.HAS_TRITON else None
    wanted = "reference" if tile is None and backends.resolve(backend) == "auto" else backend
    if backends.choose(wanted, x, why_not=lambda: fused_mlp.why_not(x, dtype)) == "reference":
        return None
    out: Tensor = fused_mlp.add_mlp(x, tensors[:2], tensors[2:], projection, eps, dtype, tile)
    return out


def pays_on(device: torch.device, width: int, hidden: int, use: str) -> bool:
    """Whether the kernel was measured to be faster than the compiled reference on this GPU, for some number of tokens.

    Args:
        use: "inference"; "projected", which is inference with the projection; "training", forward and backward; or
            "normed", a norm and the linear layer after it.
    """
    if not backends.HAS_TRITON or device.type != "cuda":
        return False
    return bool(fused_mlp.wins_of(device, width, hidden, use))


def pays_for(x: Tensor, hidden: int, use: str) -> bool:
    """Whether the kernel was measured to be faster for so many tokens. `x` and `use` are those of the call."""
    return backends.HAS_TRITON and fused_mlp.winning_tile(x, hidden, product_dtype(x), use) is not None


def _check(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    projection: OutputProjection | None,
) -> None:
    if w1.ndim != 2:
        raise ValueError(f"w1 has shape {shape_of(w1)}; expected (hidden channels, channels)")
    hidden, width = w1.shape
    check_shape("norm_weight", norm_weight, (width,), w1=w1)
    check_shape("norm_bias", norm_bias, (width,), w1=w1)
    check_shape("b1", b1, (hidden,), w1=w1)
    check_shape("w2", w2, (width, hidden), w1=w1)
    check_shape("b2", b2, (width,), w1=w1)
    check_linear(x, w1=w1)
    if projection is not None:
        attended = projection.attended
        if attended.shape != x.shape:
            raise ValueError(f"projection.attended has shape {shape_of(attended)}; expected that of x, {shape_of(x)}")
        check_shape("projection.weight", projection.weight, (width, width), w1=w1)
        check_shape("projection.bias", projection.bias, (width,), w1=w1)
