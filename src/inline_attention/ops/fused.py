"""Linear attention as Triton kernels: how they are launched, their gradients and their cost.

q, k and v arrive as `projections`: tensors (B, N, m, heads, d) that hold m of them next to each other. A qkv projection
is one tensor of three, q and kv are tensors of one and two. The kernels read q, k and v, and write their gradients, in
the layout of these tensors. Values may have another number of channels than queries and keys.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import gpu
from .feature_maps import NONZERO_AT_ZERO
from .gpu import INTERPRETED
from .kernels import anchor, backward, forward
from .local import Grid
from .projections import unstack


class Steps(NamedTuple):
    """Launch parameters of a kernel that steps over tokens."""

    tokens: int  # per step
    warps: int
    stages: int


class Config(NamedTuple):
    """Launch parameters, one set for every length, resolution and batch.

    They are the fastest of those tried by hand on an H200 in bfloat16 with heads of 32 channels. `part` is there for
    accuracy and `summed_parts` for compile time. Other GPUs and widths run with them too, but were not tuned. Only the
    numbers of programs and of parts depend on the GPU: they follow its multiprocessors. Nothing is autotuned at run
    time. The steps decide how sums are rounded, and autotuning could choose other steps in the next process.
    """

    tokens: int = 64  # most tokens per step of a loop
    columns: int = 16  # of a tile of the map; half as many for a map that narrow
    output_columns: int = 8  # the same in output_kernel
    tile: int = 128  # most tokens in a tile of the map
    steps: int = 4  # steps over tokens in a tile where there is no map
    state_programs: int = 8  # programs per multiprocessor that the tokens of a sample are split for
    scaled_state_programs: int = 16  # the same for "scaled" keys
    most_parts: int = 128  # most parts for that; a power of two
    part: int = 2048  # most tokens in a part: tensor cores sum a part, and round towards zero
    summed_parts: int = 128  # parts that are added at once
    score_tokens: int = 256  # tokens whose scores with an anchor a program computes
    fused_tokens: int = 256  # most tokens of a sample that one program handles alone, if there are at least
    fused_programs: int = 4  # this many programs per multiprocessor


CONFIG = Config()

# By what the attention does with a token, and by kernel. The more it does, the fewer tokens its registers hold.
STEPS = {
    "plain": {
        "state": Steps(64, 1, 2),
        "output": Steps(64, 1, 2),
        "forward": Steps(64, 2, 2),
        "grad_state": Steps(64, 2, 2),
        "grad": Steps(64, 2, 2),
        "backward": Steps(64, 2, 3),
    },
    "weighted": {
        "state": Steps(32, 2, 3),
        "output": Steps(64, 1, 2),
        "forward": Steps(32, 2, 2),
        "grad_state": Steps(64, 2, 2),
        "grad": Steps(32, 1, 3),
        "backward": Steps(64, 2, 3),
    },
    "scaled": {
        "state": Steps(32, 1, 2),
        "output": Steps(32, 1, 3),
        "forward": Steps(64, 2, 2),
        "grad_state": Steps(16, 1, 3),
        "grad": Steps(32, 2, 3),
        "backward": Steps(32, 2, 3),
    },
}

# A step costs the same at any size in the interpreter. Small steps take small test shapes through every loop.
if INTERPRETED:
    CONFIG = Config(
        tokens=16, tile=32, steps=1, state_programs=2, scaled_state_programs=2, part=64, summed_parts=2,
        score_tokens=16, fused_tokens=40, fused_programs=0,
    )  # fmt: skip

# Most channels of a head.
MOST_CHANNELS = 128

# Most channels of a head whose kernels fit the shared memory of every GPU they run on: 99 KiB from capability 8.6 on.
# With more channels a program takes up to WIDE_MEMORY bytes. `tests/kernel_builds.py` finds out what the kernels take.
WITHIN_ANY_MEMORY = 64
WIDE_MEMORY = 160 * 1024

# Least channels of a program, if there are enough heads. They fill a memory sector and a tensor core's tile.
LEAST_CHANNELS = 32

# Most elements from one token to the next. Offsets in a step of up to 256 tokens have 32 bits.
LONGEST_STRIDE = 2**31 // 256 - 1

# Most programs on the second and third axis of a launch grid.
MOST_ON_AN_AXIS = 65_535


class Plan(NamedTuple):
    """The geometry of a launch. It depends on shapes alone."""

    batch: int
    queries: int  # of a sample, or of the longest packed image
    tokens: int
    heads: int
    key_dim: int  # channels of a head, of queries and keys
    value_dim: int  # of values
    heads_per_block: int
    block_keys: int  # channels of a block, a power of two
    block_values: int
    blocks: int  # blocks of heads
    fused: bool  # one program per sample and block
    packed: bool
    grids: list[Grid]  # one, or one for each packed image

    @property
    def programs(self) -> int:
        return self.batch * self.blocks

    @property
    def block_channels(self) -> int:
        return max(self.block_keys, self.block_values)

    @property
    def height(self) -> int:
        return max(height for height, _ in self.grids)

    @property
    def width(self) -> int:
        return max(width for _, width in self.grids)


def make_plan(
    q: Tensor, k: Tensor, v: Tensor, sequences: Tensor | None, grids: Sequence[int], num_prefix_tokens: int
) -> Plan:
    heads, key_dim, value_dim = q.shape[2], q.shape[3], v.shape[3]
    heads_per_block = max(1, min(LEAST_CHANNELS // max(key_dim, value_dim), heads))
    block_keys, block_values = (max(16, triton.next_power_of_2(heads_per_block * d)) for d in (key_dim, value_dim))
    blocks = triton.cdiv(heads, heads_per_block)
    pairs = list(zip(grids[::2], grids[1::2], strict=True))
    batch, queries, tokens = q.shape[0], q.shape[1], k.shape[1]
    if sequences is not None:
        batch = sequences.shape[0]
        queries = tokens = num_prefix_tokens + max(height * width for height, width in pairs)
    enough = CONFIG.fused_programs * gpu.limits_of(q.device).multiprocessors
    fused = tokens <= CONFIG.fused_tokens and batch * blocks >= enough
    return Plan(batch, queries, tokens, heads, key_dim, value_dim, heads_per_block, block_keys, block_values, blocks,
                fused, sequences is not None, pairs)  # fmt: skip


class Parts(NamedTuple):
    """How many parts the tokens of a sample are split into."""

    number: int
    most: int  # a power of two


def split(plan: Plan, tokens: int, device: torch.device, *, programs: int | None = None, rows: int = 0) -> Parts:
    """Enough parts for a number of programs per multiprocessor and tokens per part, but no more than there are steps
    over tokens, or rows.

    `most` is found by comparisons, so that it is a plain number for torch.compile when sizes are symbolic.
    """
    programs = (CONFIG.state_programs if programs is None else programs) * gpu.limits_of(device).multiprocessors
    most = CONFIG.most_parts
    while most > 1 and plan.programs * most > programs:
        most //= 2
    while most * CONFIG.part < tokens:
        most *= 2
    return Parts(torch.sym_min(most, torch.sym_max(triton.cdiv(tokens, CONFIG.tokens), rows)), most)


def _common(plan: Plan, token_mask: Tensor | None) -> dict[str, Any]:
    return dict(
        DK=plan.key_dim,
        DV=plan.value_dim,
        HEADS=plan.heads_per_block,
        BK=plan.block_keys,
        BV=plan.block_values,
        HAS_MASK=token_mask is not None,
        PACKED=plan.packed,
    )


def dot_settings(dtype: torch.dtype) -> dict[str, Any]:
    """The dtype of matrix products. float16 inputs use tf32, which also holds a state too large for float16."""
    if dtype == torch.bfloat16:
        return dict(DOT=tl.bfloat16, PRECISION="tf32")
    return dict(DOT=tl.float32, PRECISION="ieee" if dtype == torch.float32 else "tf32")


def _state_dtype(dtype: torch.dtype, feature_map: str, anchored: bool) -> torch.dtype:
    """The dtype that S is kept in: that of the products for bfloat16, else float32.

    Where φ(0) is not zero the sum of S's rows is needed too, and the backward of an anchor needs the product of S and
    its gradient. Both take all digits of S.
    """
    rounded = dtype == torch.bfloat16 and feature_map not in NONZERO_AT_ZERO and not anchored
    return dtype if rounded else torch.float32


def _layout(projections: Sequence[Tensor]) -> str:
    """Which of q, k and v each tensor holds, such as "qkv" or "q,kv" """
    names = iter("qkv")
    return ",".join("".join(islice(names, projection.shape[2])) for projection in projections)


def _rows(x: Tensor) -> Tensor:
    """x (B, N, …, heads, d) if a token's channels are contiguous and tokens not too far apart, else a copy"""
    together = x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
    return x if together and x.stride(1) <= LONGEST_STRIDE else x.contiguous()


def _strides(packed: bool, *tensors: Tensor) -> list[int]:
    """The strides of the batch and of the tokens, for each tensor in turn"""
    return [stride for x in tensors for stride in (0 if packed else x.stride(0), x.stride(1))]


def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    return (kernel if INTERPRETED else torch.library.wrap_triton(kernel))[grid]


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes a tensor's device the current one, where Triton launches. It ignores the device of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


class Tiles(NamedTuple):
    """The tiles that the outputs of a sample are split into."""

    number: int
    columns: int  # tiles side by side
    rows: int  # rows of a tile
    reach: int  # most tokens from the first of a tile to its last

    def wide(self, strides: Sequence[int]) -> bool:
        """Whether the kernels for large maps are needed.

        They are if there are more tiles than an axis of the grid holds, or if a tile's last token is 2³¹ elements or
        more from its first. `strides` are those of `_strides`.
        """
        return self.number > MOST_ON_AN_AXIS or any(self.reach * stride >= 2**31 for stride in strides[1::2])

    def grid(self, plan: Plan) -> tuple[int, ...]:
        if self.number <= MOST_ON_AN_AXIS:
            return plan.programs, self.number
        layers = triton.cdiv(self.number, MOST_ON_AN_AXIS)
        return plan.programs, triton.cdiv(self.number, layers), layers


def tile_columns(width: int) -> int:
    """Columns of a tile. A symbolic width gets the usual number, because narrower tiles are not worth a compilation."""
    half = CONFIG.columns // 2
    return half if isinstance(width, int) and width <= half else CONFIG.columns


def make_tiles(plan: Plan, *, columns: int, local: bool) -> Tiles:
    """A packed batch has as many tiles as its image with the most. Its kernels count the columns of each image."""
    if not local:
        rows = CONFIG.tokens * CONFIG.steps
        return Tiles(triton.cdiv(max(plan.queries, plan.tokens), rows), 1, rows, rows)
    above_each_other = triton.cdiv(plan.height, CONFIG.tile // columns)
    rows = triton.cdiv(plan.height, above_each_other)
    number = max(triton.cdiv(height, rows) * triton.cdiv(width, columns) for height, width in plan.grids)
    return Tiles(number, triton.cdiv(plan.width, columns), rows, rows * plan.width)


def _count(token_mask: Tensor | None) -> Tensor | None:
    """Tokens present in each sample. A sample without any counts one, so that its sums of zeros stay zero."""
    return None if token_mask is None else token_mask.sum(1).clamp(min=1).float()


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


class Options(NamedTuple):
    """The arguments of an operator that are not tensors."""

    normalization: str
    feature_map: str
    anchored: bool  # the token weights are the softmax of the offset's scores
    scale: float
    grids: Sequence[int]
    num_prefix_tokens: int

    def effort(self, *, weighted: bool) -> str:
        """How much the attention computes for a token: the key of `STEPS`."""
        if self.normalization != "subtract" or self.feature_map in NONZERO_AT_ZERO:
            return "scaled"
        return "weighted" if weighted else "plain"


class Tensors(NamedTuple):
    """The tensors of an operator besides q, k and v."""

    local_weight: Tensor | None
    token_mask: Tensor | None
    query_mask: Tensor | None
    sequences: Tensor | None
    shares: Tensor | None  # (B, heads, N) float32; an anchor's scores
    offset: Tensor | None  # (B, 1, heads, d) float32


def anchor_scores(k: Tensor, tensors: Tensors, options: Options, plan: Plan) -> tuple[Tensor, Tensor]:
    """s·a·k for every token (B, heads, N), and log Σ exp of them (B, heads), float32"""
    scores = torch.empty((plan.batch, plan.heads, plan.tokens), dtype=torch.float32, device=k.device)
    tiles = triton.cdiv(plan.tokens, CONFIG.score_tokens)
    parts = torch.empty((plan.batch, plan.heads, tiles), dtype=torch.float32, device=k.device)
    mask = _as_bytes(tensors.token_mask)
    launch(anchor.scores_kernel, (plan.programs, tiles))(
        k, tensors.offset, mask, scores, parts, plan.tokens, options.scale, plan.blocks, plan.heads,
        *_strides(False, k),
        D=plan.key_dim, HEADS=plan.heads_per_block, BC=plan.block_keys, BN=CONFIG.score_tokens,
        HAS_MASK=mask is not None,
    )  # fmt: skip
    lse = torch.empty((plan.batch, plan.heads), dtype=torch.float32, device=k.device)
    launch(anchor.logsumexp_kernel, (plan.batch * plan.heads,))(parts, lse, tiles, BN=128, num_warps=1)
    return scores, lse


def run_forward(
    projections: Sequence[Tensor], tensors: Tensors, options: Options, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and what the backward needs: the state, the means of φ(k) − φ(0) and of v, and an anchor's scores
    and the logarithm of the sum of their exponentials"""
    q, k, v = unstack(projections)
    local_weight, token_mask, query_mask, sequences, shares, offset = tensors
    plan = make_plan(q, k, v, sequences, options.grids, options.num_prefix_tokens)
    height, width = plan.height, plan.width
    local = local_weight is not None
    out = torch.empty((*q.shape[:3], plan.value_dim), dtype=q.dtype, device=q.device)
    kept = plan.batch if save or not plan.fused else 0
    state_dtype = _state_dtype(q.dtype, options.feature_map, options.anchored)
    state = torch.empty((kept, plan.heads, plan.key_dim, plan.value_dim), dtype=state_dtype, device=q.device)
    means = torch.empty((kept, plan.heads * (plan.key_dim + plan.value_dim)), dtype=torch.float32, device=q.device)
    scores, lse = (torch.empty((0,), dtype=torch.float32, device=q.device) for _ in range(2))
    if out.numel() == 0:
        return out, state, means, scores, lse
    if options.anchored:
        shares, lse = scores, _ = anchor_scores(k, tensors, options, plan)
    masks = _as_bytes(token_mask), _as_bytes(query_mask)
    count = _count(token_mask)
    common = dict(**_common(plan, token_mask), WEIGHTED=shares is not None)
    anchored = dict(ANCHORED=options.anchored)
    effort = options.effort(weighted=shares is not None)
    products = dot_settings(q.dtype)
    centre = q.dtype == torch.float32 or shares is not None
    chosen = dict(MAP=options.feature_map, NORM=options.normalization, OFFSET=offset is not None)
    scale, prefix = options.scale, options.num_prefix_tokens
    mask_q = query_mask is not None
    if plan.fused:
        launch(forward.forward_kernel, (plan.programs,))(
            q, k, v, local_weight, *masks, count, sequences, shares, lse, offset, out, state, means,
            plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, plan.heads,
            *_strides(plan.packed, q, k, v, out),
            **common, **anchored, **chosen, **products, CENTRE=centre, LOCAL=local, MASK_Q=mask_q, SAVE=save,
            BW=tile_columns(width),
            **_step_settings("forward", effort, plan, q.dtype),
        )  # fmt: skip
        return out, state, means, scores, lse
    size = plan.block_keys * plan.block_values + 2 * (plan.block_keys + plan.block_values)
    parts = split(plan, plan.tokens, q.device, programs=CONFIG.scaled_state_programs if effort == "scaled" else None)
    sums = torch.empty((plan.programs, parts.most, size), dtype=torch.float32, device=q.device)
    launch(forward.state_kernel, (plan.programs, parts.number))(
        k, v, masks[0], sequences, shares, lse, sums, plan.tokens, height, width, plan.blocks, plan.heads,
        *_strides(plan.packed, k, v),
        **common, **anchored, **products, MAP=options.feature_map, CENTRE=centre,
        **_step_settings("state", effort, plan, q.dtype),
    )  # fmt: skip
    block = _sum_settings(plan, parts)
    launch(forward.finish_kernel, (plan.programs, plan.block_keys // block["BR"]))(
        sums, count, sequences, state, means, plan.tokens, height, width, scale, parts.number, plan.blocks, plan.heads,
        **common, **block, CENTRE=centre, PIVOTED=shares is not None and q.dtype != torch.float32,
    )  # fmt: skip
    tiles = make_tiles(plan, columns=CONFIG.output_columns, local=local)
    strides = _strides(plan.packed, q, v, out)
    launch(forward.output_kernel, tiles.grid(plan))(
        q, v, local_weight, *masks, count, sequences, offset, out, state, means,
        plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, tiles.columns, tiles.rows, plan.heads,
        *strides,
        **_common(plan, token_mask), **chosen, **products, LOCAL=local, MASK_Q=mask_q, BW=CONFIG.output_columns,
        WIDE=tiles.wide(strides), **_step_settings("output", effort, plan, q.dtype),
    )  # fmt: skip
    return out, state, means, scores, lse


def _step_settings(kernel: str, effort: str, plan: Plan, dtype: torch.dtype) -> dict[str, int]:
    """Launch settings of a kernel that steps over tokens: as configured for 32 channels, with more warps for 64.

    A state of 128² takes the registers of eight warps and most of the shared memory, so steps are short and not
    pipelined there. Float32 products are unrolled over a step, which must be short for registers to hold it.
    """
    if plan.block_channels > 64:
        return dict(BN=16, num_warps=8, num_stages=1)
    tokens, warps, stages = STEPS[effort][kernel]
    tokens = min(tokens, CONFIG.tokens)
    if dtype == torch.float32:
        tokens, warps = min(tokens, 32), max(warps, 2)
    return dict(BN=tokens, num_warps=warps * max(1, plan.block_channels // 32), num_stages=stages)


def _sum_settings(plan: Plan, parts: Parts) -> dict[str, int]:
    """Launch settings of a kernel that adds the parts: how many of them, and rows of the state, a program sums.

    It sums all parts at once if there are not too many, and few rows, so that registers hold them and many programs
    share the work. Warps are few, so that a thread sums most parts by itself.
    """
    at_once = min(parts.most, CONFIG.summed_parts)
    rows = max(1, min(4, 16384 // (at_once * plan.block_values)))
    warps = max(1, min(4, at_once * rows * plan.block_values // 2048))
    return dict(BP=at_once, STEPS=parts.most // at_once, BR=rows, num_warps=warps)


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
    g = _rows(grad_out)
    plan = make_plan(q, k, v, sequences, options.grids, options.num_prefix_tokens)
    height, width = plan.height, plan.width
    local = local_weight is not None
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in projections]
    grad_tensors = (*grads, None, None)[:3]
    layout = _layout(projections)
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
    masks = _as_bytes(token_mask), _as_bytes(query_mask)
    count = _count(token_mask)
    common = dict(**_common(plan, token_mask), MAP=options.feature_map, NORM=options.normalization)
    weighted, shifted = dict(WEIGHTED=shares is not None), dict(OFFSET=offset is not None)
    products = dot_settings(q.dtype)
    effort = options.effort(weighted=shares is not None)
    scale, prefix = options.scale, options.num_prefix_tokens
    mask_q = query_mask is not None
    strides = _strides(plan.packed, q, k, v, g, *(grad for grad in grads for _ in range(grad.shape[2])))
    grad_mean = room(plan.batch, plan.heads, 1, plan.value_dim)
    if plan.fused:
        launch(backward.backward_kernel, (plan.programs,))(
            q, k, v, local_weight, g, *masks, count, sequences, shares, lse, offset, state, means,
            *grad_tensors, grad_local, grad_shares, grad_mean,
            plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, plan.heads, *strides,
            **common, **weighted, **shifted, **products, LOCAL=local, GRAD_LOCAL=grad_of_local, MASK_Q=mask_q,
            ANCHORED=options.anchored, LAYOUT=layout, BW=tile_columns(width),
            **_step_settings("backward", effort, plan, q.dtype),
        )  # fmt: skip
        return [
            *grads,
            grad_local,
            grad_shares,
            _offset_grad(grads, k, state, grad_mean, grad_shares, tensors, options, plan),
        ]
    size = plan.block_keys * plan.block_values + plan.block_keys + 10 * plan.block_values
    parts = split(plan, plan.queries, q.device, rows=height if grad_of_local else 0)
    sums = room(plan.programs, parts.most, size)
    grad_state = room(*state.shape)
    grad_k_mean = room(plan.batch, plan.heads, 1, plan.key_dim)
    launch(backward.grad_state_kernel, (plan.programs, parts.number))(
        q, v, g, *masks, count, sequences, offset, state, means, grads[0], sums,
        plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, plan.heads,
        *_strides(plan.packed, q, v, g, grads[0]),
        **common, **shifted, **products, GRAD_LOCAL=grad_of_local, MASK_Q=mask_q, BW=tile_columns(width),
        **_step_settings("grad_state", effort, plan, q.dtype),
    )  # fmt: skip
    block = _sum_settings(plan, parts)
    launch(backward.grad_finish_kernel, (plan.programs, plan.block_channels // block["BR"]))(
        sums, count, sequences, grad_state, grad_k_mean, grad_mean, grad_local,
        plan.tokens, height, width, scale, parts.number, plan.blocks, plan.heads,
        **common, **weighted, **block, GRAD_LOCAL=grad_of_local,
    )  # fmt: skip
    columns = tile_columns(width)
    tiles = make_tiles(plan, columns=columns, local=local)
    launch(backward.grad_kernel, tiles.grid(plan))(
        q, k, v, local_weight, g, *masks, sequences, shares, lse, offset, state, means,
        grad_state, grad_k_mean, grad_mean, *grad_tensors, grad_shares,
        plan.queries, plan.tokens, height, width, prefix, scale, plan.blocks, tiles.columns, tiles.rows, plan.heads,
        *strides,
        **common, **weighted, **shifted, **products, LOCAL=local, MASK_Q=mask_q, ANCHORED=options.anchored,
        LAYOUT=layout, BW=columns, WIDE=tiles.wide(strides),
        **_step_settings("grad", effort, plan, q.dtype),
    )  # fmt: skip
    return [
        *grads,
        grad_local,
        grad_shares,
        _offset_grad(grads, k, state, grad_mean, grad_shares, tensors, options, plan),
    ]


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
        return -unstack(grads)[0].sum(1, keepdim=True, dtype=torch.float32)
    # Σ dq = dv̄·Sᵀ, without a pass over the queries.
    total = grad_mean @ state.float().mT
    if tensors.shares is None:
        mask = tensors.token_mask
        count = plan.tokens if mask is None else mask.sum(1).clamp(min=1)[:, None, None, None]
        total = total * count
    grad = -total.transpose(1, 2)
    if not options.anchored:
        return grad
    parts = split(plan, plan.tokens, k.device)
    sums = grad.new_empty((parts.number, plan.batch, 1, plan.heads, plan.key_dim))
    mask = _as_bytes(tensors.token_mask)
    launch(anchor.weighted_sum_kernel, (plan.programs, parts.number))(
        k, grad_shares, mask, sums, plan.tokens, plan.blocks, plan.heads, *_strides(False, k),
        D=plan.key_dim, HEADS=plan.heads_per_block, BC=plan.block_keys, BN=CONFIG.tokens, HAS_MASK=mask is not None,
    )  # fmt: skip
    return grad + options.scale * sums.sum(0)


# torch.compile sees the launches inside a `triton_op` and inlines them, so that no Python runs between kernels.
# Launches in the interpreter cannot be traced, so the operator is opaque there.
register: Any = torch.library.custom_op if INTERPRETED else torch.library.triton_op


@register("inline_attention::forward", mutates_args=())
def _forward_op(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device_of(projections[0]):
        tensors = Tensors(local_weight, token_mask, query_mask, sequences, shares, offset)
        options = Options(normalization, feature_map, anchored, scale, grids, num_prefix_tokens)
        return run_forward(projections, tensors, options, save)


@register("inline_attention::backward", mutates_args=())
def _backward_op(
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


@_forward_op.register_fake
def _(projections, local_weight, token_mask, query_mask, sequences, shares, offset, *rest):  # type: ignore[no-untyped-def]  # as the operator
    options, save = Options(*rest[:-1]), rest[-1]
    q, k, v = unstack(projections)
    plan = make_plan(q, k, v, sequences, options.grids, options.num_prefix_tokens)
    kept = plan.batch if save or not plan.fused else 0
    state_dtype = _state_dtype(q.dtype, options.feature_map, options.anchored)
    lse = (plan.batch, plan.heads) if options.anchored else (0,)
    scores = (*lse, plan.tokens) if options.anchored else (0,)
    return (
        q.new_empty((*q.shape[:3], plan.value_dim)),
        q.new_empty((kept, plan.heads, plan.key_dim, plan.value_dim), dtype=state_dtype),
        q.new_empty((kept, plan.heads * (plan.key_dim + plan.value_dim)), dtype=torch.float32),
        q.new_empty(scores, dtype=torch.float32),
        q.new_empty(lse, dtype=torch.float32),
    )


@_backward_op.register_fake
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
    tensors, options = Tensors(*rest[:6]), Options(*rest[6:-1])
    _, state, means, scores, lse = output
    if options.anchored:
        tensors = tensors._replace(shares=scores)
    ctx.save_for_backward(*projections, *tensors, state, means, lse)
    ctx.options = options


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    *projections, local_weight, token_mask, query_mask, sequences, shares, offset, state, means, lse = ctx.saved_tensors
    grad_of_local = ctx.needs_input_grad[1]
    *grads, grad_local, grad_shares, grad_offset = _backward_op(
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
        *[None] * 7,
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _flops(projections: Any, local_weight: Any, products: int, local: int) -> int:
    """`products` products of queries with d×e states, as many of keys, and `local` sums over nine taps.

    The arguments are shapes instead of tensors.
    """
    batch, queries, _, heads, key_dim = projections[0]
    _, tokens, _, _, value_dim = projections[-1]
    sums = 0 if local_weight is None else local * 9 * tokens
    return 2 * batch * heads * value_dim * (products * (queries + tokens) * key_dim + sums)


@register_flop_formula(torch.ops.inline_attention.forward)
def _forward_flops(projections: Any, local_weight: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(projections, local_weight, products=1, local=1)


@register_flop_formula(torch.ops.inline_attention.backward)
def _backward_flops(grad_out: Any, projections: Any, local_weight: Any, *args: Any, **kwargs: Any) -> int:
    grad_of_local = args[-1]
    return _flops(projections, local_weight, products=2, local=2 if grad_of_local else 1)


def why_not(x: Tensor) -> str | None:
    """Why the kernels cannot run on tensors such as x (…, heads, d), or None if they can."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels compute in bfloat16, float16 or float32, not in {x.dtype}"
    if not x.is_cuda and not INTERPRETED:
        return f"the kernels run on a GPU, and the inputs are on {x.device}"
    if x.is_cuda and (reason := gpu.why_not(x.device)):
        return reason
    return why_not_widths(x.shape[-1], x.shape[-1], x.device)


def why_not_widths(key_dim: int, value_dim: int, device: torch.device) -> str | None:
    """Why the kernels cannot run with heads of so many features and values, or None if they can."""
    channels = max(key_dim, value_dim)
    if channels > MOST_CHANNELS:
        return f"the kernels hold heads of up to {MOST_CHANNELS} channels, not of {channels}"
    if channels > WITHIN_ANY_MEMORY and (reason := gpu.why_not_memory(WIDE_MEMORY, device)):
        return f"with heads of {channels} channels {reason}"
    return None


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise in forward-mode differentiation. Operators without a rule for it drop tangents silently."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "the kernels have no forward-mode derivative (torch.func.jvp); differentiate in reverse mode, or write the "
            "attention with attention_matrix"
        )


def attention(
    projections: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    sequences: Tensor | None,
    shares: Tensor | None,
    offset: Tensor | None,
    *,
    anchored: bool,
    normalization: str,
    feature_map: str,
    scale: float,
    grids: Sequence[Grid],
    num_prefix_tokens: int,
) -> Tensor:
    """The backend's entry. Inputs are checked and defaults filled in.

    Args:
        sequences: (images, 4) integers for a packed batch: first token, tokens, height and width of each image.
        shares: the normalised token weight (B, heads, N).
        offset: what is subtracted from the queries, (B, 1, heads, d).
        anchored: the shares are the softmax of the offset's scores. They are computed here.
        feature_map: the kernels' name of φ, `FeatureMap.kernel`.
        grids: (height, width) of the map; of each image's map for a packed batch.
    """
    shares, offset = (None if x is None else x.float().contiguous() for x in (shares, offset))
    differentiable = (*projections, local_weight, shares, offset)
    refuse_tangents(*differentiable)
    out, *_ = _forward_op(
        [_rows(x) for x in projections],
        None if local_weight is None else local_weight.contiguous(),
        None if token_mask is None else token_mask.contiguous(),
        None if query_mask is None else query_mask.contiguous(),
        sequences,
        shares,
        offset,
        normalization,
        feature_map,
        anchored,
        scale,
        [length for grid in grids for length in grid],
        num_prefix_tokens,
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable),
    )
    return out
