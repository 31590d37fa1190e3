"""The forward pass of short sequences in one launch, for inference: where it was measured to win, and the operator.

`tests/gpu_check.py short` measures it and prints the lines of `WINS`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import gpu, tuned
from ..kernels.short import short_kernel
from ..local import LocalSource
from ..projections import unstack
from ..registration import register
from . import config
from .arguments import Options, Tensors, as_bytes, common_of, dot_settings, strides_of
from .operators import flops_of
from .plan import Plan, make_plan


class Tile(NamedTuple):
    """Launch parameters."""

    keys: int  # tokens per step
    queries: int  # per step
    warps: int
    stages: int
    parts: int = 1  # programs that share the queries of a sample


# What `tests/gpu_check.py short` times, with several numbers of parts.
TILES: tuple[Tile, ...] = (
    Tile(64, 32, 4, 2),
    Tile(64, 64, 4, 2),
    Tile(128, 32, 4, 2),
    Tile(128, 64, 8, 2),
    Tile(256, 32, 8, 1),
    Tile(256, 64, 8, 1),
)

# The interpreter's time does not depend on the size of a block. Small ones take small tests through every loop.
if gpu.INTERPRETED:
    TILES = (Tile(16, 16, 4, 1),)


class Win(NamedTuple):
    """Sizes for which the kernel was measured to be faster than the launches of `forward.run_forward`."""

    least_tokens: int
    most_tokens: int
    least_heads: int  # samples × heads
    most_heads: int
    tile: Tile


_OF_32 = (
    Win(130, 335, 4, 15, Tile(128, 32, 4, 2, 7)),
    Win(336, 767, 4, 8, Tile(128, 32, 4, 2, 18)),
    Win(336, 767, 9, 15, Tile(128, 32, 4, 2, 13)),
    Win(768, 1536, 4, 8, Tile(128, 32, 4, 2, 22)),
    Win(768, 1536, 9, 15, Tile(128, 32, 4, 2, 13)),
)

# By GPU, channels of a head, and whether the kernel makes the local weight, which spares the launches
# for the mean token and the weight too. For InLine attention with a local residual, in half precision.
WINS: dict[tuple[gpu.Chip, int, bool], tuple[Win, ...]] = {
    (gpu.H200, 32, True): _OF_32,
    (gpu.H200, 32, False): _OF_32,
    (gpu.H200, 64, True): (
        Win(130, 335, 2, 4, Tile(256, 32, 8, 1, 7)),
        Win(336, 767, 2, 4, Tile(128, 32, 4, 2, 18)),
        Win(768, 1536, 2, 4, Tile(128, 64, 8, 2, 16)),
    ),
    (gpu.H200, 64, False): (
        Win(130, 335, 2, 4, Tile(128, 32, 4, 2, 7)),
        Win(336, 767, 2, 4, Tile(128, 32, 4, 2, 18)),
    ),
}


def choose_tile(plan: Plan, dtype: torch.dtype, multiprocessors: int) -> Tile:
    """A tile for sizes that were not measured. Every multiprocessor gets a program if there are enough queries.

    As in `plan.step_settings`, wide heads and float32 take short steps, which registers and shared memory can hold.
    """
    if plan.block_channels > 64:
        tile = Tile(16, 16, 8, 1)
    elif dtype == torch.float32:
        tile = Tile(32, min(32, TILES[0].queries), 4, 2)
    else:
        tile = TILES[0]
    wanted = max(1, multiprocessors // max(1, plan.programs))
    return tile._replace(parts=min(wanted, triton.cdiv(max(1, plan.queries), tile.queries)))


@torch.compiler.assume_constant_result  # otherwise every compiled call would check the whole table
def wins_of(device: torch.device, head_dim: int, makes_weight: bool) -> tuple[tuple[Any, ...], ...]:
    """What was measured on such a GPU: the fields of each `Win`, as plain tuples, which torch.compile can keep."""
    measured = tuned.rows(device, "short", head_dim, "made" if makes_weight else "given")
    if measured is not None:
        return measured
    wins = WINS.get((gpu.chip_of(device), head_dim, makes_weight), ())
    return tuple((*win[:-1], tuple(win.tile)) for win in wins)


def winning_tile(
    projections: Sequence[Tensor],
    local: Sequence[Tensor],
    sequences: Tensor | None,
    shares: Tensor | None,
    options: Options,
) -> Tile | None:
    """The measured tile, if the kernel is faster than several launches; otherwise None. `local` as for `run`"""
    q, k, v = unstack(projections)
    if config.CONFIG.one_launch:
        plan = make_plan(q, k, v, sequences, options.grids, options.num_prefix_tokens)
        return choose_tile(plan, q.dtype, gpu.limits_of(q.device).multiprocessors)
    # Only these cases were measured.
    if not q.is_cuda or q.dtype == torch.float32 or not local or sequences is not None or q.shape[3] != v.shape[3]:
        return None
    if options.effort(weighted=shares is not None or options.anchored) != "plain":
        return None
    tokens, heads = k.shape[1], q.shape[0] * q.shape[2]
    # Tensor cores sum all keys of a sample, and round towards zero. So there are no more than in a part elsewhere.
    if tokens > config.CONFIG.part:
        return None
    for least_tokens, most_tokens, least_heads, most_heads, tile in wins_of(q.device, q.shape[3], len(local) > 1):
        if least_tokens <= tokens <= most_tokens and least_heads <= heads <= most_heads:
            return Tile(*tile)
    return None


def run(
    projections: Sequence[Tensor], local: Sequence[Tensor], tensors: Tensors, options: Options, tile: Tile
) -> Tensor:
    """`local`: the local weight, or the fields of a `LocalSource`, or nothing. `tensors` has no local weight."""
    q, k, v = unstack(projections)
    _, token_mask, query_mask, sequences, shares, offset = tensors
    plan = make_plan(q, k, v, sequences, options.grids, options.num_prefix_tokens)
    out = torch.empty((*q.shape[:3], plan.value_dim), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    weighted = shares is not None or options.anchored
    made = len(local) > 1
    weight = local[0] if len(local) == 1 else None
    source = tuple(local) if made else (None,) * 5
    strides = strides_of(plan.packed, q, k, v, local[0] if made else q, out)
    gpu.launch(short_kernel, (plan.programs, tile.parts))(
        q, k, v, weight, *source, as_bytes(token_mask), as_bytes(query_mask), sequences, shares, offset, out,
        plan.queries, plan.tokens, plan.height, plan.width, options.num_prefix_tokens, options.scale,
        plan.blocks, plan.heads,
        *strides,
        **common_of(plan, token_mask), **dot_settings(q.dtype), MAP=options.feature_map, NORM=options.normalization,
        CENTRE=q.dtype == torch.float32 or weighted, LOCAL=len(local) > 0, MADE=made,
        MASK_Q=query_mask is not None, WEIGHTED=weighted, ANCHORED=options.anchored,
        OFFSET=offset is not None, WIDE=plan.wide(strides), BN=tile.keys, BM=tile.queries,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@register("inline_attention::short", mutates_args=())
def short_op(
    projections: Sequence[Tensor],
    local: Sequence[Tensor],
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
    tile: Sequence[int],
) -> Tensor:
    """`run` as an operator without a backward. `tile`: the fields of a `Tile`"""
    with gpu.on_device_of(projections[0]):
        tensors = Tensors(None, token_mask, query_mask, sequences, shares, offset)
        options = Options(normalization, feature_map, anchored, scale, grids, num_prefix_tokens)
        return run(projections, local, tensors, options, Tile(*tile))


@short_op.register_fake
def _(projections, *args):  # type: ignore[no-untyped-def]  # as the operator
    q, _, v = unstack(projections)
    return q.new_empty((*q.shape[:3], v.shape[3]))


@register_flop_formula(torch.ops.inline_attention.short)
def _flops(projections: Any, local: Any, *args: Any, **kwargs: Any) -> int:
    flops = flops_of(projections, local or None, products=1, local=1)
    if len(local) > 1:
        (batch, *_), (heads, outputs, inputs) = projections[0], local[3]
        flops += 2 * batch * heads * inputs * (inputs + outputs)
    return flops


def local_tensors(local_weight: Tensor | LocalSource | None) -> list[Tensor]:
    """The operator's `local`"""
    if local_weight is None:
        return []
    if isinstance(local_weight, Tensor):
        return [local_weight.contiguous()]
    x, *weights = local_weight
    return [x if x.stride(-1) == 1 else x.contiguous(), *(w.contiguous() for w in weights)]
