"""Times the forward pass in one launch beside today's launches, for `gpu_check.py short`."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
from kernel_cases import DEVICE, DTYPES, GPU, make_inputs, make_source, not_made
from torch import Tensor

from inline_attention.bench.timing import Call, Effort, Timing, captured, measure
from inline_attention.ops import fused, gpu, make_local_weight
from inline_attention.ops.fused import config, short
from inline_attention.ops.fused.short import Tile
from inline_attention.ops.local import LocalSource

# Heads × channels, the most interesting first: InLine-DeiT-T, a linearised DeiT-T, InLine-DeiT-S and InLine-PVT's third
# stage, InLine-DeiT-B and InLine-Swin's third stage, linearised DeiT-S, the last stages of PVT and Swin, DeiT-B.
HEADS = ((6, 32), (3, 64), (10, 32), (12, 32), (6, 64), (16, 32), (24, 32), (12, 64))
SIDES = (14, 24, 32, 64)  # of the map, for 224, 384, 512 and 1024 px
BATCHES = (1, 2, 4, 8)
LEAST_GAIN = 1.03  # a win by less is noise

# A graph calls several inputs in turn. They stay in the cache, as what a projection has just written does.
SETS, TURNS = (4, 8) if GPU else (1, 1)  # inputs, and turns over them


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


def timed_tiles(sizes: Sizes) -> list[Tile]:
    """With parts for half a program, one and two on each multiprocessor, as far as there are queries."""
    multiprocessors = gpu.limits_of(torch.empty(0, device=DEVICE).device).multiprocessors
    tiles = []
    for tile in short.TILES:
        most = -(-sizes.tokens // tile.queries)
        parts = {min(most, max(1, n * multiprocessors // (2 * sizes.all_heads))) for n in (1, 2, 4)}
        tiles += [tile._replace(parts=n) for n in sorted(parts)]
    return tiles


def draw(sizes: Sizes, sets: int) -> list[tuple[Tensor, LocalSource]]:
    """Projections, and what their local weights are made from."""
    inputs = [make_inputs(sizes.batch, (sizes.side,) * 2, 0, *sizes[2:], DTYPES[-1], seed=i)[0] for i in range(sets)]
    return [(qkv, make_source(qkv, seed=i)) for i, qkv in enumerate(inputs)]


def calls_of(inputs: list[tuple[Tensor, LocalSource]], side: int, *, made: bool, tile: Tile | None) -> list[Call]:
    """One launch with a tile, or today's launches without. If not `made`, the local weight is there before the call."""

    def call(qkv: Tensor, source: LocalSource, weight: Tensor) -> Tensor:
        local: Tensor | LocalSource = weight
        if made:
            local = source if tile else make_local_weight(source.x.mean(1), *source[1:], backend="triton")
        return fused.attention(
            [qkv], local, None, None, None, None, None, anchored=False, normalization="subtract",
            feature_map="identity", scale=qkv.shape[-1] ** -0.5, grids=[(side, side)], num_prefix_tokens=0,
            make=not_made, tile=tile,
        )  # fmt: skip

    weights = [make_local_weight(source.x.mean(1), *source[1:], backend="triton") for _, source in inputs]
    return [partial(call, *each, weight) for each, weight in zip(inputs, weights, strict=True)]


def compile_one(share: tuple[Sizes, bool, Tile | None]) -> str | None:
    """Compiles a kernel, for Triton's cache on disk. Says why it cannot."""
    sizes, made, tile = share
    try:
        calls_of(draw(sizes, 1), sizes.side, made=made, tile=tile)[0]()
    except Exception as error:  # the other tiles are timed
        return f"{share}: {error!r}"[:300]
    return None


def time_one(sizes: Sizes) -> dict[str, Any]:
    """Microseconds of today's launches and of the tiles: of all that make the local weight, then of the three fastest
    with a given one."""
    inputs = draw(sizes, SETS)
    found: dict[str, Any] = dict(sizes=list(sizes), made={}, given={}, quartiles={}, failed={})
    tiles = timed_tiles(sizes)
    for kind in ("made", "given"):
        calls = {}
        for tile in (None, *tiles):
            name = "today" if tile is None else str(tuple(tile))
            try:
                each = calls_of(inputs, sizes.side, made=kind == "made", tile=tile)
                calls[name] = captured(TURNS * each) if GPU else each[0]
            except Exception as error:  # such as out of resources
                found["failed"][f"{kind} {name}"] = repr(error)[:200]
        for name, timing in measure(calls, device=torch.device(DEVICE), effort=Effort(rounds=5, seconds=0.001)).items():
            if isinstance(timing, Timing):
                one = timing.shared(TURNS * SETS)
                found[kind][name] = 1e6 * one.median
                found["quartiles"][f"{kind} {name}"] = [1e6 * one.low, 1e6 * one.high]
            else:
                found["failed"][f"{kind} {name}"] = timing
        tiles = sorted((t for t in tiles if str(tuple(t)) in found[kind]), key=lambda t: found[kind][str(tuple(t))])[:3]
    return found


def best_of(micros: dict[str, float]) -> tuple[float, float, str] | None:
    """Microseconds of today's launches and of the fastest tile, and the tile."""
    tiles = [name for name in micros if name != "today"]
    if "today" not in micros or not tiles:
        return None
    tile = min(tiles, key=lambda name: micros[name])
    return micros["today"], micros[tile], tile


HEADER = """Microseconds, "made" with the mean token and the local weight, "given" without
| batch, map, heads×d | made, today | one launch | tile | ratio | given, today | one launch | tile | ratio |
|---|---|---|---|---|---|---|---|---|"""


def line_of(row: dict[str, Any]) -> str:
    cells = [str(Sizes(*row["sizes"]))]
    for kind in ("made", "given"):
        best = best_of(row[kind])
        if best is None:
            cells += ["failed", "", "", ""]
        else:
            today, fastest, tile = best
            cells += [f"{today:.1f}", f"{fastest:.1f}", tile, f"{today / fastest:.2f}"]
    failed = [f"\nFAILED {name}: {error}" for name, error in row["failed"].items()]
    return f"| {' | '.join(cells)} |{''.join(failed[:2])}"


def winning_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of `short.WINS`. A win holds from two thirds of the tokens and heads that were timed to half as many again,
    and for its own number of heads alone where that would reach a shape that lost."""
    chip = gpu.chip_of(torch.device(DEVICE, 0)) if DEVICE == "cuda" else gpu.H200
    lines = []
    for made, head_dim in itertools.product((True, False), sorted({row["sizes"][3] for row in rows})):
        won: dict[tuple[int, int], str] = {}
        lost: set[tuple[int, int]] = set()
        for row in rows:
            sizes, best = Sizes(*row["sizes"]), best_of(row["made" if made else "given"])
            if sizes.head_dim != head_dim or best is None or sizes.tokens > config.CONFIG.part:
                continue
            today, fastest, tile = best
            if today >= LEAST_GAIN * fastest:
                won.setdefault((sizes.tokens, sizes.all_heads), tile)
            else:
                lost.add((sizes.tokens, sizes.all_heads))
        wins = []
        for (tokens, heads), tile in sorted(won.items()):
            if (tokens, heads) in lost:
                continue
            least, most = heads * 2 // 3, heads * 3 // 2
            if any(t == tokens and least <= n <= most for t, n in lost):
                least = most = heads
            wins.append(f"Win({tokens * 2 // 3}, {tokens * 3 // 2}, {least}, {most}, Tile{tile})")
        if wins:
            lines.append(f"    (gpu.{chip}, {head_dim}, {made}): ({', '.join(wins)},),")
    return lines
