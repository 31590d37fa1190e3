"""The public functions: InLine attention of token rows, of packed images, and attention written out as a matrix."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backends, reference
from .backends import fused
from .feature_maps import get_feature_map
from .local import TAPS, local_sum

Backend = Literal["auto", "reference", "triton"]
Grid = tuple[int, int]

# Vanilla linear attention divides by a sum that can be zero.
LINEAR_EPS = 1e-6


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor | None, *, layout: str) -> None:
    tensors = {"q": q, "k": k} | ({} if v is None else {"v": v})
    ndim = layout.count(",") + 1
    for name, x in tensors.items():
        if x.ndim != ndim:
            raise ValueError(f"{name} has shape {_shape(x)}; expected {layout}")
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}; expected a floating-point tensor")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; "
                "convert them to one dtype and device"
            )
    if v is not None and v.shape != k.shape:
        raise ValueError(f"v has shape {_shape(v)}; expected that of k, {_shape(k)}")
    if q.shape[-2:] != k.shape[-2:]:
        raise ValueError(f"q has (heads, d) = {_shape(q)[-2:]} but k has {_shape(k)[-2:]}; they must be equal")
    if ndim == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q is a batch of {q.shape[0]} but k of {k.shape[0]}; they must be equal")
    if k.shape[ndim - 3] == 0:
        raise ValueError(f"k has shape {_shape(k)}: no token to attend to")
    if k.shape[-1] == 0:
        raise ValueError(f"k has shape {_shape(k)}: heads of no channels; expected {layout} with d of 1 or more")


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} but q, k and v are on {device}; move it there")


def _check_token_mask(token_mask: Tensor, k: Tensor) -> None:
    _check_device("token_mask", token_mask, k.device)
    expected = _shape(k)[:2]
    if token_mask.shape == expected and token_mask.dtype == torch.bool:
        return
    what = f"token_mask has shape {_shape(token_mask)} and dtype {token_mask.dtype}"
    if token_mask.ndim > 2 or (token_mask.ndim == 2 and token_mask.shape[-2] == token_mask.shape[-1] != expected[0]):
        raise ValueError(
            f"{what}; a mask over pairs of tokens is impossible for linear attention, whose queries share one state. "
            f"Pass a bool mask over tokens, (B, N) = {expected}, True where a token is present"
        )
    raise ValueError(f"{what}; expected bool (B, N) = {expected}, True where a token is present")


def _check_local(local_weight: Tensor, v: Tensor, *, batch: int) -> None:
    _check_device("local_weight", local_weight, v.device)
    expected = (batch, *_shape(v)[-2:], TAPS)
    if local_weight.shape != expected:
        raise ValueError(
            f"local_weight has shape {_shape(local_weight)}; "
            f"expected (B, heads, d, 9) = {expected}, one 3×3 kernel per channel"
        )


def _check_prefix(num_prefix_tokens: int) -> None:
    if num_prefix_tokens < 0:
        raise ValueError(f"num_prefix_tokens={num_prefix_tokens}; expected 0 or more")


def _check_grid(grid: Grid, *, tokens: int, num_prefix_tokens: int) -> None:
    try:
        height, width = grid
    except (TypeError, ValueError):
        raise ValueError(f"grid={grid!r}; expected (height, width)") from None
    if height < 1 or width < 1 or num_prefix_tokens + height * width != tokens:
        raise ValueError(
            f"grid {height}×{width} with {num_prefix_tokens} prefix tokens makes "
            f"{num_prefix_tokens + height * width} tokens, but there are {tokens}; "
            "pass the (height, width) of the token map"
        )


def _default_scale(q: Tensor, scale: float | None) -> float:
    if isinstance(scale, Tensor):  # it would get no gradient, silently
        raise ValueError("scale is a tensor; expected a number. Multiply q by a scale that is learned")
    return q.shape[-1] ** -0.5 if scale is None else scale


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "identity",
    scale: float | None = None,
    local_weight: Tensor | None = None,
    grid: Grid | None = None,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """InLine attention: linear in the number of tokens, its rows sum to one, and different queries get different rows.

    The weight of query i on token j is (s/N)·φ(q_i)·φ(k_j) − (s/N²)·Σ_t φ(q_i)·φ(k_t) + 1/N. It is never formed:
    the output is φ(q_i)·S + v̄ with S the scaled covariance of keys and values. Sums are taken in at
    least float32; the kernels round what they multiply to the inputs' precision, and keep S in it for bfloat16.

    Args:
        q: queries (B, Nq, heads, d). Any strides: views into a qkv projection's output need no copy.
        k: keys (B, N, heads, d).
        v: values (B, N, heads, d).
        feature_map: φ, applied to q and k: "identity", "relu", "leaky_relu" (slope 0.01) or "exp" (of 0.2·x).
        scale: s; the 1/N is inside. Default d^-1/2.
        local_weight: (B, heads, d, 9), a 3×3 kernel per channel and sample, taps row-major. Its correlation with v on
            the token map, zeros beyond the border, is added to the output. Needs `grid` and Nq = N.
        grid: (height, width) of the token map; N = num_prefix_tokens + height·width.
        num_prefix_tokens: tokens before the map, such as a class token. They attend and are attended to, but take no
            part in the local residual.
        token_mask: (B, N) bool, True for a token that is present. Absent tokens count in no sum, are zero to the
            local residual, and their outputs are zero where Nq = N, for queries and keys are taken for the same tokens
            then.
        backend: "reference", plain PyTorch; "triton", fused kernels on a GPU; "auto", the kernels where they can run (a
            GPU with Triton, bfloat16, float16 or float32, heads of up to 128 channels), else the reference.

    Returns:
        (B, Nq, heads, d) in q's dtype.
    """
    _check_qkv(q, k, v, layout="(B, N, heads, d)")
    return inline_attention_projected(
        *(x.unsqueeze(2) for x in (q, k, v)),
        feature_map=feature_map,
        scale=scale,
        local_weight=local_weight,
        grid=grid,
        num_prefix_tokens=num_prefix_tokens,
        token_mask=token_mask,
        backend=backend,
    )


def inline_attention_projected(
    *projections: Tensor,
    feature_map: str = "identity",
    scale: float | None = None,
    local_weight: Tensor | None = None,
    grid: Grid | None = None,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`inline_attention` of the outputs of projections: kernels then write the gradients of q, k and v where the
    projections expect them, instead of three tensors that have to be brought together.

    Args:
        projections: tensors (B, N, m, heads, d) that hold q, k and v in this order, m of them each: one qkv of three,
            or q and kv of one and two.

    The other arguments and the result are those of `inline_attention`.
    """
    if any(x.ndim != 5 for x in projections) or sum(x.shape[2] for x in projections) != 3:
        shapes = ", ".join(str(_shape(x)) for x in projections)
        raise ValueError(f"the projections have shapes {shapes}; expected (B, N, m, heads, d), three m together")
    # The gradient of unbind copies, that of squeeze does not.
    q, k, v = [y for x in projections for y in (x.unbind(2) if x.shape[2] > 1 else (x.squeeze(2),))]
    _check_qkv(q, k, v, layout="(B, N, heads, d)")
    if token_mask is not None:
        _check_token_mask(token_mask, k)
    _check_prefix(num_prefix_tokens)
    if grid is not None:
        _check_grid(grid, tokens=k.shape[1], num_prefix_tokens=num_prefix_tokens)
    if local_weight is not None:
        if grid is None:
            raise ValueError(
                "local_weight needs grid=(height, width): the token count does not say how the map is shaped"
            )
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"local_weight needs queries on the map of v, but there are {q.shape[1]} queries and {k.shape[1]} keys"
            )
        _check_local(local_weight, v, batch=v.shape[0])
    get_feature_map(feature_map)
    options: dict[str, Any] = dict(
        feature_map=feature_map, scale=_default_scale(q, scale), num_prefix_tokens=num_prefix_tokens
    )
    if backends.choose(backend, projections) == "triton":
        grids = [(1, 1) if grid is None else grid]
        return fused.attend(projections, local_weight, token_mask, None, grids=grids, **options)
    return reference.attend(q, k, v, local_weight, token_mask, grid=grid, **options)


def inline_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | Sequence[int],
    grids: Sequence[Grid] | None = None,
    feature_map: str = "identity",
    scale: float | None = None,
    local_weight: Tensor | None = None,
    num_prefix_tokens: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """InLine attention of images of different sizes laid end to end, each attending to itself alone.

    Args:
        q: (T, heads, d), T the tokens of all images together.
        k: (T, heads, d)
        v: (T, heads, d)
        cu_seqlens: (images + 1,) integers, where each image begins, from 0 to T. They are read on the host: from a
            list or a tensor on the CPU at once, from a tensor on a GPU after a wait for it. torch.compile makes one
            graph of it from a list, for each layout anew, and breaks the graph at a tensor.
        grids: (height, width) of each image's token map; needed for local_weight, and checked whenever given.
        feature_map: as for `inline_attention`.
        scale: as for `inline_attention`.
        local_weight: (images, heads, d, 9).
        num_prefix_tokens: tokens before the map, in every image.
        backend: as for `inline_attention`.

    Returns:
        (T, heads, d)
    """
    _check_qkv(q, k, v, layout="(T, heads, d)")
    if q.shape != k.shape:
        raise ValueError(f"q has shape {_shape(q)}; packed queries and keys are the same tokens, {_shape(k)}")
    get_feature_map(feature_map)
    _check_prefix(num_prefix_tokens)
    bounds = _check_cu_seqlens(cu_seqlens, total=q.shape[0])
    images = len(bounds) - 1
    if grids is None:
        if local_weight is not None:
            raise ValueError("local_weight needs grids, the (height, width) of each image's token map")
    elif len(grids) != images:
        raise ValueError(f"there are {len(grids)} grids for {images} images in cu_seqlens")
    else:
        for grid, (start, end) in zip(grids, pairwise(bounds), strict=True):
            _check_grid(grid, tokens=end - start, num_prefix_tokens=num_prefix_tokens)
    if local_weight is not None:
        _check_local(local_weight, v, batch=images)
    scale = _default_scale(q, scale)
    projections = [x[None, :, None] for x in (q, k, v)]
    if backends.choose(backend, projections) == "triton":
        lengths = [end - start for start, end in pairwise(bounds)]
        sizes = [(1, length) for length in lengths] if grids is None else list(grids)
        rows = [(start, n, *size) for start, n, size in zip(bounds, lengths, sizes, strict=False)]
        return fused.attend(
            projections,
            local_weight,
            None,
            _to_device(rows, q.device),
            feature_map=feature_map,
            scale=scale,
            grids=[(1, max(lengths))] if local_weight is None else sizes,
            num_prefix_tokens=num_prefix_tokens,
        )[0]
    outs = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        out = reference.attend(
            q[None, start:end],
            k[None, start:end],
            v[None, start:end],
            None if local_weight is None else local_weight[i : i + 1],
            None,
            feature_map=feature_map,
            scale=scale,
            grid=None if grids is None else grids[i],
            num_prefix_tokens=num_prefix_tokens,
        )
        outs.append(out[0])
    return torch.cat(outs)


def _to_device(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """As a tensor, without a wait for what the device is doing"""
    if device.type == "cuda" and not torch.compiler.is_compiling():
        return torch.tensor(rows, pin_memory=True).to(device, non_blocking=True)
    return torch.tensor(rows, device=device)


def _check_cu_seqlens(cu_seqlens: Tensor | Sequence[int], *, total: int) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens has shape {_shape(cu_seqlens)} and dtype {cu_seqlens.dtype}; "
                "expected (images + 1,) integers"
            )
        bounds: list[int] = cu_seqlens.tolist()
    else:
        bounds = list(cu_seqlens)
    if len(bounds) < 2:
        raise ValueError(f"cu_seqlens={bounds}; expected (images + 1,) integers")
    if bounds[0] != 0 or bounds[-1] != total or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens={bounds} must rise from 0 to the token count {total}, every image at least one token"
        )
    return bounds


def local_residual(
    v: Tensor,
    local_weight: Tensor,
    *,
    grid: Grid,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
) -> Tensor:
    """The local residual alone, for attentions that do not fuse it: arguments as for `inline_attention`.

    v (B, N, heads, d), local_weight (B, heads, d, 9) → (B, N, heads, d) in v's dtype, zeros for prefix tokens
    """
    _check_prefix(num_prefix_tokens)
    _check_grid(grid, tokens=v.shape[1], num_prefix_tokens=num_prefix_tokens)
    _check_local(local_weight, v, batch=v.shape[0])
    dtype = reference.accumulation_dtype(v.dtype)
    v_ = v.to(dtype)
    if token_mask is not None:
        _check_token_mask(token_mask, v)
        v_ = v_.masked_fill(~token_mask[:, :, None, None], 0)
    v_map = v_[:, num_prefix_tokens:].unflatten(1, grid).flatten(3)
    out = local_sum(v_map, local_weight.to(dtype).flatten(1, 2)).flatten(1, 2).unflatten(2, _shape(v)[2:])
    out = F.pad(out, (0, 0, 0, 0, num_prefix_tokens, 0))
    if token_mask is not None:
        out = out.masked_fill(~token_mask[:, :, None, None], 0)
    return out.to(v.dtype)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "relu",
    token_mask: Tensor | None = None,
) -> Tensor:
    """Vanilla linear attention, φ(q_i)·(Σ_j φ(k_j)v_jᵀ) / (φ(q_i)·Σ_j φ(k_j) + 1e-6), the sums in at least float32.

    q (B, Nq, heads, d), k and v (B, N, heads, d), token_mask (B, N) → (B, Nq, heads, d)
    """
    _check_qkv(q, k, v, layout="(B, N, heads, d)")
    phi = get_feature_map(feature_map).apply
    dtype = reference.accumulation_dtype(q.dtype)
    with reference.without_autocast(q.device):
        q_, k_, v_ = phi(q.to(dtype)), phi(k.to(dtype)), v.to(dtype)
        if token_mask is not None:
            _check_token_mask(token_mask, k)
            absent = ~token_mask[:, :, None, None]
            k_, v_ = k_.masked_fill(absent, 0), v_.masked_fill(absent, 0)
        state = k_.permute(0, 2, 3, 1) @ v_.transpose(1, 2)  # (B, heads, d, d)
        out = (q_.transpose(1, 2) @ state).transpose(1, 2)
        out = out / ((q_ * k_.sum(1, keepdim=True)).sum(-1, keepdim=True) + LINEAR_EPS)
        if token_mask is not None and q.shape[1] == k.shape[1]:
            out = out.masked_fill(absent, 0)
        return out.to(q.dtype)


def attention_matrix(
    q: Tensor,
    k: Tensor,
    *,
    kind: Literal["inline", "linear", "softmax"] = "inline",
    feature_map: str = "identity",
    scale: float | None = None,
    token_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The weights themselves, O(N²): for analysis and for tests, never on a model's path.

    Args:
        q: (B, Nq, heads, d)
        k: (B, N, heads, d)
        kind: "inline"; "linear" (vanilla, divided by its row sum + 1e-6); "softmax".
        feature_map: φ, applied to q and k; for softmax too, so that a non-injective map before it can be studied.
        scale: s of inline and softmax, default d^-1/2.
        token_mask: (B, N), True for a token that is present. Columns of absent tokens are zero, and so are their rows
            where queries and keys are the same tokens.
        pair_mask: bool, broadcasts to (B, heads, Nq, N), False where a token is absent for one query: its row is
            computed over the tokens that remain to it, and is zero where none does.
        bias: added to softmax's scaled scores, broadcasts to them.

    Returns:
        (B, heads, Nq, N), at least float32. InLine's weights may be negative.
    """
    _check_qkv(q, k, None, layout="(B, N, heads, d)")
    phi = get_feature_map(feature_map).apply
    s = _default_scale(q, scale)
    dtype = reference.accumulation_dtype(q.dtype)
    present = pair_mask
    if token_mask is not None:
        _check_token_mask(token_mask, k)
        tokens = token_mask[:, None, None, :]
        present = tokens if present is None else present & tokens
    if bias is not None and kind != "softmax":
        raise ValueError(f"kind={kind!r} has no scores to add a bias to; only softmax has")
    with reference.without_autocast(q.device):
        scores = phi(q.to(dtype)).transpose(1, 2) @ phi(k.to(dtype)).permute(0, 2, 3, 1)  # (B, heads, Nq, N)
        if kind == "softmax":
            scores = s * scores if bias is None else s * scores + bias
            matrix = (scores if present is None else scores.masked_fill(~present, -math.inf)).softmax(-1)
        elif kind in ("inline", "linear"):
            count: Tensor | int = k.shape[1]
            if present is not None:
                scores = scores.masked_fill(~present, 0)
                count = present.sum(-1, keepdim=True).clamp(min=1).to(dtype)
            row_sum = scores.sum(-1, keepdim=True)
            if kind == "linear":
                matrix = scores / (row_sum + LINEAR_EPS)
            else:
                matrix = (s / count) * (scores - row_sum / count) + 1 / count
        else:
            raise ValueError(f"kind={kind!r} is unknown; expected 'inline', 'linear' or 'softmax'")
        if present is not None:
            matrix = matrix.masked_fill(~present, 0)
        if token_mask is not None and q.shape[1] == k.shape[1]:
            matrix = matrix.masked_fill(~token_mask[:, None, :, None], 0)
        return matrix
