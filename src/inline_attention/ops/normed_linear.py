"""A layer norm and the linear layer after it.

The reference is here; `fused_norm_linear.py` has the same as one Triton kernel.
"""

from torch import Tensor
from torch.nn import functional as F

from . import backends
from .backends import Backend, fused_mlp, fused_norm_linear
from .checks import check_linear, check_shape, shape_of
from .precision import product_dtype
from .tracing import needs_gradients

USE = "normed"  # in the table of `fused_mlp.WINS`


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Layer norm, and a linear layer of it. Both are returned: attention also takes the mean of what enters it.

    The kernel has no gradients. "auto" takes it only without them, and only for sizes and GPUs where it was measured to
    be faster than the compiled reference.

    Args:
        x: (…, C)
        norm_weight: (C,), the scale of the layer norm.
        norm_bias: (C,), its shift.
        weight: (O, C)
        bias: (O,)
        eps: added to the variance.
        backend: as for `inline_attention`.

    Returns:
        (…, C) and (…, O), in the dtype that a linear layer would return.
    """
    tensors = (norm_weight, norm_bias, weight, bias)
    _check(x, *tensors)
    dtype = product_dtype(x)
    if not needs_gradients(x, *tensors):
        tile = fused_mlp.winning_tile(x, weight.shape[0], dtype, USE) if backends.HAS_TRITON else None
        wanted = "reference" if tile is None and backends.resolve(backend) == "auto" else backend
        if backends.choose(wanted, x, why_not=lambda: fused_mlp.why_not(x, dtype)) == "triton":
            normal, out = fused_norm_linear.norm_linear(x, tensors[:2], weight, bias, eps, dtype, tile)
            return normal, out
    normal = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps).to(dtype)
    return normal, F.linear(normal, weight, bias)


def _check(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor) -> None:
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {shape_of(weight)}; expected (outputs, channels)")
    outputs, width = weight.shape
    check_shape("norm_weight", norm_weight, (width,), weight=weight)
    check_shape("norm_bias", norm_bias, (width,), weight=weight)
    check_shape("bias", bias, (outputs,), weight=weight)
    check_linear(x, weight=weight)
