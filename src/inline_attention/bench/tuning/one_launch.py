"""Tiles of the forward pass in one launch, beside the several launches that run otherwise: `ops.fused.short.WINS`."""

import ast
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inline_attention.bench.op import Case, Inputs
from inline_attention.bench.timing import Call, Effort
from inline_attention.layers import LocalWeight
from inline_attention.ops import fused, gpu, make_local_weight, tuned
from inline_attention.ops.fused import config, short
from inline_attention.ops.fused.short import Tile
from inline_attention.ops.local import LocalSource

from .candidates import LEAST_GAIN, best_of, micros_of, time_calls

# Heads × channels, the most interesting first: InLine-DeiT-T, a linearised DeiT-T, InLine-DeiT-S and InLine-PVT's third
# stage, InLine-DeiT-B and InLine-Swin's third stage, linearised DeiT-S, the last stages of PVT and Swin, DeiT-B.
HEADS: tuple[tuple[int, int], ...] = ((6, 32), (3, 64), (10, 32), (12, 32), (6, 64), (16, 32), (24, 32), (12, 64))
SIDES: tuple[int, ...] = (14, 24, 32, 64)  # of the map, for 224, 384, 512 and 1024 px
BATCHES: tuple[int, ...] = (1, 2, 4, 8)
TODAY = "today"  # several launches, among the names of tiles

# A graph calls several inputs in turn. They stay in the cache, as what a projection has just written does.
SETS, TURNS = 4, 8  # inputs, and turns over them
if gpu.INTERPRETED:  # to try this in the interpreter
    HEADS, SIDES, BATCHES, SETS, TURNS = ((2, 16),), (3,), (1,), 1, 1


class Sizes(NamedTuple):
    batch: int
    side: int
    heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        return self.side**2

    @property
    def all_heads(self) -> int:
        return self.batch * self.heads

    def __str__(self) -> str:
        return f"{self.batch}, {self.side}², {self.heads}×{self.head_dim}"


class Share(NamedTuple):
    """What one process compiles. tile None: the several launches"""

    sizes: Sizes
    made: bool  # the local weight, by the kernel
    tile: Tile | None
    device: torch.device
    dtype: torch.dtype


def tiles_for(sizes: Sizes, *, device: torch.device) -> list[Tile]:
    """With parts for half a program, one and two on each multiprocessor, as far as there are queries."""
    multiprocessors = gpu.limits_of(device).multiprocessors
    tiles = []
    for tile in short.TILES:
        most = -(-sizes.tokens // tile.queries)
        parts = {min(most, max(1, n * multiprocessors // (2 * sizes.all_heads))) for n in (1, 2, 4)}
        tiles += [tile._replace(parts=n) for n in sorted(parts)]
    return tiles


def draw(sizes: Sizes, sets: int, *, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, LocalSource]]:
    """Projections, and what their local weights are made from."""
    case = Case(sizes.batch, sizes.side, sizes.side, 0, sizes.heads, sizes.head_dim)
    inputs = []
    for _ in range(sets):
        layer = LocalWeight(sizes.heads * sizes.head_dim, sizes.heads).to(device, dtype).requires_grad_(False)
        tokens = torch.randn(sizes.batch, sizes.tokens, sizes.heads * sizes.head_dim, device=device, dtype=dtype)
        qkv = Inputs.draw(case, device=device, dtype=dtype).qkv.detach()
        inputs.append((qkv, layer.source(tokens)))
    return inputs


def calls_of(
    inputs: Sequence[tuple[Tensor, LocalSource]], side: int, *, made: bool, tile: Tile | None, turns: int = 1
) -> list[Call]:
    """One launch with a tile, or several without. If not `made`, the local weight is there before the call."""

    def make(source: LocalSource) -> Tensor:
        return make_local_weight(source.x.mean(1), *source[1:], backend="triton")

    def call(qkv: Tensor, source: LocalSource, weight: Tensor) -> Tensor:
        never = {tuned.key_of(qkv.shape[-1], name): () for name in ("made", "given")}
        with torch.no_grad(), tuned.trying("short", never):
            return fused.attention(
                [qkv], source if made else weight, None, None, None, None, None, anchored=False,
                normalization="subtract", feature_map="identity", scale=qkv.shape[-1] ** -0.5, grids=[(side, side)],
                num_prefix_tokens=0, make=make, tile=tile,
            )  # fmt: skip

    calls: list[Call] = [partial(call, *each, make(each[1])) for each in inputs]
    return turns * calls


def shares_of(sizes: Sizes, *, device: torch.device, dtype: torch.dtype) -> list[Share]:
    """A kernel serves all sizes with as many heads."""
    smallest = Sizes(BATCHES[0], SIDES[0], sizes.heads, sizes.head_dim)
    tiles = (*short.TILES, None)
    return [Share(smallest, made, tile, device, dtype) for made in (True, False) for tile in tiles]


def compile_one(share: Share) -> str | None:
    """Compiles a kernel, for Triton's cache on disk. Says why it cannot."""
    sizes, made, tile, device, dtype = share
    try:
        calls_of(draw(sizes, 1, device=device, dtype=dtype), sizes.side, made=made, tile=tile)[0]()
    except Exception as error:  # the other tiles are timed
        return f"{sizes} {tile}: {error!r}"[:300]
    return None


def time_one(sizes: Sizes, *, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds of several launches and of the tiles: of all that make the local weight, then of the three fastest
    with a given one."""
    inputs = draw(sizes, SETS, device=device, dtype=dtype)
    row: dict[str, Any] = dict(sizes=list(sizes), quartiles={}, failed={})
    tiles = tiles_for(sizes, device=device)
    for kind in ("made", "given"):
        named = {TODAY: None} | {str(tuple(tile)): tile for tile in tiles}
        each = {
            name: partial(calls_of, inputs, sizes.side, made=kind == "made", tile=tile, turns=TURNS)
            for name, tile in named.items()
        }
        timings, failed = time_calls(each, device=device, effort=Effort(rounds=5, seconds=0.001))
        row[kind] = micros_of(timings)
        row["quartiles"] |= {f"{kind} {name}": [1e6 * t.low, 1e6 * t.high] for name, t in timings.items()}
        row["failed"] |= {f"{kind} {name}": error for name, error in failed.items()}
        ran = [name for name in row[kind] if name != TODAY]
        tiles = [tile for name in sorted(ran, key=row[kind].__getitem__)[:3] if (tile := named[name])]
    return row


HEADER = """Microseconds, "made" with the mean token and the local weight, "given" without
| batch, map, heads×d | made, today | one launch | tile | ratio | given, today | one launch | tile | ratio |
|---|---|---|---|---|---|---|---|---|"""


def line_of(row: Mapping[str, Any]) -> str:
    cells = [str(Sizes(*row["sizes"]))]
    for kind in ("made", "given"):
        micros = row[kind]
        best = best_of(micros, TODAY)
        if best is None:
            cells += ["failed", "", "", ""]
        else:
            cells += [f"{micros[TODAY]:.1f}", f"{micros[best]:.1f}", best, f"{micros[TODAY] / micros[best]:.2f}"]
    failed = [f"\nFAILED {name}: {error}" for name, error in row["failed"].items()]
    return f"| {' | '.join(cells)} |{''.join(failed[:2])}"


Wins = dict[tuple[int, bool], list[tuple[int, int, int, int, tuple[int, ...]]]]  # the fields of each `Win`


def wins_of(rows: Iterable[Mapping[str, Any]]) -> Wins:
    """By channels of a head and whether the kernel makes the local weight. Empty where it never wins.

    A win holds from two thirds of the tokens and heads that were timed to half as many again, and for its own number of
    heads alone where that would reach a shape that lost.
    """
    rows = list(rows)
    found: Wins = {}
    for made, head_dim in itertools.product((True, False), sorted({row["sizes"][3] for row in rows})):
        won: dict[tuple[int, int], str] = {}
        lost: set[tuple[int, int]] = set()
        for row in rows:
            sizes, micros = Sizes(*row["sizes"]), row["made" if made else "given"]
            best = best_of(micros, TODAY)
            if sizes.head_dim != head_dim or best is None or sizes.tokens > config.CONFIG.part:
                continue
            if micros[TODAY] >= LEAST_GAIN * micros[best]:
                won.setdefault((sizes.tokens, sizes.all_heads), best)
            else:
                lost.add((sizes.tokens, sizes.all_heads))
        wins = found[head_dim, made] = []
        for (tokens, heads), tile in sorted(won.items()):
            if (tokens, heads) in lost:
                continue
            least, most = heads * 2 // 3, heads * 3 // 2
            if any(t == tokens and least <= n <= most for t, n in lost):
                least = most = heads
            wins.append((tokens * 2 // 3, tokens * 3 // 2, least, most, ast.literal_eval(tile)))
    return found


# For `inline bench tune`


def sizes_to_tune() -> list[Sizes]:
    """Longer sequences are left out: no sum of the kernel is longer than a part."""
    sides = [side for side in SIDES if side**2 <= config.CONFIG.part]
    return [Sizes(batch, side, *heads) for heads in HEADS for side in sides for batch in BATCHES]


def entries_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    wins = wins_of(rows)
    return {"short": {tuned.key_of(d, "made" if made else "given"): list(found) for (d, made), found in wins.items()}}


def describe(row: Mapping[str, Any]) -> str:
    micros = row["made"]
    best = best_of(micros, TODAY)
    if best is None:
        return f"failed: {next(iter(row['failed'].values()), 'nothing ran')}"
    return f"{micros[best]:.1f} µs, several launches {micros[TODAY]:.1f} µs ({micros[TODAY] / micros[best]:.2f})"
