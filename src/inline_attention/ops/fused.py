"""InLine attention as Triton kernels: how they are launched, their gradients and their cost.

q, k and v arrive as `sources`, tensors (B, N, m, heads, d) that hold m of them next to each other: one of three for a
qkv projection, one and two for q and kv, or three of one. So they are read, and their gradients written, where the
projections keep them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .kernels import backward, forward

INTERPRETED = triton.knobs.runtime.interpret


class Config(NamedTuple):
    """Launch parameters: one set for every length, resolution and batch."""

    tokens: int = 64  # a step over tokens
    columns: int = 16  # of the map, a step over rows
    tap_columns: int = 8  # the same where nine sums are kept
    rows: int = 16  # of the map, a tile
    flat_steps: int = 4  # of tokens, a tile where there is no map
    state_warps: int = 2
    state_stages: int = 3
    output_warps: int = 1
    fused_warps: int = 1
    fused_stages: int = 3
    grad_state_warps: int = 2
    grad_warps: int = 2
    grad_fused_warps: int = 2
    grad_fused_stages: int = 2
    programs: int = 8  # a multiprocessor, where the tokens of a sample are split
    most_parts: int = 64
    fused_tokens: int = 1024  # up to so many a sample is one program's
    fused_programs: int = 4  # a multiprocessor, below which it is not


CONFIG = Config()
# A step of the interpreter costs the same whatever its size, and wants small test shapes.
if INTERPRETED:
    CONFIG = Config(tokens=16, rows=2, flat_steps=1, programs=2, fused_tokens=40, fused_programs=0)

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
    parts: int  # of the tokens, otherwise
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
    processors = _multiprocessors(q.device)
    parts = min(CONFIG.most_parts, triton.cdiv(CONFIG.programs * processors, batch * blocks))
    tokens = k.shape[1] if sequences is None else max(height * width, 1)
    fused = tokens <= CONFIG.fused_tokens and batch * blocks >= CONFIG.fused_programs * processors
    return Plan(batch, q.shape[1], k.shape[1], heads, head_dim, heads_per_block, block_channels, blocks, fused, parts,
                height, width)  # fmt: skip


def _common(plan: Plan, q: Tensor, mask: Tensor | None, sequences: Tensor | None, feature_map: str) -> dict[str, Any]:
    return dict(
        MAP=feature_map,
        D=plan.head_dim,
        HEADS=plan.heads_per_block,
        BC=plan.block_channels,
        HAS_MASK=mask is not None,
        PACKED=sequences is not None,
    )


def _products(dtype: torch.dtype) -> dict[str, Any]:
    """In what the tensor cores multiply: half-precision numbers would overflow in float16, and fit in tf32."""
    if dtype == torch.bfloat16:
        return dict(DOT=tl.bfloat16, PRECISION="tf32")
    return dict(DOT=tl.float32, PRECISION="ieee" if dtype == torch.float32 else "tf32")


def _views(sources: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = [x for source in sources for x in source.unbind(2)]
    return q, k, v


def _strides(packed: bool, *tensors: Tensor) -> list[int]:
    """Of the batch and of the tokens, in turn."""
    return [stride for x in tensors for stride in (0 if packed else x.stride(0), x.stride(1))]


def _launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    return (kernel if INTERPRETED else torch.library.wrap_triton(kernel))[grid]


def _tiles(plan: Plan, local: bool) -> tuple[int, int]:
    """Tiles of a sample and how many of them side by side."""
    if local:
        columns = triton.cdiv(plan.width, CONFIG.columns)
        return columns * triton.cdiv(plan.height, CONFIG.rows), columns
    longest = max(plan.queries, plan.tokens)
    return triton.cdiv(longest, CONFIG.tokens * CONFIG.flat_steps), 1


def _present(x: Tensor | None, otherwise: Tensor) -> Tensor:
    """A kernel's unused pointer has to point somewhere."""
    return otherwise if x is None else x


def _count(token_mask: Tensor | None) -> Tensor | None:
    return None if token_mask is None else token_mask.sum(1).clamp(min=1).float()


def run_forward(
    sources: Sequence[Tensor],
    local_weight: Tensor | None,
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
    local = local_weight is not None
    packed = sequences is not None
    channels = plan.heads * plan.head_dim
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kept = plan.batch if save or not plan.fused else 0
    state = torch.empty((kept, plan.heads, plan.head_dim, plan.head_dim), dtype=torch.float32, device=q.device)
    means = torch.empty((kept, 2, channels), dtype=torch.float32, device=q.device)
    weight = _present(local_weight, q)
    mask = _present(None if token_mask is None else token_mask.view(torch.uint8), q)
    count = _present(_count(token_mask), q)
    seq = _present(sequences, q)
    common = _common(plan, q, token_mask, sequences, feature_map)
    products = _products(q.dtype)
    centre = q.dtype == torch.float32
    mask_q = token_mask is not None and plan.queries == plan.tokens
    if plan.fused:
        _launch(forward.forward_kernel, (plan.programs,))(
            q, k, v, weight, mask, count, seq, out, state, means,
            plan.queries, plan.tokens, height, width, num_prefix_tokens, scale, plan.blocks, channels,
            *_strides(packed, q, k, v, out),
            **common, **products, CENTRE=centre, LOCAL=local, MASK_Q=mask_q, SAVE=save,
            BN=CONFIG.tokens, BW=CONFIG.columns, num_warps=_warps(plan, CONFIG.fused_warps),
            num_stages=CONFIG.fused_stages,
        )  # fmt: skip
        return out, state, means
    size = plan.block_channels * (plan.block_channels + 4)
    parts = torch.empty((plan.programs, plan.parts, size), dtype=torch.float32, device=q.device)
    _launch(forward.state_kernel, (plan.programs, plan.parts))(
        k, v, mask, seq, parts, plan.tokens, height, width, plan.blocks, channels, *_strides(packed, k, v),
        **common, **products, CENTRE=centre, BN=CONFIG.tokens,
        num_warps=_warps(plan, CONFIG.state_warps), num_stages=CONFIG.state_stages,
    )  # fmt: skip
    rows = _rows_of_state(plan)
    common.pop("MAP")
    _launch(forward.finish_kernel, (plan.programs, plan.block_channels // rows))(
        parts, count, seq, state, means, plan.tokens, height, width, scale, plan.parts, plan.blocks, channels,
        **common, BR=rows, BP=triton.next_power_of_2(plan.parts),
    )  # fmt: skip
    tiles, columns = _tiles(plan, local)
    _launch(forward.output_kernel, (plan.programs, tiles))(
        q, v, weight, mask, seq, out, state, means,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, columns, channels,
        *_strides(packed, q, v, out), MAP=feature_map,
        **common, **products, LOCAL=local, MASK_Q=mask_q, BN=CONFIG.tokens, BW=CONFIG.columns,
        ROWS=CONFIG.rows if local else CONFIG.flat_steps, num_warps=_warps(plan, CONFIG.output_warps), num_stages=1,
    )  # fmt: skip
    return out, state, means


def _warps(plan: Plan, warps: int) -> int:
    """`warps` for blocks of 32 channels, more for wider ones."""
    return min(8, warps * max(1, plan.block_channels // 32))


def _rows_of_state(plan: Plan) -> int:
    """So few that the parts of a state are summed by many programs."""
    return min(plan.block_channels, 4)


def run_backward(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    local_weight: Tensor | None,
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
    g = grad_out if grad_out.stride(3) == 1 and grad_out.stride(2) == grad_out.shape[3] else grad_out.contiguous()
    plan = make_plan(q, k, sequences, height, width)
    local = local_weight is not None
    packed = sequences is not None
    channels = plan.heads * plan.head_dim
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in sources]
    dq, dk, dv = _views(grads)
    weight = _present(local_weight, q)
    grad_weight = torch.empty(local_weight.shape if local_weight is not None else (0,), dtype=weight.dtype,
                              device=q.device)  # fmt: skip
    mask = _present(None if token_mask is None else token_mask.view(torch.uint8), q)
    count = _present(_count(token_mask), q)
    seq = _present(sequences, q)
    common = _common(plan, q, token_mask, sequences, feature_map)
    products = _products(q.dtype)
    mask_q = token_mask is not None and plan.queries == plan.tokens
    strides = _strides(packed, q, k, v, g, dq, dk, dv)
    if plan.fused:
        _launch(backward.backward_kernel, (plan.programs,))(
            q, k, v, weight, g, mask, count, seq, state, means, dq, dk, dv, grad_weight,
            plan.queries, plan.tokens, height, width, num_prefix_tokens, scale, plan.blocks, channels, *strides,
            **common, **products, LOCAL=local, MASK_Q=mask_q, BN=CONFIG.tokens, BW=CONFIG.columns,
            BT=CONFIG.tap_columns, num_warps=_warps(plan, CONFIG.grad_fused_warps),
            num_stages=CONFIG.grad_fused_stages,
        )  # fmt: skip
        return [*grads, grad_weight]
    size = plan.block_channels * (plan.block_channels + 10)
    parts = torch.empty((plan.programs, plan.parts, size), dtype=torch.float32, device=q.device)
    grad_state = torch.empty(state.shape, dtype=torch.float32, device=q.device)
    grad_mean = torch.empty((plan.batch, channels), dtype=torch.float32, device=q.device)
    _launch(backward.grad_state_kernel, (plan.programs, plan.parts))(
        q, v, g, mask, seq, parts,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, channels,
        *_strides(packed, q, v, g),
        **common, **products, LOCAL=local, MASK_Q=mask_q, BN=CONFIG.tokens, BT=CONFIG.tap_columns,
        num_warps=_warps(plan, CONFIG.grad_state_warps), num_stages=CONFIG.state_stages,
    )  # fmt: skip
    rows = _rows_of_state(plan)
    _launch(backward.grad_finish_kernel, (plan.programs, plan.block_channels // rows))(
        parts, count, seq, grad_state, grad_mean, grad_weight,
        plan.tokens, height, width, scale, plan.parts, plan.blocks, channels,
        **common, LOCAL=local, BR=rows, BP=triton.next_power_of_2(plan.parts),
    )  # fmt: skip
    tiles, columns = _tiles(plan, local)
    _launch(backward.grad_kernel, (plan.programs, tiles))(
        q, k, v, weight, g, mask, seq, state, means, grad_state, grad_mean, dq, dk, dv,
        plan.queries, plan.tokens, height, width, num_prefix_tokens, plan.blocks, columns, channels, *strides,
        **common, **products, LOCAL=local, MASK_Q=mask_q, BN=CONFIG.tokens, BW=CONFIG.columns,
        ROWS=CONFIG.rows if local else CONFIG.flat_steps, num_warps=_warps(plan, CONFIG.grad_warps), num_stages=1,
    )  # fmt: skip
    return [*grads, grad_weight]
