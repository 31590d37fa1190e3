"""The MLP half of a block as one Triton launch, in inference with the projection before it.

`mlp.py` has the reference.

The backward pass is plain PyTorch, which torch.compile fuses.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from . import gpu, tuned
from .gpu import H200, INTERPRETED, Limits, on_device_of
from .kernels.mlp import mlp_kernel, mlp_sum_kernel
from .projections import OutputProjection
from .registration import refuse_tangents, register
from .tracing import needs_gradients

# Most channels of a token. A program keeps the sums of its outputs in registers.
MOST_WIDTH = 512

# For so few rows the kernel reads float32 weights and casts them itself, which spares a launch for each. A guess.
FEW_ROWS = 2048

# Outputs of a program that adds parts.
SUMMED = 256 if INTERPRETED else 1024


class Tile(NamedTuple):
    """Launch parameters."""

    rows: int  # tokens of a program
    hidden: int  # channels per step
    warps: int
    stages: int
    splits: int = 1  # programs that share the hidden channels of a token


# What the kernel is used for: inference by itself, inference with the projection before it, or training. "normed" is
# another kernel, with the same tiles: a norm and the linear layer after it.
Use = Literal["inference", "projected", "training", "normed"]
USES: tuple[Use, ...] = get_args(Use)


# What `tests/gpu_check.py mlp` times. The launch takes the first that fits, and fewer rows for few tokens.
TILES: tuple[Tile, ...] = (
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 2),
    Tile(128, 32, 8, 3),
    Tile(128, 32, 8, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 32, 4, 3),
    Tile(64, 32, 4, 2),
    Tile(64, 64, 8, 2),
    Tile(64, 32, 8, 2),
    Tile(32, 64, 4, 2),
    Tile(32, 32, 4, 2),
    Tile(16, 64, 4, 2),
    Tile(16, 32, 4, 2),
    Tile(16, 32, 4, 1),
    Tile(16, 16, 4, 1),
)

# The interpreter's time does not depend on the size of a block. Small ones take small tests through every loop.
if INTERPRETED:
    TILES = (Tile(16, 16, 4, 1),)


ANY = 2**62  # more rows than there can be


class Win(NamedTuple):
    """Numbers of rows for which the kernel was measured to be faster than the compiled reference."""

    least_rows: int
    most_rows: int
    tile: Tile


# By GPU, width and hidden channels, in half precision. For "training" it is forward and backward.
WINS: dict[Use, dict[tuple[gpu.Chip, int, int], tuple[Win, ...]]] = {
    "inference": {
        (H200, 64, 256): (Win(267_605, ANY, Tile(64, 64, 4, 2)),),
        (H200, 64, 512): (Win(267_605, ANY, Tile(64, 64, 4, 3)),),
        (H200, 96, 384): (Win(267_605, ANY, Tile(64, 32, 4, 3)),),
        (H200, 128, 512): (Win(66_901, ANY, Tile(64, 64, 4, 3)),),
        (H200, 128, 1024): (Win(66_901, ANY, Tile(64, 64, 4, 3)),),
        (H200, 192, 768): (
            Win(131, 1_536, Tile(16, 32, 4, 2, 8)),
            Win(1_537, 14_373, Tile(64, 64, 4, 3, 2)),
            Win(14_374, ANY, Tile(64, 32, 4, 3)),
        ),
    },
    "projected": {
        (H200, 64, 256): (Win(267_605, ANY, Tile(64, 64, 4, 2)),),
        (H200, 64, 512): (Win(267_605, ANY, Tile(64, 64, 4, 2)),),
        (H200, 96, 384): (Win(267_605, ANY, Tile(64, 64, 4, 3)),),
        (H200, 128, 512): (Win(66_901, ANY, Tile(64, 64, 4, 3)),),
        (H200, 128, 1024): (Win(66_901, ANY, Tile(64, 64, 4, 3)),),
        # At 4,097 tokens the projection by itself and the MLP's kernel take less time.
        (H200, 192, 768): (
            Win(131, 336, Tile(16, 32, 4, 2, 8)),
            Win(337, 1_536, Tile(32, 32, 4, 2, 4)),
            Win(14_374, ANY, Tile(64, 32, 4, 3)),
        ),
    },
    "training": {},
    "normed": {
        (H200, 192, 576): (Win(131, 336, Tile(16, 32, 4, 2, 16)), Win(337, 1_536, Tile(16, 32, 4, 2, 8))),
    },
}


def halves(width: int) -> tuple[int, int]:
    """The two blocks that hold a row: the largest power of two in it, and what is left, as a power of two or zero."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


def memory_of(tile: Tile, width: int, dtype: torch.dtype, *, casts: bool = False) -> int:
    """An upper bound of the shared memory of a program, in bytes. `tests/kernel_builds.py` checks it.

    Shared memory holds the normalised rows, the hidden activations, and the weights of `stages` steps: in float32 if
    the kernel casts them, and those of one step after the cast.
    """
    channels = sum(halves(width))
    rows, step = tile.rows * (channels + tile.hidden), 2 * tile.hidden * channels
    weights = step * (4 * tile.stages + dtype.itemsize if casts else tile.stages * dtype.itemsize)
    return rows * dtype.itemsize + weights + 4096


def fits(tile: Tile, width: int, dtype: torch.dtype, limits: Limits, *, casts: bool = False) -> bool:
    """Whether a program of this tile has room for its blocks, in shared memory and in registers."""
    sums = tile.rows * (sum(halves(width)) + tile.hidden) // (32 * tile.warps)  # registers of a thread
    return memory_of(tile, width, dtype, casts=casts) <= limits.shared_memory and sums <= 160


def choose_tile(
    rows: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    limits: Limits,
    *,
    casts: bool = False,
) -> Tile:
    """The first of `TILES` that fits and keeps all multiprocessors busy. If none does: the fewest rows, with splits.

    Float32 products are unrolled over a block, which must be small for registers to hold it.
    """
    fitting = [tile for tile in TILES if fits(tile, width, dtype, limits, casts=casts)]
    if dtype == torch.float32:
        fitting = [tile for tile in fitting if tile.rows <= 32 and tile.hidden <= 32] or fitting
    for tile in fitting:
        if triton.cdiv(rows, tile.rows) >= limits.multiprocessors:
            return tile
    # More splits until no multiprocessor is idle, as long as each split has a step of its own.
    tile = min(fitting, key=lambda tile: (tile.rows, -tile.hidden))
    programs = triton.cdiv(rows, tile.rows)
    splits = 1
    while 2 * splits * programs <= 2 * limits.multiprocessors and 2 * splits * tile.hidden <= hidden:
        splits *= 2
    return tile._replace(splits=splits)


def dot_settings(dtype: torch.dtype) -> dict[str, Any]:
    """The dtype of matrix products: that of a linear layer."""
    kinds = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return dict(DOT=kinds[dtype], PRECISION="ieee" if dtype == torch.float32 else "tf32")


def run(
    x: Tensor,
    norm: Sequence[Tensor],
    weights: Sequence[Tensor],
    projection: OutputProjection | None,
    eps: float,
    dtype: torch.dtype,
    tile: Tile | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """x (…, C) contiguous; norm: weight and bias (C,); weights: W1 (H, C), b1 (H,), W2 (C, H), b2 (C,), contiguous

    Products are in `dtype`, and weights are cast to it. Returns the output, and if `save` what enters the GELU,
    (rows, H).
    """
    w1, _, _, b2 = weights
    hidden, width = w1.shape
    rows = x.numel() // width
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, dtype), device=x.device)
    kept = torch.empty((rows if save else 0, hidden), dtype=dtype, device=x.device)
    if rows == 0:
        return out, kept
    if tile is None:
        tile = choose_tile(rows, width, hidden, dtype, gpu.limits_of(x.device), casts=w1.dtype != dtype)
    first, second = halves(width)
    target = out
    if tile.splits > 1:
        target = torch.empty((tile.splits, rows, width), dtype=torch.float32, device=x.device)
    gpu.launch(mlp_kernel, (triton.cdiv(rows, tile.rows), tile.splits))(
        x, *(projection or (x, x, x)), *norm, *weights, target, kept, rows, eps,
        C=width, H=hidden, C0=first, C1=second, BM=tile.rows, BH=tile.hidden, PROJECT=projection is not None,
        SPLITS=tile.splits, SAVE=save, **dot_settings(dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.splits > 1:
        gpu.launch(mlp_sum_kernel, (triton.cdiv(rows * width, SUMMED),))(
            x, b2, target, out, rows,
            C=width, PROJECT=projection is not None, SPLITS=tile.splits, BN=SUMMED, num_warps=4,
        )  # fmt: skip
    return out, kept


@register("inline_attention::mlp", mutates_args=())
def _mlp_op(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    attended: Tensor | None,
    proj_weight: Tensor | None,
    proj_bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    tile: Sequence[int],
    save: bool,
) -> tuple[Tensor, Tensor]:
    """
    Args:
        attended, proj_weight, proj_bias: the fields of an `OutputProjection`, or None for none.
        tile: the fields of a `Tile`, or empty for the choice of `choose_tile`.
    """
    projection = None
    if attended is not None and proj_weight is not None and proj_bias is not None:
        projection = OutputProjection(attended, proj_weight, proj_bias)
    with on_device_of(x):
        norm, weights = (norm_weight, norm_bias), (w1, b1, w2, b2)
        return run(x, norm, weights, projection, eps, dtype, Tile(*tile) if tile else None, save)


@_mlp_op.register_fake
def _(x, norm_weight, norm_bias, w1, b1, w2, b2, attended, proj_weight, proj_bias, eps, dtype, tile, save):  # type: ignore[no-untyped-def]
    hidden, width = w1.shape
    return (
        x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, dtype)),
        x.new_empty((x.numel() // width if save else 0, hidden), dtype=dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, norm_weight, norm_bias, w1, b1, w2, *_, eps, _, _, _ = inputs
    hidden = output[1]
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)  # or zeros would be made for the gradient of `hidden`
    ctx.save_for_backward(x, norm_weight, norm_bias, w1, b1, w2, hidden)
    ctx.eps = eps


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    """Four products. What lies between them is computed again from x and from what enters the GELU."""
    if grad is None:
        return (None,) * 14
    x, norm_weight, norm_bias, w1, b1, w2, hidden = ctx.saved_tensors
    dtype, shape = w1.dtype, x.shape[-1:]
    rows, grad_rows = x.reshape(-1, *shape).float(), grad.reshape(-1, *shape)
    norm = norm_weight.float(), norm_bias.float()
    normal, mean, rstd = torch.ops.aten.native_layer_norm(rows, shape, *norm, ctx.eps)
    normal = normal.to(dtype)
    if torch.is_grad_enabled():  # for second derivatives, which also go through these values
        hidden = F.linear(normal, w1, b1)
    upstream = grad_rows.to(dtype)
    grad_hidden = torch.ops.aten.gelu_backward(upstream @ w2, hidden)
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        (grad_hidden @ w1).float(), rows, shape, mean, rstd, *norm, [True, True, True]
    )
    return (
        (grad_x + grad_rows).to(x.dtype).reshape(x.shape),
        grad_weight.to(norm_weight.dtype),
        grad_bias.to(norm_bias.dtype),
        grad_hidden.mT @ normal,
        grad_hidden.sum(0, dtype=dtype),
        upstream.mT @ F.gelu(hidden),
        upstream.sum(0, dtype=dtype),
        *[None] * 7,
    )


_mlp_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.inline_attention.mlp)
def _flops(
    x: Any, norm_weight: Any, norm_bias: Any, w1: Any, b1: Any, w2: Any, b2: Any, attended: Any, *_: Any, **__: Any
) -> int:
    hidden, width = w1
    columns = 2 * hidden + (0 if attended is None else width)
    return 2 * math.prod(x) * columns


@torch.compiler.assume_constant_result
def _why_not_memory(width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    limits = gpu.limits_of(device)
    if any(fits(tile, width, dtype, limits) for tile in TILES):
        return None
    return f"{width} channels of {dtype} do not fit the {limits.shared_memory // 1024} KiB of shared memory of {device}"


def casts_weights(x: Tensor, dtype: torch.dtype, tile: Tile | None) -> bool:
    """Whether the kernel casts the weights itself, in inference."""
    return x.numel() <= FEW_ROWS * x.shape[-1] and _fits_casting(tile, x.shape[-1], dtype, x.device)


@torch.compiler.assume_constant_result
def _fits_casting(tile: Tile | None, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is memory for float32 weights: for this tile, or any."""
    limits = gpu.limits_of(device)
    return any(fits(each, width, dtype, limits, casts=True) for each in ((tile,) if tile else TILES))


def why_not(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run on x (…, C), or None if it can."""
    width = x.shape[-1]
    if width > MOST_WIDTH:
        return f"the kernel takes up to {MOST_WIDTH} channels, not {width}"
    return _why_not_memory(width, dtype, x.device)


def add_mlp(
    x: Tensor,
    norm: Sequence[Tensor],
    weights: Sequence[Tensor],
    projection: OutputProjection | None,
    eps: float,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """The backend's entry. Inputs are checked; products are in `dtype`. A projection has no gradients here."""
    refuse_tangents(x, *norm, *weights, *(projection or ()))
    save = needs_gradients(x, *norm, *weights)
    last: Sequence[Tensor] = projection or ()
    if save or not casts_weights(x, dtype, tile):
        weights, last = ([t.to(dtype) for t in tensors] for tensors in (weights, last))
    norm, weights, last = ([t.contiguous() for t in tensors] for tensors in (norm, weights, last))
    fields = last or (None, None, None)
    out: Tensor
    out, _ = _mlp_op(x.contiguous(), *norm, *weights, *fields, eps, dtype, list(tile or ()), save)
    return out


@torch.compiler.assume_constant_result  # otherwise every compiled call would check the whole table
def wins_of(device: torch.device, width: int, hidden: int, use: Use) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """What was measured on such a GPU: the fields of each `Win`, as plain tuples, which torch.compile can keep."""
    measured = tuned.rows(device, use, width, hidden)
    if measured is not None:
        return measured
    wins = WINS[use]
    found = wins.get((gpu.chip_of(device), width, hidden), ()) if wins else ()
    return tuple((win.least_rows, win.most_rows, tuple(win.tile)) for win in found)


def winning_tile(x: Tensor, hidden: int, dtype: torch.dtype, use: Use) -> Tile | None:
    """The measured tile, if the kernel is faster than the compiled reference; otherwise None."""
    if not x.is_cuda or dtype == torch.float32:
        return None
    rows = x.numel() // max(1, x.shape[-1])
    for least_rows, most_rows, tile in wins_of(x.device, x.shape[-1], hidden, use):
        if least_rows <= rows <= most_rows:
            return Tile(*tile)
    return None
