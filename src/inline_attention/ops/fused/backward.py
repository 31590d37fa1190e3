"""The launches of the backward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import gpu
from ..kernels import anchor, backward
from ..projections import unstack
from . import config
from .arguments import Options, Tensors, as_bytes, common_of, count_of, dot_settings, layout_of, rows_of, strides_of
from .plan import Plan, make_plan, make_tiles, row_settings, split, step_settings, sum_settings, tile_columns


def run_backward(
    grad_out: Tensor,
    projections: Sequence[Tensor],
    tensors: Tensors,
    state: Tensor,
    means: Tensor,
    lse: Tensor,
    options: Options,
    grad_of_local: bool,
) -> list[Tensor]:
    """Gradients of the projections, of the local weight, of the shares and of the offset; empty where not wanted"""
    q, k, v = unstack(projections)
    local_weight, token_mask, query_mask, sequences, shares, offset = tensors
    g = rows_of(grad_out)
    plan = make_plan(q, k, v, sequences, options.grids, options.num_prefix_tokens)
    height, width = plan.height, plan.width
    local = local_weight is not None
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in projections]
    grad_tensors = (*grads, None, None)[:3]
    layout = layout_of(projections)
    wanted = local_weight if grad_of_local else None
    grad_local = torch.empty(
        (0,) if wanted is None else wanted.shape, dtype=(q if wanted is None else wanted).dtype, device=q.device
    )

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    grad_shares = room(0) if shares is None else room(*shares.shape)
    if g.numel() == 0:
        rest = (room(0) if x is None else torch.zeros_like(x) for x in (shares, offset))
        return [*(x.zero_() for x in (*grads, grad_local)), *rest]
    masks = as_bytes(token_mask), as_bytes(query_mask)
    count = count_of(token_mask)
    common = dict(**common_of(plan, token_mask), MAP=options.feature_map, NORM=options.normalization)
    weighted, shifted = dict(WEIGHTED=shares is not None), dict(OFFSET=offset is not None)
    products = dot_settings(q.dtype)
    effort = options.effort(weighted=shares is not None)
    scale, prefix = options.scale, options.num_prefix_tokens
    mask_q = query_mask is not None
    strides = strides_of(plan.packed, q, k, v, g, *(grad for grad in grads for _ in range(grad.shape[2])))
    grad_mean = room(plan.batch, plan.heads, 1, plan.value_dim)
    if plan.fused:
        steps = step_settings("backward", effort, plan, q.dtype)
        gpu.launch(backward.backward_kernel, (plan.programs,))(
            q, k, v, local_weight, g, *masks, count, sequences, shares, lse, offset, state, means,
            *grad_tensors, grad_local, grad_shares, grad_mean,
            plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, plan.heads, *strides,
            **common, **weighted, **shifted, **products, LOCAL=local, GRAD_LOCAL=grad_of_local, MASK_Q=mask_q,
            ANCHORED=options.anchored, LAYOUT=layout, **row_settings(width), **steps, WARPS=steps["num_warps"],
        )  # fmt: skip
        grad_offset = _offset_grad(grads, k, state, grad_mean, grad_shares, tensors, options, plan)
        return [*grads, grad_local, grad_shares, grad_offset]
    size = plan.block_keys * plan.block_values + plan.block_keys + 10 * plan.block_values
    parts = split(plan, plan.queries, rows=height if grad_of_local else 0)
    sums = room(plan.programs, parts.most, size)
    grad_state = room(*state.shape)
    grad_k_mean = room(plan.batch, plan.heads, 1, plan.key_dim)
    few_strides = strides_of(plan.packed, q, v, g, grads[0])
    steps = step_settings("grad_state", effort, plan, q.dtype)
    gpu.launch(backward.grad_state_kernel, (plan.programs, parts.number))(
        q, v, g, *masks, count, sequences, offset, state, means, grads[0], sums,
        plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, plan.heads,
        *few_strides,
        **common, **shifted, **products, GRAD_LOCAL=grad_of_local, MASK_Q=mask_q, BW=tile_columns(width),
        WIDE=plan.wide(few_strides), **steps, WARPS=steps["num_warps"],
    )  # fmt: skip
    block = sum_settings(plan, parts)
    gpu.launch(backward.grad_finish_kernel, (plan.programs, plan.block_channels // block["BR"]))(
        sums, count, sequences, grad_state, grad_k_mean, grad_mean, grad_local,
        plan.tokens, height, width, scale, parts.number, plan.blocks, plan.heads,
        **common, **weighted, **block, GRAD_LOCAL=grad_of_local,
    )  # fmt: skip
    steps = step_settings("grad", effort, plan, q.dtype)
    tiles = make_tiles(plan, local=local, steps=steps)
    gpu.launch(backward.grad_kernel, tiles.grid(plan))(
        q, k, v, local_weight, g, *masks, sequences, shares, lse, offset, state, means,
        grad_state, grad_k_mean, grad_mean, *grad_tensors, grad_shares,
        plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, tiles.columns, tiles.rows, plan.heads,
        *strides,
        **common, **weighted, **shifted, **products, LOCAL=local, MASK_Q=mask_q, ANCHORED=options.anchored,
        LAYOUT=layout, **row_settings(width), WIDE=tiles.wide or plan.wide(strides), **steps,
    )  # fmt: skip
    grad_offset = _offset_grad(grads, k, state, grad_mean, grad_shares, tensors, options, plan)
    return [*grads, grad_local, grad_shares, grad_offset]


def _offset_grad(
    grads: Sequence[Tensor],
    k: Tensor,
    state: Tensor,
    grad_mean: Tensor,
    grad_shares: Tensor,
    tensors: Tensors,
    options: Options,
    plan: Plan,
) -> Tensor:
    """The gradient of the offset (B, 1, heads, d): −Σ dq and, for an anchor, what its scores add.

    `grad_mean` is dv̄/n, and `grad_shares` the gradient of an anchor's scores.
    """
    if tensors.offset is None:
        return grad_mean.new_empty(0)
    if options.feature_map != "identity":
        return -unstack(grads)[0].sum(1, keepdim=True, dtype=torch.float32).to(tensors.offset.dtype)
    if options.anchored:
        return _anchor_grad(k, state, grad_mean, grad_shares, tensors, options, plan)
    # Σ dq = dv̄·Sᵀ, without a pass over the queries. `@` would round under autocast, which may be on in a backward pass.
    grad = -(grad_mean * state).sum(-1).unsqueeze(1)
    if tensors.shares is None:
        mask = tensors.token_mask
        grad *= plan.tokens if mask is None else mask.sum(1).clamp(min=1)[:, None, None, None]
    return grad.to(tensors.offset.dtype)


def _anchor_grad(
    k: Tensor, state: Tensor, grad_mean: Tensor, grad_scores: Tensor, tensors: Tensors, options: Options, plan: Plan
) -> Tensor:
    """The gradient of the anchor (B, 1, heads, d), which is the offset too"""
    assert tensors.offset is not None
    parts = split(plan, plan.tokens)
    dtype = tensors.offset.dtype if parts.number == 1 else torch.float32
    sums = torch.empty((parts.number, *tensors.offset.shape), dtype=dtype, device=k.device)
    mask = as_bytes(tensors.token_mask)
    strides = strides_of(False, k)
    gpu.launch(anchor.anchor_grad_kernel, (plan.programs, parts.number))(
        k, grad_scores, mask, state, grad_mean, sums, plan.tokens, options.scale, plan.blocks, plan.heads, *strides,
        D=plan.key_dim, DV=plan.value_dim, HEADS=plan.heads_per_block, BC=plan.block_keys, BV=plan.block_values,
        BN=config.CONFIG.tokens, PRECISION=dot_settings(k.dtype)["PRECISION"], HAS_MASK=mask is not None,
        WIDE=plan.wide(strides),
    )  # fmt: skip
    return sums[0] if parts.number == 1 else sums.sum(0).to(tensors.offset.dtype)
