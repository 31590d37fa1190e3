"""InLine attention as Triton kernels: how they are launched, their gradients and their cost.

q, k and v arrive as `projections`: tensors (B, N, m, heads, d) that hold m of them next to each other. A qkv projection
is one tensor of three, q and kv are tensors of one and two. The kernels read q, k and v, and write their gradients, in
the layout of these tensors.
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

from .feature_maps import NONZERO_AT_ZERO
from .kernels import backward, forward
from .local import Grid
from .projections import unstack

INTERPRETED = triton.knobs.runtime.interpret


class Config(NamedTuple):
    """Launch parameters, one set for every length, resolution and batch.

    They are the fastest of those tried by hand on an H200 in bfloat16 with heads of 32 channels. `part` is there for
    accuracy and `summed_parts` for compile time. Other GPUs and widths run with them too, but were not tuned.
    """

    tokens: int = 64  # tokens per step of a loop
    columns: int = 16  # of a tile of the map; half as many for a map that narrow
    output_columns: int = 8  # the same in output_kernel
    tile: int = 128  # most tokens in a tile of the map
    steps: int = 4  # steps over tokens in a tile where there is no map
    state_warps: int = 1
    state_stages: int = 2
    output_warps: int = 1
    grad_warps: int = 2
    output_stages: int = 2
    fused_warps: int = 2
    forward_stages: int = 2
    backward_stages: int = 3
    state_programs: int = 8  # programs per multiprocessor that the tokens of a sample are split for
    most_parts: int = 128  # most parts for that; a power of two
    part: int = 2048  # most tokens in a part: tensor cores sum a part, and round towards zero
    summed_parts: int = 128  # parts that are added at once
    fused_tokens: int = 256  # most tokens of a sample that one program handles alone, if there are at least
    fused_programs: int = 4  # this many programs per multiprocessor


CONFIG = Config()
# A step costs the same at any size in the interpreter. Small steps take small test shapes through every loop.
if INTERPRETED:
    CONFIG = Config(
        tokens=16, tile=32, steps=1, state_programs=2, part=64, summed_parts=2, fused_tokens=40, fused_programs=0
    )

# Most channels of a head.
MOST_CHANNELS = 128

# Least channels of a program, if there are enough heads. They fill a memory sector and a tensor core's tile.
LEAST_CHANNELS = 32

# Tensor cores of older GPUs have neither bfloat16 nor tf32.
LEAST_CAPABILITY = (8, 0)

# Most elements from one token to the next. Offsets in a step of up to 64 tokens have 32 bits.
LONGEST_STRIDE = 2**31 // 64 - 1

# Most programs on the second and third axis of a launch grid.
MOST_ON_AN_AXIS = 65_535


def _multiprocessors(device: torch.device) -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


class Plan(NamedTuple):
    """What a launch is made of. It depends on shapes alone."""

    batch: int
    queries: int  # of a sample, or of the longest packed image
    tokens: int
    heads: int
    head_dim: int
    heads_per_block: int
    block_channels: int
    blocks: int  # blocks of channels
    fused: bool  # one program per sample and block
    packed: bool
    grids: list[Grid]  # one, or one for each packed image

    @property
    def programs(self) -> int:
        return self.batch * self.blocks

    @property
    def height(self) -> int:
        return max(height for height, _ in self.grids)

    @property
    def width(self) -> int:
        return max(width for _, width in self.grids)


def make_plan(q: Tensor, k: Tensor, sequences: Tensor | None, grids: Sequence[int], num_prefix_tokens: int) -> Plan:
    heads, head_dim = q.shape[2:]
    heads_per_block = max(1, min(LEAST_CHANNELS // head_dim, heads))
    block_channels = max(16, triton.next_power_of_2(heads_per_block * head_dim))
    blocks = triton.cdiv(heads, heads_per_block)
    pairs = list(zip(grids[::2], grids[1::2], strict=True))
    batch, queries, tokens = q.shape[0], q.shape[1], k.shape[1]
    if sequences is not None:
        batch = sequences.shape[0]
        queries = tokens = num_prefix_tokens + max(height * width for height, width in pairs)
    fused = tokens <= CONFIG.fused_tokens and batch * blocks >= CONFIG.fused_programs * _multiprocessors(q.device)
    return Plan(batch, queries, tokens, heads, head_dim, heads_per_block, block_channels, blocks, fused,
                sequences is not None, pairs)  # fmt: skip


class Parts(NamedTuple):
    """How many parts the tokens of a sample are split into."""

    number: int
    most: int  # a power of two


def split(plan: Plan, tokens: int, device: torch.device, *, rows: int = 0) -> Parts:
    """Enough parts for the configured programs per multiprocessor and tokens per part, but no more than there are steps
    over tokens, or rows.

    `most` is found by comparisons, so that it is a plain number for torch.compile when sizes are symbolic.
    """
    programs = CONFIG.state_programs * _multiprocessors(device)
    most = CONFIG.most_parts
    while most > 1 and plan.programs * most > programs:
        most //= 2
    while most * CONFIG.part < tokens:
        most *= 2
    return Parts(torch.sym_min(most, torch.sym_max(triton.cdiv(tokens, CONFIG.tokens), rows)), most)


def _common(plan: Plan, token_mask: Tensor | None) -> dict[str, Any]:
    return dict(
        D=plan.head_dim,
        HEADS=plan.heads_per_block,
        BC=plan.block_channels,
        HAS_MASK=token_mask is not None,
        PACKED=plan.packed,
    )


def dot_settings(dtype: torch.dtype) -> dict[str, Any]:
    """The dtype of matrix products. float16 inputs use tf32, which also holds a state too large for float16."""
    if dtype == torch.bfloat16:
        return dict(DOT=tl.bfloat16, PRECISION="tf32")
    return dict(DOT=tl.float32, PRECISION="ieee" if dtype == torch.float32 else "tf32")


def _state_dtype(dtype: torch.dtype, feature_map: str) -> torch.dtype:
    """The dtype that S is kept in: that of the products for bfloat16, else float32.

    Where φ(0) is not zero the sum of S's rows is needed too, and that takes all digits of S.
    """
    return dtype if dtype == torch.bfloat16 and feature_map not in NONZERO_AT_ZERO else torch.float32


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
    """Makes a tensor's device the current one. Triton launches on the current device, whatever its arguments are on."""
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


def run_forward(
    projections: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    sequences: Tensor | None,
    feature_map: str,
    scale: float,
    grids: Sequence[int],
    num_prefix_tokens: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = unstack(projections)
    plan = make_plan(q, k, sequences, grids, num_prefix_tokens)
    height, width = plan.height, plan.width
    local = local_weight is not None
    channels = plan.heads * plan.head_dim
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kept = plan.batch if save or not plan.fused else 0
    state = torch.empty(
        (kept, plan.heads, plan.head_dim, plan.head_dim), dtype=_state_dtype(q.dtype, feature_map), device=q.device
    )
    means = torch.empty((kept, 2, channels), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, state, means
    masks = _as_bytes(token_mask), _as_bytes(query_mask)
    count = _count(token_mask)
    common = _common(plan, token_mask)
    mapped = dict(**common, MAP=feature_map)
    products = dot_settings(q.dtype)
    centre = q.dtype == torch.float32
    mask_q = query_mask is not None
    if plan.fused:
        launch(forward.forward_kernel, (plan.programs,))(
            q, k, v, local_weight, *masks, count, sequences, out, state, means,
            plan.queries, plan.tokens, height, width, num_prefix_tokens, scale, plan.blocks, channels,
            *_strides(plan.packed, q, k, v, out),
            **mapped, **products, CENTRE=centre, LOCAL=local, MASK_Q=mask_q, SAVE=save, BW=tile_columns(width),
            **_step_settings(plan, q.dtype, CONFIG.fused_warps, CONFIG.forward_stages),
        )  # fmt: skip
        return out, state, means
    size = plan.block_channels * (plan.block_channels + 4)
    parts = split(plan, plan.tokens, q.device)
    sums = torch.empty((plan.programs, parts.most, size), dtype=torch.float32, device=q.device)
    launch(forward.state_kernel, (plan.programs, parts.number))(
        k, v, masks[0], sequences, sums, plan.tokens, height, width, plan.blocks, channels,
        *_strides(plan.packed, k, v),
        **mapped, **products, CENTRE=centre, **_step_settings(plan, q.dtype, CONFIG.state_warps, CONFIG.state_stages),
    )  # fmt: skip
    block = _sum_settings(plan, parts)
    launch(forward.finish_kernel, (plan.programs, plan.block_channels // block["BR"]))(
        sums, count, sequences, state, means, plan.tokens, height, width, scale, parts.number, plan.blocks, channels,
        **common, **block, CENTRE=centre,
    )  # fmt: skip
    tiles = make_tiles(plan, columns=CONFIG.output_columns, local=local)
    strides = _strides(plan.packed, q, v, out)
    launch(forward.output_kernel, tiles.grid(plan))(
        q, v, local_weight, *masks, sequences, out, state, means,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, tiles.columns, tiles.rows, channels,
        *strides,
        **mapped, **products, LOCAL=local, MASK_Q=mask_q, BW=CONFIG.output_columns, WIDE=tiles.wide(strides),
        **_step_settings(plan, q.dtype, CONFIG.output_warps, CONFIG.output_stages),
    )  # fmt: skip
    return out, state, means


def _step_settings(plan: Plan, dtype: torch.dtype, warps: int, stages: int) -> dict[str, int]:
    """Launch settings of a kernel that steps over tokens: as configured for 32 channels, with more warps for 64.

    A state of 128² takes the registers of eight warps and most of the shared memory, so steps are short and not
    pipelined there. Float32 products are unrolled over a step, which must be short for registers to hold it.
    """
    if plan.block_channels > 64:
        return dict(BN=16, num_warps=8, num_stages=1)
    tokens = CONFIG.tokens
    if dtype == torch.float32:
        tokens, warps = min(tokens, 32), max(warps, 2)
    return dict(BN=tokens, num_warps=warps * max(1, plan.block_channels // 32), num_stages=stages)


def _sum_settings(plan: Plan, parts: Parts) -> dict[str, int]:
    """Launch settings of a kernel that adds the parts: how many of them, and rows of the state, a program sums.

    It sums all parts at once if there are not too many, and few rows, so that registers hold them and many programs
    share the work. Warps are few, so that a thread sums most parts by itself.
    """
    at_once = min(parts.most, CONFIG.summed_parts)
    rows = max(1, min(4, 16384 // (at_once * plan.block_channels)))
    warps = max(1, min(4, at_once * rows * plan.block_channels // 2048))
    return dict(BP=at_once, STEPS=parts.most // at_once, BR=rows, num_warps=warps)


def run_backward(
    grad_out: Tensor,
    projections: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    sequences: Tensor | None,
    state: Tensor,
    means: Tensor,
    feature_map: str,
    scale: float,
    grids: Sequence[int],
    num_prefix_tokens: int,
    grad_of_local: bool,
) -> list[Tensor]:
    q, k, v = unstack(projections)
    g = _rows(grad_out)
    plan = make_plan(q, k, sequences, grids, num_prefix_tokens)
    height, width = plan.height, plan.width
    local = local_weight is not None
    channels = plan.heads * plan.head_dim
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in projections]
    grad_tensors = (*grads, None, None)[:3]
    layout = _layout(projections)
    wanted = local_weight if grad_of_local else None
    grad_local = torch.empty(
        (0,) if wanted is None else wanted.shape, dtype=(q if wanted is None else wanted).dtype, device=q.device
    )
    if g.numel() == 0:
        return [x.zero_() for x in (*grads, grad_local)]
    masks = _as_bytes(token_mask), _as_bytes(query_mask)
    count = _count(token_mask)
    mapped = dict(**_common(plan, token_mask), MAP=feature_map)
    products = dot_settings(q.dtype)
    mask_q = query_mask is not None
    strides = _strides(plan.packed, q, k, v, g, *(grad for grad in grads for _ in range(grad.shape[2])))
    if plan.fused:
        launch(backward.backward_kernel, (plan.programs,))(
            q, k, v, local_weight, g, *masks, count, sequences, state, means, *grad_tensors, grad_local,
            plan.queries, plan.tokens, height, width, num_prefix_tokens, scale, plan.blocks, channels, *strides,
            **mapped, **products, LOCAL=local, GRAD_LOCAL=grad_of_local, MASK_Q=mask_q, LAYOUT=layout,
            BW=tile_columns(width),
            **_step_settings(plan, q.dtype, CONFIG.fused_warps, CONFIG.backward_stages),
        )  # fmt: skip
        return [*grads, grad_local]
    size = plan.block_channels * (plan.block_channels + 10)
    parts = split(plan, plan.queries, q.device, rows=height if grad_of_local else 0)
    sums = torch.empty((plan.programs, parts.most, size), dtype=torch.float32, device=q.device)
    grad_state = torch.empty(state.shape, dtype=torch.float32, device=q.device)
    grad_mean = torch.empty((plan.batch, channels), dtype=torch.float32, device=q.device)
    launch(backward.grad_state_kernel, (plan.programs, parts.number))(
        q, v, g, *masks, sequences, sums,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, channels,
        *_strides(plan.packed, q, v, g),
        **mapped, **products, GRAD_LOCAL=grad_of_local, MASK_Q=mask_q, BW=tile_columns(width),
        **_step_settings(plan, q.dtype, CONFIG.state_warps, CONFIG.state_stages),
    )  # fmt: skip
    block = _sum_settings(plan, parts)
    launch(backward.grad_finish_kernel, (plan.programs, plan.block_channels // block["BR"]))(
        sums, count, sequences, grad_state, grad_mean, grad_local,
        plan.tokens, height, width, scale, parts.number, plan.blocks, channels,
        **mapped, **block, GRAD_LOCAL=grad_of_local,
    )  # fmt: skip
    columns = tile_columns(width)
    tiles = make_tiles(plan, columns=columns, local=local)
    launch(backward.grad_kernel, tiles.grid(plan))(
        q, k, v, local_weight, g, *masks, sequences, state, means, grad_state, grad_mean, *grad_tensors,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, tiles.columns, tiles.rows, channels,
        *strides,
        **mapped, **products, LOCAL=local, MASK_Q=mask_q, LAYOUT=layout, BW=columns, WIDE=tiles.wide(strides),
        **_step_settings(plan, q.dtype, CONFIG.grad_warps, CONFIG.output_stages),
    )  # fmt: skip
    return [*grads, grad_local]


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
    feature_map: str,
    scale: float,
    grids: Sequence[int],
    num_prefix_tokens: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    with on_device_of(projections[0]):
        return run_forward(
            projections, local_weight, token_mask, query_mask, sequences,
            feature_map, scale, grids, num_prefix_tokens, save,
        )  # fmt: skip


@register("inline_attention::backward", mutates_args=())
def _backward_op(
    grad_out: Tensor,
    projections: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    sequences: Tensor | None,
    state: Tensor,
    means: Tensor,
    feature_map: str,
    scale: float,
    grids: Sequence[int],
    num_prefix_tokens: int,
    grad_of_local: bool,
) -> list[Tensor]:
    with on_device_of(grad_out):
        return run_backward(
            grad_out, projections, local_weight, token_mask, query_mask, sequences, state, means,
            feature_map, scale, grids, num_prefix_tokens, grad_of_local,
        )  # fmt: skip


@_forward_op.register_fake
def _(projections, local_weight, token_mask, query_mask, sequences, *options):  # type: ignore[no-untyped-def]  # as the operator
    feature_map, _, grids, num_prefix_tokens, save = options
    q, k, _ = unstack(projections)
    plan = make_plan(q, k, sequences, grids, num_prefix_tokens)
    kept = plan.batch if save or not plan.fused else 0
    state = q.new_empty((kept, plan.heads, plan.head_dim, plan.head_dim), dtype=_state_dtype(q.dtype, feature_map))
    return q.new_empty(q.shape), state, q.new_empty((kept, 2, plan.heads * plan.head_dim), dtype=torch.float32)


@_backward_op.register_fake
def _(grad_out, projections, local_weight, *args):  # type: ignore[no-untyped-def]  # as the operator
    grad_of_local = args[-1]
    return [
        *(x.new_empty(x.shape) for x in projections),
        torch.empty_like(local_weight) if grad_of_local else grad_out.new_empty((0,)),
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    projections, local_weight, token_mask, query_mask, sequences, *options, _ = inputs
    ctx.save_for_backward(*projections, local_weight, token_mask, query_mask, sequences, *output[1:])
    ctx.options = options


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    *projections, local_weight, token_mask, query_mask, sequences, state, means = ctx.saved_tensors
    grad_of_local = ctx.needs_input_grad[1]
    *grads, grad_local = _backward_op(
        grad_out, projections, local_weight, token_mask, query_mask, sequences, state, means,
        *ctx.options, grad_of_local,
    )  # fmt: skip
    return grads, grad_local if grad_of_local else None, *[None] * 8


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _flops(projections: Any, local_weight: Any, products: int, local: int) -> int:
    """`products` products of queries with d×d states, as many of keys, and `local` sums over nine taps.

    The arguments are shapes in the place of tensors.
    """
    batch, queries, _, heads, head_dim = projections[0]
    tokens = projections[-1][1]
    sums = 0 if local_weight is None else local * 9 * tokens
    return 2 * batch * heads * head_dim * (products * (queries + tokens) * head_dim + sums)


@register_flop_formula(torch.ops.inline_attention.forward)
def _forward_flops(projections: Any, local_weight: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(projections, local_weight, products=1, local=1)


@register_flop_formula(torch.ops.inline_attention.backward)
def _backward_flops(grad_out: Any, projections: Any, local_weight: Any, *args: Any, **kwargs: Any) -> int:
    grad_of_local = args[-1]
    return _flops(projections, local_weight, products=2, local=2 if grad_of_local else 1)


# A constant for torch.compile.
@torch.compiler.assume_constant_result
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def why_not(x: Tensor) -> str | None:
    """Why the kernels cannot run on tensors such as x (…, heads, d), or None if they can."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels compute in bfloat16, float16 or float32, not in {x.dtype}"
    if x.shape[-1] > MOST_CHANNELS:
        return f"the kernels hold heads of up to {MOST_CHANNELS} channels, not of {x.shape[-1]}"
    if not x.is_cuda and not INTERPRETED:
        return f"the kernels run on a GPU, and the inputs are on {x.device}"
    if x.is_cuda and torch.version.hip is not None:
        return "the kernels are tuned and tested on NVIDIA GPUs, and this PyTorch is built for ROCm"
    if x.is_cuda and _capability(x.device) < LEAST_CAPABILITY:
        return f"the kernels need a GPU of compute capability 8.0 (Ampere) or above, and {x.device} has less"
    return None


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Forward-mode differentiation would go on with zeros: operators without a rule for it drop tangents silently."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "the kernels have no forward-mode derivative (torch.func.jvp); differentiate in reverse mode, or write the "
            "attention with attention_matrix"
        )


def inline_attention(
    projections: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    sequences: Tensor | None,
    *,
    feature_map: str,
    scale: float,
    grids: Sequence[Grid],
    num_prefix_tokens: int,
) -> Tensor:
    """The backend's entry. Inputs are checked and defaults filled in.

    Args:
        sequences: (images, 4) integers for a packed batch: first token, tokens, height and width of each image.
        feature_map: the kernels' name of φ, `FeatureMap.kernel`.
        grids: (height, width) of the map; of each image's map for a packed batch.
    """
    refuse_tangents(*projections, local_weight)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*projections, local_weight))
    out, _, _ = _forward_op(
        [_rows(x) for x in projections],
        None if local_weight is None else local_weight.contiguous(),
        None if token_mask is None else token_mask.contiguous(),
        None if query_mask is None else query_mask.contiguous(),
        sequences,
        feature_map,
        scale,
        [length for grid in grids for length in grid],
        num_prefix_tokens,
        save,
    )
    return out
