"""The geometry of a launch: which tokens and channels a program takes, and how many programs there are."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .. import gpu, tuned
from ..local import Grid
from . import config

# The largest offset of a token that the kernels for usual sizes compute, plus one.
MOST_OFFSET = 2**31


class Plan(NamedTuple):
    """The geometry of a launch. It depends on shapes, and on the GPU's multiprocessors."""

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
    device: torch.device

    @property
    def programs(self) -> int:
        return self.batch * self.blocks

    def wide(self, strides: Sequence[int]) -> bool:
        """Whether a token's offset exceeds 32 bits. `strides` are those of `strides_of`."""
        longest = max(self.queries, self.tokens)
        return any(longest * stride >= MOST_OFFSET for stride in strides[1::2])

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
    heads_per_block = max(1, min(config.LEAST_CHANNELS // max(key_dim, value_dim), heads))
    block_keys, block_values = (max(16, triton.next_power_of_2(heads_per_block * d)) for d in (key_dim, value_dim))
    blocks = triton.cdiv(heads, heads_per_block)
    pairs = list(zip(grids[::2], grids[1::2], strict=True))
    batch, queries, tokens = q.shape[0], q.shape[1], k.shape[1]
    if sequences is not None:
        batch = sequences.shape[0]
        queries = tokens = num_prefix_tokens + max(height * width for height, width in pairs)
    enough = config.CONFIG.fused_programs * gpu.limits_of(q.device).multiprocessors
    fused = tokens <= config.CONFIG.fused_tokens and batch * blocks >= enough
    return Plan(batch, queries, tokens, heads, key_dim, value_dim, heads_per_block, block_keys, block_values, blocks,
                fused, sequences is not None, pairs, q.device)  # fmt: skip


class Parts(NamedTuple):
    """How many parts the tokens of a sample are split into."""

    number: int
    most: int  # how many a kernel adds: a power of two, no less than the number


def split(plan: Plan, tokens: int, *, programs: int | None = None, rows: int = 0) -> Parts:
    """Into how many parts the sums over a sample's tokens are split.

    There are enough parts to give every multiprocessor its programs, up to `most_parts`, and no more than there are
    steps. No part is longer than `part`, whatever the other limits say.

    Args:
        tokens: of the longest sample.
        programs: wanted for each multiprocessor. Default: `state_programs`.
        rows: the least number of steps to count, for a kernel that also sums over the rows of the map.
    """
    settings = config.CONFIG
    wanted = (settings.state_programs if programs is None else programs) * gpu.limits_of(plan.device).multiprocessors
    most = settings.most_parts
    while most > 1 and plan.programs * most > wanted:
        most //= 2
    while most * settings.part < tokens:
        most *= 2
    number = torch.sym_min(most, torch.sym_max(triton.cdiv(tokens, settings.tokens), rows))
    # A short sequence has few parts, and few are added. A symbolic length keeps the bound, which was found by
    # comparisons: a plain number for torch.compile, and one compiled kernel for all lengths.
    return Parts(number, triton.next_power_of_2(number) if isinstance(number, int) else most)


class Tiles(NamedTuple):
    """The tiles that the outputs of a sample are split into."""

    number: int
    columns: int  # tiles side by side
    rows: int  # rows of a tile

    @property
    def wide(self) -> bool:
        """Whether there are more tiles than an axis of the grid holds."""
        return self.number > gpu.MOST_ON_AN_AXIS

    def grid(self, plan: Plan) -> tuple[int, ...]:
        if not self.wide:
            return plan.programs, self.number
        layers = triton.cdiv(self.number, gpu.MOST_ON_AN_AXIS)
        return plan.programs, triton.cdiv(self.number, layers), layers


def tile_columns(width: int) -> int:
    """Columns of a tile. A symbolic width gets the most, because narrower tiles are not worth a compilation."""
    most = config.CONFIG.columns
    return min(most, triton.next_power_of_2(width)) if isinstance(width, int) else most


def row_settings(width: int) -> dict[str, int | bool]:
    """Columns of a tile, and whether a map has columns beside it."""
    columns = tile_columns(width)
    return dict(BW=columns, HALO=not isinstance(width, int) or width > columns)


@functools.cache
def tile_rows(programs: int, height: int, at_once: int, settings: config.Config) -> int:
    """Rows of a tile, for `programs` maps of so many rows.

    Tiles take about as long as each other, and `at_once` of them run at a time. With these rows the last ones end
    first. A tile takes `tile_start` rows longer than it has.
    """

    def duration(rows: int) -> int:
        return triton.cdiv(programs * triton.cdiv(height, rows), at_once) * (rows + settings.tile_start)

    equal = {triton.cdiv(height, triton.cdiv(height, rows)) for rows in settings.tile_rows}
    return min(sorted(equal, reverse=True), key=duration)


def make_tiles(plan: Plan, *, local: bool, steps: Mapping[str, int]) -> Tiles:
    """The tiles of a kernel. All images of a packed batch get as many as the one that needs the most tiles.

    Args:
        steps: those of `step_settings`.
    """
    if not local:
        rows = config.CONFIG.tokens * config.CONFIG.steps
        return Tiles(triton.cdiv(max(plan.queries, plan.tokens), rows), 1, rows)
    columns, rows = tile_columns(plan.width), max(config.CONFIG.tile_rows)
    beside, together = triton.cdiv(plan.width, columns), config.CONFIG.columns // columns  # rows of a step
    if all(isinstance(length, int) for length in (plan.programs, plan.height, plan.width)):  # not symbolic
        registers = 32 * steps["num_warps"] * steps.get("maxnreg", 255)
        at_once = gpu.limits_of(plan.device).multiprocessors * max(1, gpu.REGISTERS // registers)
        rows = tile_rows(plan.programs * beside, triton.cdiv(plan.height, together), at_once, config.CONFIG)
    rows *= together
    number = max(triton.cdiv(height, rows) * triton.cdiv(width, columns) for height, width in plan.grids)
    return Tiles(number, beside, rows)


def step_settings(kernel: str, effort: str, plan: Plan, dtype: torch.dtype) -> dict[str, int]:
    """Launch settings of a kernel that steps over tokens: as measured on this GPU by `inline bench tune`, or else as
    configured for 32 channels, with more warps for 64.

    A state of 128² takes the registers of eight warps and most of the shared memory, so steps are short and not
    pipelined there. Float32 products are unrolled over a step, which must be short for registers to hold it, and they
    get all registers.
    """
    if plan.block_channels > 64:
        return dict(BN=16, num_warps=8, num_stages=1)
    measured = tuned.rows(plan.device, "steps", effort, kernel, max(32, plan.block_channels))
    tokens, warps, stages, registers = measured[0][0] if measured else config.STEPS[effort][kernel]
    tokens = min(tokens, config.CONFIG.tokens)
    if dtype == torch.float32:
        tokens, warps, registers = min(tokens, 32), max(warps, 2), 0
    settings = dict(BN=tokens, num_warps=warps * max(1, plan.block_channels // 32), num_stages=stages)
    return settings | dict(maxnreg=registers) if registers else settings


def sum_settings(plan: Plan, parts: Parts) -> dict[str, int]:
    """Launch settings of a kernel that adds the parts: how many of them, and rows of the state, a program sums.

    It sums all parts at once if there are not too many, and few rows, so that registers hold them and many programs
    share the work. Warps are few, so that a thread sums most parts by itself.
    """
    at_once = min(parts.most, config.CONFIG.summed_parts)
    rows = max(1, min(4, 16384 // (at_once * plan.block_values)))
    warps = max(1, min(4, at_once * rows * plan.block_values // 2048))
    return dict(BP=at_once, STEPS=parts.most // at_once, BR=rows, num_warps=warps)
