"""The operators: forward and backward for PyTorch, with their fake forms, their gradients and their cost."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..gpu import on_device_of
from ..projections import unstack
from ..registration import refuse_second_derivatives, refuse_tangents, register
from .arguments import Options, Tensors, saved
from .backward import run_backward
from .forward import run_forward
from .plan import make_plan


@register("inline_attention::forward", mutates_args=())
def forward_op(
    projections: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    sequences: Tensor | None,
    shares: Tensor | None,
    offset: Tensor | None,
    normalization: str,
    feature_map: str,
    anchored: bool,
    scale: float,
    grids: Sequence[int],
    num_prefix_tokens: int,
    save: bool,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """settings: `tuned.digest`. It changes nothing, and is there for torch.compile's cache."""
    with on_device_of(projections[0]):
        tensors = Tensors(local_weight, token_mask, query_mask, sequences, shares, offset)
        options = Options(normalization, feature_map, anchored, scale, grids, num_prefix_tokens)
        return run_forward(projections, tensors, options, save)


@register("inline_attention::backward", mutates_args=())
def backward_op(
    grad_out: Tensor,
    projections: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    sequences: Tensor | None,
    shares: Tensor | None,
    offset: Tensor | None,
    state: Tensor,
    means: Tensor,
    lse: Tensor,
    normalization: str,
    feature_map: str,
    anchored: bool,
    scale: float,
    grids: Sequence[int],
    num_prefix_tokens: int,
    grad_of_local: bool,
) -> list[Tensor]:
    with on_device_of(grad_out):
        tensors = Tensors(local_weight, token_mask, query_mask, sequences, shares, offset)
        options = Options(normalization, feature_map, anchored, scale, grids, num_prefix_tokens)
        return run_backward(grad_out, projections, tensors, state, means, lse, options, grad_of_local)


@forward_op.register_fake
def _(projections, local_weight, token_mask, query_mask, sequences, shares, offset, *rest):  # type: ignore[no-untyped-def]  # as the operator
    *facts, save = rest[:7]
    options = Options(*facts)
    q, k, v = unstack(projections)
    plan = make_plan(q, k, v, sequences, options.grids, options.num_prefix_tokens)
    left = (q.new_empty(shape, dtype=dtype) for shape, dtype in saved(plan, options, q.dtype, save))
    return (q.new_empty((*q.shape[:3], plan.value_dim)), *left)


@backward_op.register_fake
def _(grad_out, projections, local_weight, token_mask, query_mask, sequences, shares, offset, *rest):  # type: ignore[no-untyped-def]  # as the operator
    grad_of_local = rest[-1]
    empty = grad_out.new_empty((0,), dtype=torch.float32)
    return [
        *(x.new_empty(x.shape) for x in projections),
        torch.empty_like(local_weight) if grad_of_local else grad_out.new_empty((0,)),
        empty if shares is None else torch.empty_like(shares),
        torch.empty_like(empty) if offset is None else torch.empty_like(offset),
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    projections, *rest = inputs
    tensors, options = Tensors(*rest[:6]), Options(*rest[6:12])
    _, state, means, scores, lse = output
    if options.anchored:
        tensors = tensors._replace(shares=scores)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or each backward would fill gradients of these outputs with zeros
    ctx.save_for_backward(*projections, *tensors, state, means, lse)
    ctx.options = options


def _backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Any, ...]:
    if grad_out is None:
        return ([None] * len(ctx.needs_input_grad[0]), *[None] * 14)
    refuse_tangents(grad_out)
    *projections, local_weight, token_mask, query_mask, sequences, shares, offset, state, means, lse = ctx.saved_tensors
    grad_of_local = ctx.needs_input_grad[1]
    *grads, grad_local, grad_shares, grad_offset = backward_op(
        grad_out, projections, local_weight, token_mask, query_mask, sequences, shares, offset, state, means, lse,
        *ctx.options, grad_of_local,
    )  # fmt: skip
    return (
        grads,
        grad_local if grad_of_local else None,
        None,
        None,
        None,
        grad_shares if ctx.needs_input_grad[5] else None,
        grad_offset if ctx.needs_input_grad[6] else None,
        *[None] * 8,
    )


forward_op.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivatives(backward_op)


def flops_of(projections: Any, local_weight: Any, products: int, local: int) -> int:
    """`products` products of queries with d×e states, as many of keys, and `local` sums over nine taps.

    The arguments are shapes instead of tensors.
    """
    batch, queries, _, heads, key_dim = projections[0]
    _, tokens, _, _, value_dim = projections[-1]
    sums = 0 if local_weight is None else local * 9 * tokens
    return 2 * batch * heads * value_dim * (products * (queries + tokens) * key_dim + sums)


@register_flop_formula(torch.ops.inline_attention.forward)
def _forward_flops(projections: Any, local_weight: Any, *args: Any, **kwargs: Any) -> int:
    return flops_of(projections, local_weight, products=1, local=1)


@register_flop_formula(torch.ops.inline_attention.backward)
def _backward_flops(grad_out: Any, projections: Any, local_weight: Any, *args: Any, **kwargs: Any) -> int:
    grad_of_local = args[-1]
    return flops_of(projections, local_weight, products=2, local=2 if grad_of_local else 1)
