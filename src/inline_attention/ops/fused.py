"""InLine attention as Triton kernels: how they are launched, their gradients and their cost.

q, k and v arrive as `sources`, tensors (B, N, m, heads, d) that hold m of them next to each other: one of three for a
qkv projection, one and two for q and kv, or three of one. So they are read, and their gradients written, where the
projections keep them.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .kernels import backward, forward

INTERPRETED = triton.knobs.runtime.interpret


class Config(NamedTuple):
    """Launch parameters: one set for every length, resolution and batch, found by a sweep on an H200."""

    tokens: int = 64  # a step over tokens
    columns: int = 16  # of the map, a tile; half of them where the map is that narrow
    output_columns: int = 8
    tile: int = 128  # tokens, a tile of the map, at most
    steps: int = 4  # over tokens, a tile where there is no map
    state_warps: int = 1
    state_stages: int = 2
    output_warps: int = 1
    grad_warps: int = 2
    output_stages: int = 2
    fused_warps: int = 2
    forward_stages: int = 2
    backward_stages: int = 3
    state_programs: int = 8  # a multiprocessor, where the tokens of a sample are split
    grad_state_programs: int = 8
    most_parts: int = 128
    fused_tokens: int = 256  # up to so many a sample is one program's,
    fused_programs: int = 4  # unless they are fewer than so many a multiprocessor


CONFIG = Config()
# A step of the interpreter costs the same whatever its size: small ones make small test shapes go through every loop.
if INTERPRETED:
    CONFIG = Config(
        tokens=16, tile=32, steps=1, state_programs=2, grad_state_programs=3, fused_tokens=40, fused_programs=0
    )

# Channels of a program: whole heads, of at least a sector of half-precision numbers and a tensor core's tile.
LEAST_CHANNELS = 32


def _multiprocessors(device: torch.device) -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


class Plan(NamedTuple):
    """What a launch is made of, from the shapes alone."""

    batch: int
    queries: int
    tokens: int
    heads: int
    head_dim: int
    heads_per_block: int
    block_channels: int
    blocks: int  # of channels
    fused: bool  # one program a sample and block
    height: int
    width: int

    @property
    def programs(self) -> int:
        return self.batch * self.blocks


def make_plan(q: Tensor, k: Tensor, sequences: Tensor | None, height: int, width: int) -> Plan:
    heads, head_dim = q.shape[2:]
    heads_per_block = min(max(1, LEAST_CHANNELS // head_dim), heads)
    block_channels = max(16, triton.next_power_of_2(heads_per_block * head_dim))
    blocks = triton.cdiv(heads, heads_per_block)
    batch = q.shape[0] if sequences is None else sequences.shape[0]
    longest = k.shape[1] if sequences is None else height * width
    fused = longest <= CONFIG.fused_tokens and batch * blocks >= CONFIG.fused_programs * _multiprocessors(q.device)
    return Plan(batch, q.shape[1], k.shape[1], heads, head_dim, heads_per_block, block_channels, blocks, fused,
                height, width)  # fmt: skip


def _parts(plan: Plan, programs: int, device: torch.device) -> int:
    """Of a sample's tokens, for so many programs a multiprocessor: a number that does not depend on the tokens."""
    return max(1, min(CONFIG.most_parts, programs * _multiprocessors(device) // plan.programs))


def _common(plan: Plan, mask: Tensor | None, sequences: Tensor | None, feature_map: str) -> dict[str, Any]:
    return dict(
        MAP=feature_map,
        D=plan.head_dim,
        HEADS=plan.heads_per_block,
        BC=plan.block_channels,
        HAS_MASK=mask is not None,
        PACKED=sequences is not None,
    )


def dot_settings(dtype: torch.dtype) -> dict[str, Any]:
    """In what matrices are multiplied: float16 numbers fit in tf32, and a state that is too large for float16 too."""
    if dtype == torch.bfloat16:
        return dict(DOT=tl.bfloat16, PRECISION="tf32")
    return dict(DOT=tl.float32, PRECISION="ieee" if dtype == torch.float32 else "tf32")


def _state_dtype(dtype: torch.dtype, feature_map: str) -> torch.dtype:
    """In what S is kept: float32, or as the products take it. The sum of its rows, which exp needs, takes all of S."""
    return dtype if dtype == torch.bfloat16 and feature_map != "exp" else torch.float32


def _views(sources: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = [x for source in sources for x in source.unbind(2)]
    return q, k, v


def _layout(sources: Sequence[Tensor]) -> str:
    """Which of q, k and v each tensor holds: "qkv", "q,kv", …"""
    names = iter("qkv")
    return ",".join("".join(islice(names, source.shape[2])) for source in sources)


def _rows(x: Tensor) -> Tensor:
    """x (…, heads, d) itself if the channels of a token lie next to each other, else a copy for which they do."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def _strides(packed: bool, *tensors: Tensor) -> list[int]:
    """Of the batch and of the tokens, in turn."""
    return [stride for x in tensors for stride in (0 if packed else x.stride(0), x.stride(1))]


def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    return (kernel if INTERPRETED else torch.library.wrap_triton(kernel))[grid]


class Tiles(NamedTuple):
    """How the outputs of a sample are shared out: tiles of `rows` rows, `columns` of them side by side."""

    number: int
    columns: int
    rows: int


def tile_columns(width: int) -> int:
    """Of the map, a tile. A width that torch.compile leaves open gets the usual number: half of it is no reason to
    compile again."""
    half = CONFIG.columns // 2
    return half if isinstance(width, int) and width <= half else CONFIG.columns


def make_tiles(plan: Plan, *, columns: int, local: bool, packed: bool) -> Tiles:
    if not local:
        rows = CONFIG.tokens * CONFIG.steps
        longest = plan.height * plan.width if packed else max(plan.queries, plan.tokens)
        return Tiles(triton.cdiv(longest, rows), 1, rows)
    above_each_other = triton.cdiv(plan.height, CONFIG.tile // columns)
    side_by_side = triton.cdiv(plan.width, columns)
    return Tiles(above_each_other * side_by_side, side_by_side, triton.cdiv(plan.height, above_each_other))


def _count(token_mask: Tensor | None) -> Tensor | None:
    return None if token_mask is None else token_mask.sum(1).clamp(min=1).float()


def run_forward(
    sources: Sequence[Tensor],
    taps: Tensor | None,
    token_mask: Tensor | None,
    sequences: Tensor | None,
    feature_map: str,
    scale: float,
    height: int,
    width: int,
    num_prefix_tokens: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _views(sources)
    plan = make_plan(q, k, sequences, height, width)
    local = taps is not None
    packed = sequences is not None
    channels = plan.heads * plan.head_dim
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kept = plan.batch if save or not plan.fused else 0
    state = torch.empty(
        (kept, plan.heads, plan.head_dim, plan.head_dim), dtype=_state_dtype(q.dtype, feature_map), device=q.device
    )
    means = torch.empty((kept, 2, channels), dtype=torch.float32, device=q.device)
    mask = None if token_mask is None else token_mask.view(torch.uint8)
    count = _count(token_mask)
    common = _common(plan, token_mask, sequences, feature_map)
    products = dot_settings(q.dtype)
    centre = q.dtype == torch.float32
    mask_q = token_mask is not None and plan.queries == plan.tokens
    if plan.fused:
        launch(forward.forward_kernel, (plan.programs,))(
            q, k, v, taps, mask, count, sequences, out, state, means,
            plan.queries, plan.tokens, height, width, num_prefix_tokens, scale, plan.blocks, channels,
            *_strides(packed, q, k, v, out),
            **common, **products, CENTRE=centre, LOCAL=local, MASK_Q=mask_q, SAVE=save, BW=tile_columns(width),
            **_pace(plan, q.dtype, CONFIG.fused_warps, CONFIG.forward_stages),
        )  # fmt: skip
        return out, state, means
    size = plan.block_channels * (plan.block_channels + 4)
    parts = _parts(plan, CONFIG.state_programs, q.device)
    sums = torch.empty((plan.programs, parts, size), dtype=torch.float32, device=q.device)
    launch(forward.state_kernel, (plan.programs, parts))(
        k, v, mask, sequences, sums, plan.tokens, height, width, plan.blocks, channels, *_strides(packed, k, v),
        **common, **products, CENTRE=centre, **_pace(plan, q.dtype, CONFIG.state_warps, CONFIG.state_stages),
    )  # fmt: skip
    block = _summed(plan, parts)
    common.pop("MAP")
    launch(forward.finish_kernel, (plan.programs, plan.block_channels // block["BR"]))(
        sums, count, sequences, state, means, plan.tokens, height, width, scale, parts, plan.blocks, channels,
        **common, **block, CENTRE=centre,
    )  # fmt: skip
    tiles = make_tiles(plan, columns=CONFIG.output_columns, local=local, packed=packed)
    launch(forward.output_kernel, (plan.programs, tiles.number))(
        q, v, taps, mask, sequences, out, state, means,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, *tiles[1:], channels,
        *_strides(packed, q, v, out), MAP=feature_map,
        **common, **products, LOCAL=local, MASK_Q=mask_q, BW=CONFIG.output_columns,
        **_pace(plan, q.dtype, CONFIG.output_warps, CONFIG.output_stages),
    )  # fmt: skip
    return out, state, means


def _pace(plan: Plan, dtype: torch.dtype, warps: int, stages: int) -> dict[str, int]:
    """Step over tokens, warps and stages: as configured for blocks of 32 channels, with more warps for 64. A state of
    128² takes the registers of eight warps, and most of the shared memory: steps are short there, one at a time.
    Products of float32 are unrolled over a step, which must be short for the registers to hold it."""
    if plan.block_channels > 64:
        return dict(BN=16, num_warps=8, num_stages=1)
    tokens = CONFIG.tokens
    if dtype == torch.float32:
        tokens, warps = min(tokens, 32), max(warps, 2)
    return dict(BN=tokens, num_warps=warps * max(1, plan.block_channels // 32), num_stages=stages)


def _summed(plan: Plan, parts: int) -> dict[str, int]:
    """Parts, and rows of the state, that one program sums: all parts at once, and of few rows, so that the registers
    hold them and many programs share the work. Few warps, so that a thread sums most parts by itself."""
    parts = triton.next_power_of_2(parts)
    rows = max(1, min(4, 16384 // (parts * plan.block_channels)))
    return dict(BP=parts, BR=rows, num_warps=max(1, min(4, parts * rows * plan.block_channels // 2048)))


def run_backward(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    taps: Tensor | None,
    token_mask: Tensor | None,
    sequences: Tensor | None,
    state: Tensor,
    means: Tensor,
    feature_map: str,
    scale: float,
    height: int,
    width: int,
    num_prefix_tokens: int,
) -> list[Tensor]:
    q, k, v = _views(sources)
    g = _rows(grad_out)
    plan = make_plan(q, k, sequences, height, width)
    local = taps is not None
    packed = sequences is not None
    channels = plan.heads * plan.head_dim
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in sources]
    grad_tensors = (*grads, None, None)[:3]
    layout = _layout(sources)
    grad_taps = torch.empty(
        (0,) if taps is None else taps.shape, dtype=(q if taps is None else taps).dtype, device=q.device
    )
    mask = None if token_mask is None else token_mask.view(torch.uint8)
    count = _count(token_mask)
    common = _common(plan, token_mask, sequences, feature_map)
    products = dot_settings(q.dtype)
    mask_q = token_mask is not None and plan.queries == plan.tokens
    strides = _strides(packed, q, k, v, g, *(grad for grad in grads for _ in range(grad.shape[2])))
    if plan.fused:
        launch(backward.backward_kernel, (plan.programs,))(
            q, k, v, taps, g, mask, count, sequences, state, means, *grad_tensors, grad_taps,
            plan.queries, plan.tokens, height, width, num_prefix_tokens, scale, plan.blocks, channels, *strides,
            **common, **products, LOCAL=local, MASK_Q=mask_q, LAYOUT=layout, BW=tile_columns(width),
            **_pace(plan, q.dtype, CONFIG.fused_warps, CONFIG.backward_stages),
        )  # fmt: skip
        return [*grads, grad_taps]
    size = plan.block_channels * (plan.block_channels + 10)
    parts = _parts(plan, CONFIG.grad_state_programs, q.device)
    sums = torch.empty((plan.programs, parts, size), dtype=torch.float32, device=q.device)
    grad_state = torch.empty(state.shape, dtype=torch.float32, device=q.device)
    grad_mean = torch.empty((plan.batch, channels), dtype=torch.float32, device=q.device)
    launch(backward.grad_state_kernel, (plan.programs, parts))(
        q, v, g, mask, sequences, sums,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, channels,
        *_strides(packed, q, v, g),
        **common, **products, LOCAL=local, MASK_Q=mask_q, BW=tile_columns(width),
        **_pace(plan, q.dtype, CONFIG.state_warps, CONFIG.state_stages),
    )  # fmt: skip
    block = _summed(plan, parts)
    launch(backward.grad_finish_kernel, (plan.programs, plan.block_channels // block["BR"]))(
        sums, count, sequences, grad_state, grad_mean, grad_taps,
        plan.tokens, height, width, scale, parts, plan.blocks, channels,
        **common, **block, LOCAL=local,
    )  # fmt: skip
    columns = tile_columns(width)
    tiles = make_tiles(plan, columns=columns, local=local, packed=packed)
    launch(backward.grad_kernel, (plan.programs, tiles.number))(
        q, k, v, taps, g, mask, sequences, state, means, grad_state, grad_mean, *grad_tensors,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, *tiles[1:], channels, *strides,
        **common, **products, LOCAL=local, MASK_Q=mask_q, LAYOUT=layout, BW=columns,
        **_pace(plan, q.dtype, CONFIG.grad_warps, CONFIG.output_stages),
    )  # fmt: skip
    return [*grads, grad_taps]


# As `triton_op` the launches are visible to torch.compile, which inlines them: no Python runs between the kernels. The
# interpreter cannot trace them, and gets an operator that is opaque instead.
register: Any = torch.library.custom_op if INTERPRETED else torch.library.triton_op


@register("inline_attention::forward", mutates_args=())
def _forward_op(
    sources: Sequence[Tensor],
    taps: Tensor | None,
    token_mask: Tensor | None,
    sequences: Tensor | None,
    feature_map: str,
    scale: float,
    height: int,
    width: int,
    num_prefix_tokens: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return run_forward(sources, taps, token_mask, sequences, feature_map, scale, height, width, num_prefix_tokens, save)


@register("inline_attention::backward", mutates_args=())
def _backward_op(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    taps: Tensor | None,
    token_mask: Tensor | None,
    sequences: Tensor | None,
    state: Tensor,
    means: Tensor,
    feature_map: str,
    scale: float,
    height: int,
    width: int,
    num_prefix_tokens: int,
) -> list[Tensor]:
    return run_backward(
        grad_out, sources, taps, token_mask, sequences, state, means,
        feature_map, scale, height, width, num_prefix_tokens,
    )  # fmt: skip


@_forward_op.register_fake
def _(sources, taps, token_mask, sequences, feature_map, scale, height, width, num_prefix_tokens, save):  # type: ignore[no-untyped-def]  # as the operator
    q, k, _ = _views(sources)
    plan = make_plan(q, k, sequences, height, width)
    kept = plan.batch if save or not plan.fused else 0
    state = q.new_empty((kept, plan.heads, plan.head_dim, plan.head_dim), dtype=_state_dtype(q.dtype, feature_map))
    return q.new_empty(q.shape), state, q.new_empty((kept, 2, plan.heads * plan.head_dim), dtype=torch.float32)


@_backward_op.register_fake
def _(grad_out, sources, taps, *args):  # type: ignore[no-untyped-def]  # as the operator
    return [
        *(x.new_empty(x.shape) for x in sources),
        grad_out.new_empty((0,)) if taps is None else torch.empty_like(taps),
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    sources, taps, token_mask, sequences, *options, _ = inputs
    ctx.save_for_backward(*sources, taps, token_mask, sequences, *output[1:])
    ctx.options = options


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    *sources, taps, token_mask, sequences, state, means = ctx.saved_tensors
    *grads, grad_taps = _backward_op(grad_out, sources, taps, token_mask, sequences, state, means, *ctx.options)
    return grads, None if taps is None else grad_taps, *[None] * 8


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _flops(sources: Any, taps: Any, products: int, local: int) -> int:
    """Of `products` between tokens and d×d states, and `local` sums over nine taps; shapes in the place of tensors."""
    batch, tokens, _, heads, head_dim = sources[0]
    return 2 * batch * tokens * heads * head_dim * (products * head_dim + (0 if taps is None else local * 9))


@register_flop_formula(torch.ops.inline_attention.forward)
def _forward_flops(sources: Any, taps: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(sources, taps, products=2, local=1)


@register_flop_formula(torch.ops.inline_attention.backward)
def _backward_flops(grad_out: Any, sources: Any, taps: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(sources, taps, products=4, local=2)


def why_not(sources: Sequence[Tensor]) -> str | None:
    """Why the kernels cannot take these inputs, or None if they can."""
    x = sources[0]
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"they compute in bfloat16, float16 or float32, not in {x.dtype}"
    if x.shape[-1] > 128:
        return f"they hold heads of up to 128 channels, not of {x.shape[-1]}"
    if not x.is_cuda and not INTERPRETED:
        return f"they run on a GPU, and the inputs are on {x.device}"
    return None


def attend(
    sources: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    sequences: Tensor | None,
    *,
    feature_map: str,
    scale: float,
    grid: tuple[int, int] | None,
    num_prefix_tokens: int,
) -> Tensor:
    """The backend's entry: inputs are checked, defaults filled in. `sequences` (images, 4) holds the first token, the
    tokens, the height and the width of each image of a packed batch, `grid` the largest ones."""
    taps = None if local_weight is None else local_weight.contiguous()
    height, width = (1, 1) if grid is None else grid
    save = torch.is_grad_enabled() and (
        any(x.requires_grad for x in sources) or (local_weight is not None and local_weight.requires_grad)
    )
    out, _, _ = _forward_op(
        [_rows(x) for x in sources],
        taps,
        token_mask,
        sequences,
        feature_map,
        scale,
        height,
        width,
        num_prefix_tokens,
        save,
    )
    return out
