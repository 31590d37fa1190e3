"""A layer norm and the linear layer after it as one Triton launch, for inference; `normed_linear.py` has the reference.

Tiles and the table of wins are those of `fused_mlp.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import gpu
from .fused_mlp import Tile, casts_weights, choose_tile, dot_settings, halves
from .gpu import on_device_of
from .kernels.norm_linear import norm_linear_kernel
from .registration import refuse_tangents, register


def run(
    x: Tensor, norm: Sequence[Tensor], weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, tile: Tile | None
) -> tuple[Tensor, Tensor]:
    """x (…, C), norm: weight and bias (C,), W (O, C), b (O,), all contiguous → norm(x) (…, C), out (…, O) in `dtype`"""
    outputs, width = weight.shape
    rows = x.numel() // width
    normal, out = _results_like(x, weight, dtype)
    if rows == 0:
        return normal, out
    if tile is None:
        tile = choose_tile(rows, width, outputs, dtype, gpu.limits_of(x.device), casts=weight.dtype != dtype)
    first, second = halves(width)
    gpu.launch(norm_linear_kernel, (triton.cdiv(rows, tile.rows), tile.splits))(
        x, *norm, weight, bias, normal, out, rows, eps,
        C=width, DO=outputs, C0=first, C1=second, BM=tile.rows, BO=tile.hidden, SPLITS=tile.splits,
        **dot_settings(dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return normal, out


def _results_like(x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@register("inline_attention::norm_linear", mutates_args=())
def _norm_linear_op(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    tile: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """An operator without a backward. tile: the fields of a `Tile`, or empty for the choice of `choose_tile`."""
    with on_device_of(x):
        return run(x, (norm_weight, norm_bias), weight, bias, eps, dtype, Tile(*tile) if tile else None)


@_norm_linear_op.register_fake
def _(x, norm_weight, norm_bias, weight, bias, eps, dtype, tile):  # type: ignore[no-untyped-def]
    return _results_like(x, weight, dtype)


@register_flop_formula(torch.ops.inline_attention.norm_linear)
def _flops(x: Any, norm_weight: Any, norm_bias: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def norm_linear(
    x: Tensor,
    norm: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """The backend's entry. Inputs are checked and need no gradients; products are in `dtype`."""
    refuse_tangents(x, *norm, weight, bias)
    if not casts_weights(x, dtype, tile):
        weight, bias = weight.to(dtype), bias.to(dtype)
    tensors = (t.contiguous() for t in (x, *norm, weight, bias))
    normal, out = _norm_linear_op(*tensors, eps, dtype, list(tile or ()))
    return normal, out
