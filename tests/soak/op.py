"""Random calls of the op, forward and backward, against the N×N form written out."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inline_attention.ops import FEATURE_MAPS, attention_matrix, inline_attention, inline_attention_packed

from .part import Part

EXACT = {torch.float64: 1e-11, torch.float32: 1e-5}  # of the largest expected value


def matrix(q: Tensor, k: Tensor, *, feature_map: str, scale: float, present: Tensor) -> Tensor:
    """The paper's weights (B, heads, Nq, N): q (B, Nq, heads, d), k (B, N, heads, d), present (B, N)."""
    phi = FEATURE_MAPS[feature_map].apply
    scores = torch.einsum("bqhd,bnhd->bhqn", phi(q), phi(k)) * present[:, None, None]
    count = present.sum(1).clamp(min=1).to(q.dtype)[:, None, None, None]
    weights = scale / count * scores - scale / count**2 * scores.sum(-1, keepdim=True) + 1 / count
    return weights * present[:, None, None]


def residual(v: Tensor, kernels: Tensor, *, grid: tuple[int, int], prefix: int) -> Tensor:
    """PyTorch's convolution of each sample's map with its own 3×3 kernels; zeros for prefix tokens."""
    batch = v.shape[0]
    v_map = v[:, prefix:].reshape(batch, *grid, -1).permute(0, 3, 1, 2).reshape(1, -1, *grid)
    out = F.conv2d(v_map, kernels.reshape(-1, 1, 3, 3), padding=1, groups=v_map.shape[1])
    tokens = out.reshape(batch, -1, math.prod(grid)).mT.reshape(batch, -1, *v.shape[2:])
    return torch.cat([torch.zeros_like(v[:, :prefix]), tokens], dim=1)


class Op(Part):
    name = "op"
    what = "random calls of the op, forward and backward"
    promise = "output and every gradient equal the N×N form"
    count, per_chunk = 5_000, 250

    def run(self, case: int) -> Mapping[str, int]:
        torch.set_num_threads(1)
        draw = self.draw(case)
        torch.manual_seed(draw.getrandbits(63))
        dtype = draw.choice(list(EXACT))
        label = draw.choice([packed_case, batch_case])(draw, dtype)
        return {f"{label}, {str(dtype).removeprefix('torch.')}": 1}


def batch_case(draw: random.Random, dtype: torch.dtype) -> str:
    batch, heads, dim, prefix = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 33), draw.randint(0, 3)
    grid = draw.randint(1, 9), draw.randint(1, 9)
    tokens = prefix + math.prod(grid)
    has_grid = draw.random() < 0.7
    queries = tokens if draw.random() < 0.6 else draw.randint(1, 40)
    options: dict[str, Any] = dict(feature_map=draw.choice(sorted(FEATURE_MAPS)))
    if draw.random() < 0.5:
        options["scale"] = draw.choice([0.0, -1.5, 0.3, 4.0])
    scale = options.get("scale", dim**-0.5)
    present = torch.ones(batch, tokens, dtype=torch.bool)
    if draw.random() < 0.5:
        present = torch.rand(batch, tokens) < draw.choice([0.05, 0.5, 0.95])
        options["token_mask"] = present
    if has_grid:
        options |= dict(grid=grid, num_prefix_tokens=prefix)
    tensors = _qkv(draw, (batch, queries, heads, dim), (batch, tokens, heads, dim))
    has_local = has_grid and queries == tokens and draw.random() < 0.7
    if has_local:
        tensors.append(torch.randn(batch, heads, dim, 9, dtype=torch.float64))
    rows = torch.ones(batch, queries, dtype=torch.bool)
    if draw.random() < 0.5:
        rows = options["query_mask"] = torch.rand(batch, queries) < draw.choice([0.05, 0.5, 0.95])
    are_views = queries == tokens and draw.random() < 0.5
    hidden = draw.choice([0.0, math.nan, math.inf])  # what absent queries and tokens hold must not matter

    def written_out(q: Tensor, k: Tensor, v: Tensor, kernels: Tensor | None = None) -> Tensor:
        weights = matrix(q, k, feature_map=options["feature_map"], scale=scale, present=present)
        out = torch.einsum("bhqn,bnhd->bqhd", weights, v)
        if kernels is not None:
            out = out + residual(v * present[:, :, None, None], kernels, grid=grid, prefix=prefix)
        return out * rows[:, :, None, None]

    def fused(q: Tensor, k: Tensor, v: Tensor, kernels: Tensor | None = None) -> Tensor:
        q, k, v = (
            x.masked_fill(~mask[:, :, None, None], hidden) for x, mask in ((q, rows), (k, present), (v, present))
        )
        q, k, v = _as_views(q, k, v) if are_views else (q, k, v)
        return inline_attention(q, k, v, local_weight=kernels, **options)

    compare(fused, written_out, tensors, dtype)
    weights = {key: value for key, value in options.items() if key not in ("grid", "num_prefix_tokens")}
    actual = attention_matrix(*tensors[:2], **weights)
    expected = matrix(*tensors[:2], feature_map=options["feature_map"], scale=scale, present=present)
    _assert_close("attention_matrix", actual, expected * rows[:, None, :, None], EXACT[torch.float64])
    return "cross-attention" if queries != tokens else "with local residual" if has_local else "self-attention"


def packed_case(draw: random.Random, dtype: torch.dtype) -> str:
    heads, dim, prefix = draw.randint(1, 4), draw.randint(1, 33), draw.randint(0, 2)
    grids = [(draw.randint(1, 7), draw.randint(1, 7)) for _ in range(draw.randint(1, 5))]
    bounds = [0]
    for grid in grids:
        bounds.append(bounds[-1] + prefix + math.prod(grid))
    feature_map = draw.choice(sorted(FEATURE_MAPS))
    tensors = _qkv(draw, (bounds[-1], heads, dim), (bounds[-1], heads, dim))
    has_local = draw.random() < 0.6
    if has_local:
        tensors.append(torch.randn(len(grids), heads, dim, 9, dtype=torch.float64))
    are_views = draw.random() < 0.5
    cu_seqlens = bounds if draw.random() < 0.5 else torch.tensor(bounds)

    def written_out(q: Tensor, k: Tensor, v: Tensor, kernels: Tensor | None = None) -> Tensor:
        outs = []
        for i, (grid, (start, end)) in enumerate(zip(grids, pairwise(bounds), strict=True)):
            image = [x[None, start:end] for x in (q, k, v)]
            present = torch.ones(1, end - start, dtype=torch.bool)
            weights = matrix(*image[:2], feature_map=feature_map, scale=dim**-0.5, present=present)
            out = torch.einsum("bhqn,bnhd->bqhd", weights, image[2])
            if kernels is not None:
                out = out + residual(image[2], kernels[i : i + 1], grid=grid, prefix=prefix)
            outs.append(out[0])
        return torch.cat(outs)

    def fused(q: Tensor, k: Tensor, v: Tensor, kernels: Tensor | None = None) -> Tensor:
        rows = _as_views(q, k, v) if are_views else (q, k, v)
        options: dict[str, Any] = dict(cu_seqlens=cu_seqlens, grids=grids, num_prefix_tokens=prefix)
        return inline_attention_packed(*rows, feature_map=feature_map, local_weight=kernels, **options)

    compare(fused, written_out, tensors, dtype)
    return "packed"


def _qkv(draw: random.Random, queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Tensor]:
    size = draw.choice([0.1, 1.0, 3.0])
    return [size * torch.randn(shape, dtype=torch.float64) for shape in (queries, keys, keys)]


def _as_views(*tensors: Tensor) -> Sequence[Tensor]:
    """The same values as strided views into one tensor, as a qkv projection gives them."""
    return torch.stack(tensors, dim=-3).unbind(-3)


def compare(
    fused: Callable[..., Tensor], written_out: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype
) -> None:
    """Output and gradients in `dtype` against float64.

    The written-out form in `dtype` itself sets the scale: the op's error may be twice as large, and what rounding
    the inputs alone explains is allowed in any case.
    """
    inputs = [x.to(dtype) for x in tensors]
    exact = _with_gradients(written_out, [x.double() for x in inputs])
    plain = _with_gradients(written_out, inputs)
    actual = _with_gradients(fused, inputs)
    for name, ours, same, expected in zip(("output", "dq", "dk", "dv", "dlocal"), actual, plain, exact, strict=False):
        allowed = 2 * (same.double() - expected).abs().max().item() if same.numel() else 0.0
        _assert_close(name, ours, expected, EXACT[dtype], also=allowed)


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, max(out.numel(), 1), dtype=torch.float64)[: out.numel()].view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]


def _assert_close(name: str, actual: Tensor, expected: Tensor, relative: float, *, also: float = 0.0) -> None:
    assert actual.shape == expected.shape, f"{name} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return
    error = (actual.double() - expected.double()).abs().max().item()
    allowed = relative * (1 + expected.abs().max().item()) + also
    assert error <= allowed, f"{name} is off by {error:.3g}, allowed are {allowed:.3g}"
