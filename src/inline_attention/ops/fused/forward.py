"""The launches of the forward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import gpu
from ..kernels import forward
from ..projections import unstack
from . import config
from .arguments import (
    Options,
    Tensors,
    as_bytes,
    common_of,
    count_of,
    dot_settings,
    saved,
    strides_of,
)
from .plan import make_plan, make_tiles, row_settings, split, step_settings, sum_settings


def run_forward(
    projections: Sequence[Tensor], tensors: Tensors, options: Options, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output (B, Nq, heads, e), and four tensors for the backward, empty where not needed

    - the state S (B, heads, d, e);
    - the means of φ(k) − φ(0) and of v, (B, heads·(d + e));
    - an anchor's scores (B, heads, N), and log Σ exp of them (B, heads).
    """
    q, k, v = unstack(projections)
    local_weight, token_mask, query_mask, sequences, shares, offset = tensors
    plan = make_plan(q, k, v, sequences, options.grids, options.num_prefix_tokens)
    height, width = plan.height, plan.width
    local = local_weight is not None
    out = torch.empty((*q.shape[:3], plan.value_dim), dtype=q.dtype, device=q.device)
    state, means, scores, lse = (
        torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in saved(plan, options, q.dtype, save)
    )
    if out.numel() == 0:
        return out, state, means, scores, lse
    weighted = shares is not None or options.anchored
    masks = as_bytes(token_mask), as_bytes(query_mask)
    count = count_of(token_mask)
    common = dict(**common_of(plan, token_mask), WEIGHTED=weighted)
    anchored = dict(ANCHORED=options.anchored, SAVE=save and options.anchored)
    effort = options.effort(weighted=weighted)
    products = dot_settings(q.dtype)
    centre = q.dtype == torch.float32 or weighted
    chosen = dict(MAP=options.feature_map, NORM=options.normalization, OFFSET=offset is not None)
    scale, prefix = options.scale, options.num_prefix_tokens
    mask_q = query_mask is not None
    if plan.fused:
        gpu.launch(forward.forward_kernel, (plan.programs,))(
            q, k, v, local_weight, *masks, count, sequences, scores if options.anchored else shares, lse, offset,
            out, state, means,
            plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, plan.heads,
            *strides_of(plan.packed, q, k, v, out),
            **common, **chosen, **products, CENTRE=centre, LOCAL=local, MASK_Q=mask_q, ANCHORED=options.anchored,
            SAVE=save, **row_settings(width), **step_settings("forward", effort, plan, q.dtype),
        )  # fmt: skip
        return out, state, means, scores, lse
    size = plan.block_keys * plan.block_values + 2 * (plan.block_keys + plan.block_values)
    programs = config.CONFIG.scaled_state_programs if effort in ("divide", "magnitude") else None
    parts = split(plan, plan.tokens, programs=programs)
    sums = torch.empty((plan.programs, parts.most, size), dtype=torch.float32, device=q.device)
    logs = torch.empty(
        (plan.batch, plan.heads, parts.number if options.anchored else 0), dtype=lse.dtype, device=q.device
    )
    strides = strides_of(plan.packed, k, v)
    gpu.launch(forward.state_kernel, (plan.programs, parts.number))(
        k, v, masks[0], sequences, scores if options.anchored else shares, offset, sums, logs,
        plan.tokens, height, width, scale, plan.blocks, plan.heads, *strides,
        **common, **anchored, **products, MAP=options.feature_map, CENTRE=centre,
        WIDE=plan.wide(strides), **step_settings("state", effort, plan, q.dtype),
    )  # fmt: skip
    block = sum_settings(plan, parts)
    gpu.launch(forward.finish_kernel, (plan.programs, plan.block_keys // block["BR"]))(
        sums, logs, count, sequences, state, means, lse,
        plan.tokens, height, width, scale, parts.number, plan.blocks, plan.heads,
        **common, **anchored, **block, CENTRE=centre, PIVOTED=weighted and q.dtype != torch.float32,
    )  # fmt: skip
    steps = step_settings("output", effort, plan, q.dtype)
    tiles = make_tiles(plan, local=local, steps=steps)
    strides = strides_of(plan.packed, q, v, out)
    gpu.launch(forward.output_kernel, tiles.grid(plan))(
        q, v, local_weight, *masks, count, sequences, offset, out, state, means,
        plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, tiles.columns, tiles.rows, plan.heads,
        *strides,
        **common_of(plan, token_mask), **chosen, **products, LOCAL=local, MASK_Q=mask_q, **row_settings(width),
        WIDE=tiles.wide or plan.wide(strides), **steps,
    )  # fmt: skip
    return out, state, means, scores, lse
