"""Tiles of the MLP half of a block, and of a norm with the projection to q, k and v: `ops.fused_mlp.WINS`."""

import ast
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inline_attention.bench.kernels import MlpInputs, compiled_calls, draw_mlp, mlp_calls
from inline_attention.bench.timing import Call, Effort
from inline_attention.layers.block import Mlp
from inline_attention.ops import fused_mlp, fused_norm_linear, gpu, norm_linear, tuned
from inline_attention.ops.fused_mlp import Tile, Use

from .candidates import LEAST_GAIN, best_of, micros_of, time_calls

# Widths and hidden channels of DeiT, PVT, Swin, CSwin and the models of the study, and the tokens at which their blocks
# have them: one image of 224, 384 and 1024 px, and batches of 128 or 256.
ROWS: dict[tuple[int, int], tuple[int, ...]] = {
    (192, 768): (197, 577, 4097, 50_432, 100_352, 131_072),
    (384, 1536): (197, 1024, 4097, 25_088, 131_072),
    (320, 1280): (290, 25_088, 131_072),
    (64, 512): (3136, 401_408),
    (64, 256): (3136, 401_408),
    (96, 384): (3136, 401_408),
    (128, 1024): (784, 100_352),
    (128, 512): (784, 100_352),
    (256, 1024): (196, 25_088),
    (512, 2048): (49, 6272),
    (160, 560): (257, 65_792),
    (160, 720): (257, 65_792),
}
# The same for channels and outputs of a norm and the projection after it.
NORMED_ROWS: dict[tuple[int, int], tuple[int, ...]] = dict.fromkeys(
    [(192, 576), (384, 1152)], (197, 577, 4097, 50_432, 131_072)
)
LEAST_TRAINED = 10_000  # training has no fewer rows
if gpu.INTERPRETED:  # to try this in the interpreter
    ROWS, NORMED_ROWS, LEAST_TRAINED = {(16, 32): (20, 40)}, {(16, 48): (20,)}, 30

COMPILED = "compiled"  # what torch.compile makes of the reference, among the names of tiles
EPS = 1e-6


class Half(NamedTuple):
    """The MLP half of a block; for "normed", a norm and a linear layer."""

    rows: int
    width: int
    hidden: int


class Share(NamedTuple):
    """What one process compiles. tile None: the reference"""

    half: Half
    use: Use
    tile: Tile | None
    device: torch.device
    dtype: torch.dtype


def halves_of(use: Use) -> list[Half]:
    sizes = NORMED_ROWS if use == "normed" else ROWS
    least = LEAST_TRAINED if use == "training" else 0
    return [Half(n, *widths) for widths, rows in sizes.items() for n in rows if n >= least]


def tiles_for(half: Half, use: Use, *, device: torch.device, dtype: torch.dtype) -> list[Tile]:
    """Those that fit; if they leave multiprocessors idle, with the hidden channels split."""
    rows, width, hidden = half
    limits = gpu.limits_of(device)
    tiles = []
    casts = use != "training" and rows <= fused_mlp.FEW_ROWS
    for tile in fused_mlp.TILES:
        if not fused_mlp.fits(tile, width, dtype, limits, casts=casts):
            continue
        programs = -(-rows // tile.rows)
        for splits in (1, 2, 4, 8, 16):
            if splits == 1 or (splits * programs <= 4 * limits.multiprocessors and splits * tile.hidden <= hidden):
                tiles.append(tile._replace(splits=splits))
    return tiles


def draw(half: Half, use: Use, *, device: torch.device, dtype: torch.dtype) -> MlpInputs:
    inputs = draw_mlp(*half, device=device, dtype=dtype, projected=use == "projected")
    for x, _ in inputs.calls:
        x.requires_grad_(use == "training")
    return inputs


def flops_of(half: Half, inputs: MlpInputs, use: Use) -> int:
    """Of the matrix products of a call"""
    if use == "normed":
        return 2 * half.rows * half.width * half.hidden
    return (3 if use == "training" else 1) * inputs.flops


def kernel_calls(inputs: MlpInputs, use: Use, tile: Tile) -> list[Call]:
    if use != "normed":
        return mlp_calls(inputs, tile)
    weight, bias, *_ = inputs.weights
    run = fused_norm_linear.norm_linear
    return [partial(run, x, inputs.norm, weight, bias, EPS, inputs.dtype, tile) for x, _ in inputs.calls]


def reference_calls(inputs: MlpInputs, use: Use) -> list[Call]:
    """What runs without the kernel, compiled. Parameters are cast in every call."""
    if use != "normed":
        return compiled_calls(inputs)
    torch.compiler.reset()
    (scale, shift), (weight, bias, *_) = inputs.norm, inputs.weights

    def normed(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), torch.autocast(x.device.type, inputs.dtype, enabled=inputs.dtype != torch.float32):
            return norm_linear(x, scale, shift, weight, bias, eps=EPS, backend="reference")

    compiled = torch.compile(normed, dynamic=False)
    return [partial(compiled, x) for x, _ in inputs.calls]


def training_calls(half: Half, tile: Tile | None, *, device: torch.device, dtype: torch.dtype) -> list[Call]:
    """Forward and backward on each of two inputs, compiled: with this tile, or by a block's modules if it is None.

    The stream and the parameters are float32, and the parameters are cast in every call, as under autocast.
    """
    rows, width, hidden = half
    torch.manual_seed(0)  # the same inputs and parameters for every tile
    norm, mlp = nn.LayerNorm(width, eps=EPS).to(device), Mlp(width, hidden).to(device)
    weights = [*mlp.fc1.parameters(), *mlp.fc2.parameters()]

    def by_modules(x: Tensor) -> Tensor:
        return x + mlp(norm(x))

    def by_kernel(x: Tensor) -> Tensor:
        return fused_mlp.add_mlp(x, (norm.weight, norm.bias), weights, None, EPS, dtype, tile)

    compiled = torch.compile(by_modules if tile is None else by_kernel, dynamic=False)

    def call(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out = compiled(x)
        return torch.autograd.grad(out, [x, *norm.parameters(), *weights], grad)

    xs = [torch.randn(rows, width, device=device, requires_grad=True) for _ in range(2)]
    return [partial(call, x, torch.randn_like(x)) for x in xs]


def shares_of(half: Half, use: Use, *, device: torch.device, dtype: torch.dtype) -> list[Share]:
    """A kernel serves any number of rows above `FEW_ROWS`, and another those below."""
    few = fused_mlp.FEW_ROWS
    small = half._replace(rows=16 if half.rows <= few else few + 16)
    tiles = tiles_for(half, use, device=device, dtype=dtype)
    return [Share(half, use, None, device, dtype), *(Share(small, use, tile, device, dtype) for tile in tiles)]


def compile_one(share: Share) -> str | None:
    """Compiles a kernel, for the caches on disk of Triton and torch.compile. Says why it cannot."""
    half, use, tile, device, dtype = share
    try:
        if tile is None and use == "training":
            # Both sides of the measurement. With another tile, most of it is still in the caches.
            torch.compiler.reset()
            for each in (None, *tiles_for(half, use, device=device, dtype=dtype)[:1]):
                training_calls(half, each, device=device, dtype=dtype)[0]()
            return None
        inputs = draw(half, use, device=device, dtype=dtype)
        (kernel_calls(inputs, use, tile) if tile else reference_calls(inputs, use))[0]()
    except Exception as error:  # the other tiles are timed
        return f"{half} {tile} {use}: {error!r}"[:300]
    return None


def time_one(half: Half, use: Use, *, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds of what runs without the kernel, compiled, and of every tile.

    For training they are of forward and backward, and of the tile whose forward pass is the fastest.
    """
    torch.compiler.reset()  # PyTorch compiles a function for eight sizes, and runs it uncompiled at the ninth
    inputs = draw(half, use, device=device, dtype=dtype)
    row: dict[str, Any] = dict(half=list(half), flops=flops_of(half, inputs, use), sets=len(inputs.calls))
    time = partial(time_calls, device=device, effort=Effort(rounds=5, seconds=0.003))
    tiles = {str(tuple(tile)): tile for tile in tiles_for(half, use, device=device, dtype=dtype)}
    each: dict[str, Callable[[], Sequence[Call]]] = {
        name: partial(kernel_calls, inputs, use, tile) for name, tile in tiles.items()
    }
    failed: dict[str, str] = {}
    if use == "training":
        timings, failed = time(each)
        row["forward"] = micros_of(timings)
        fastest = sorted(row["forward"], key=row["forward"].__getitem__)[:1]
        compared = {COMPILED: None} | {name: tiles[name] for name in fastest}
        each = {
            name: partial(training_calls, half, tile, device=device, dtype=dtype) for name, tile in compared.items()
        }
    else:
        each = {COMPILED: partial(reference_calls, inputs, use)} | each
    timings, also_failed = time(each)
    return row | dict(micros=micros_of(timings), failed=failed | also_failed)


HEADER = """| channels | rows | compiled, µs | kernel, µs | tile | ratio | TFLOP/s |
|---|---|---|---|---|---|---|"""


def line_of(row: Mapping[str, Any]) -> str:
    (rows, width, hidden), micros = row["half"], row["micros"]
    best = best_of(micros, COMPILED)
    if best is None:
        return f"| {width} → {hidden} | {rows:,} | failed: {row['failed']} |"
    return (
        f"| {width} → {hidden} | {rows:,} | {micros[COMPILED]:.1f} | {micros[best]:.1f} | {best} | "
        f"{micros[COMPILED] / micros[best]:.2f} | {row['flops'] / micros[best] / 1e6:.0f} |"
    )


Wins = dict[tuple[int, int], list[tuple[int, int, tuple[int, ...]]]]  # width and hidden channels → fields of each `Win`


def wins_of(timed: Iterable[Mapping[str, Any]]) -> Wins:
    """Where the kernel wins; empty for widths where it does not.

    A win holds halfway, as a ratio, to the next numbers of rows that were timed. Below the smallest it holds for a
    third fewer, and above the largest for any number.
    """
    timed = list(timed)
    wins: Wins = defaultdict(list)
    for row in timed:
        micros, (here, *widths) = row["micros"], row["half"]
        found = wins[widths[0], widths[1]]
        best = best_of(micros, COMPILED)
        if best is None or micros[COMPILED] < LEAST_GAIN * micros[best]:
            continue
        others = [other["half"][0] for other in timed if other["half"][1:] == row["half"][1:]]
        below = max((n for n in others if n < here), default=None)
        above = min((n for n in others if n > here), default=None)
        least = here * 2 // 3 if below is None else math.isqrt(here * below)
        most = fused_mlp.ANY if above is None else math.isqrt(here * above) - 1
        found.append((least, most, ast.literal_eval(best)))
    return dict(wins)


# For `inline bench tune`


def entries_of(use: Use, rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    return {use: {tuned.key_of(*widths): list(wins) for widths, wins in wins_of(rows).items()}}


def describe(row: Mapping[str, Any]) -> str:
    micros = row["micros"]
    best = best_of(micros, COMPILED)
    if best is None:
        return f"failed: {next(iter(row['failed'].values()), 'nothing ran')}"
    return f"{micros[best]:.1f} µs, compiled {micros[COMPILED]:.1f} µs ({micros[COMPILED] / micros[best]:.2f})"
