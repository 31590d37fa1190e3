"""The weight of the local residual as one Triton launch, and its gradients as three.

`local_weight.py` has the reference.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from . import gpu
from .fused.arguments import dot_settings
from .fused.entry import why_not_widths
from .gpu import on_device_of
from .kernels.local_weight import local_weight_backward_kernel, local_weight_kernel, weight_gradient_kernel
from .local import TAPS
from .precision import product_dtype
from .registration import refuse_tangents, register

# A program makes so many outputs of so many samples.
SAMPLES = 16
OUTPUTS = 32

# Most samples of the backward kernels, whose programs sum over all of them. More are left to PyTorch. A guess.
MOST_SAMPLES = 2048
SUMMED = 64  # samples per step of that sum


def run(mean: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dtype: torch.dtype) -> Tensor:
    """Shapes as for `local_weight.make_local_weight`. The tensors are contiguous."""
    batch, (heads, head_dim) = mean.shape[0], b1.shape
    out = torch.empty((batch, heads, head_dim, TAPS), dtype=dtype, device=mean.device)
    gpu.launch(local_weight_kernel, (heads, triton.cdiv(batch, SAMPLES), triton.cdiv(TAPS * head_dim, OUTPUTS)))(
        mean, w1, b1, w2, b2, out, batch, mean.stride(0),
        HEADS=heads, D=head_dim, BD=max(16, triton.next_power_of_2(head_dim)), BB=SAMPLES, BO=OUTPUTS,
        **dot_settings(dtype), num_warps=1 if head_dim <= 32 else 4,
    )  # fmt: skip
    return out


@register("inline_attention::local_weight", mutates_args=())
def _local_weight_op(mean: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dtype: torch.dtype) -> Tensor:
    with on_device_of(mean):
        return run(mean, w1, b1, w2, b2, dtype)


@_local_weight_op.register_fake
def _(mean, w1, b1, w2, b2, dtype):  # type: ignore[no-untyped-def]  # as the operator
    return mean.new_empty((mean.shape[0], *b1.shape, TAPS), dtype=dtype)


@register("inline_attention::local_weight_backward", mutates_args=())
def _backward_op(
    grad: Tensor, mean: Tensor, w1: Tensor, b1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device_of(mean):
        return run_backward(grad, mean, w1, b1, w2)


def run_backward(
    grad: Tensor, mean: Tensor, w1: Tensor, b1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the mean token, w1, b1, w2 and b2. All tensors are contiguous, and there is a sample."""
    batch, (heads, d) = mean.shape[0], b1.shape
    outputs = TAPS * d
    results = _gradients_like(mean, w1, b1, w2)
    d_mean, dw1, db1, dw2, db2 = results
    hidden, d_before = (torch.empty(mean.shape, dtype=grad.dtype, device=mean.device) for _ in range(2))
    common = dict(HEADS=heads, D=d, BD=max(16, triton.next_power_of_2(d)), BO=OUTPUTS, **dot_settings(grad.dtype))
    warps = 1 if d <= 32 else 4
    gpu.launch(local_weight_backward_kernel, (heads, triton.cdiv(batch, SAMPLES)))(
        grad, mean, w1, b1, w2, d_mean, hidden, d_before, batch, BB=SAMPLES, **common, num_warps=warps
    )
    for upstream, inputs, dw, db, size in ((grad, hidden, dw2, db2, outputs), (d_before, mean, dw1, db1, d)):
        gpu.launch(weight_gradient_kernel, (heads, triton.cdiv(size, OUTPUTS)))(
            upstream, inputs, dw, db, batch, DO=size, BB=SUMMED, **common, num_warps=4
        )
    return results


def _gradients_like(mean: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = torch.empty_like
    return like(mean), like(w1), like(b1), like(w2), w2.new_empty(w2.shape[:2])


@_backward_op.register_fake
def _(grad, mean, w1, b1, w2):  # type: ignore[no-untyped-def]  # as the operator
    return _gradients_like(mean, w1, b1, w2)


@register_flop_formula(torch.ops.inline_attention.local_weight_backward)
def _backward_flops(grad: Any, mean: Any, w1: Any, b1: Any, w2: Any, *args: Any, **kwargs: Any) -> int:
    heads, outputs, inputs = w2
    return 2 * mean[0] * heads * inputs * (3 * inputs + 2 * outputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors[:4])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """A few small products. The forward's hidden values are computed again."""
    mean, w1, b1, w2 = ctx.saved_tensors
    refuse_tangents(grad)
    if not torch.is_grad_enabled() and 0 < mean.shape[0] <= MOST_SAMPLES:
        return *_backward_op(grad.contiguous(), mean, w1, b1, w2), None
    # For second derivatives too.
    x = mean.to(grad.dtype).unflatten(1, b1.shape)
    first, second = w1.to(grad.dtype), w2.to(grad.dtype)
    before = torch.einsum("bhi,hoi->bho", x, first) + b1.to(grad.dtype)
    grad = grad.flatten(2)
    grad_before = torch.ops.aten.gelu_backward(torch.einsum("bho,hoi->bhi", grad, second), before)
    return (
        torch.einsum("bho,hoi->bhi", grad_before, first).flatten(1).to(mean.dtype),
        torch.einsum("bho,bhi->hoi", grad_before, x).to(w1.dtype),
        grad_before.sum(0, dtype=b1.dtype),
        torch.einsum("bho,bhi->hoi", grad, F.gelu(before)).to(w2.dtype),
        grad.sum(0, dtype=b1.dtype),
        None,
    )


_local_weight_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.inline_attention.local_weight)
def _flops(mean: Any, w1: Any, b1: Any, w2: Any, *args: Any, **kwargs: Any) -> int:
    heads, outputs, inputs = w2
    return 2 * mean[0] * heads * inputs * (w1[1] + outputs)


def why_not(token_mean: Tensor, head_dim: int) -> str | None:
    """Why the kernel cannot run on this many samples or with such heads, or None if it can."""
    most = gpu.MOST_ON_AN_AXIS * SAMPLES
    if token_mean.shape[0] > most:
        return f"the kernel takes up to {most:,} samples or windows at once, not {token_mean.shape[0]:,}"
    return why_not_widths(head_dim, head_dim, token_mean.device)


def make_local_weight(token_mean: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The backend's entry. Inputs are checked; the output's dtype is autocast's, or else that of the mean token."""
    refuse_tangents(token_mean, w1, b1, w2, b2)
    weights = (x.contiguous() for x in (w1, b1, w2, b2))
    out: Tensor = _local_weight_op(token_mean.contiguous(), *weights, product_dtype(token_mean))
    return out
