"""The public functions: InLine attention of token rows and of packed images, linear attention, and attention matrices.

Every function checks its inputs here. A backend gets tensors that fit together, and defaults that are filled in.
"""

import functools
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backends, reference
from .backends import Backend, fused
from .feature_maps import get_feature_map
from .local import TAPS, Grid, local_sum
from .projections import unstack
from .reference import LINEAR_EPS, zero_absent
from .tracing import is_exporting

ROWS = "(B, N, heads, d)"
PACKED_ROWS = "(T, heads, d)"


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _check_rows(name: str, x: Tensor, *, layout: str) -> None:
    if x.ndim != layout.count(",") + 1:
        raise ValueError(f"{name} has shape {_shape(x)}; expected {layout}")
    if not x.is_floating_point():
        raise ValueError(f"{name} is {x.dtype}; expected a floating-point tensor")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor | None, *, layout: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        _check_rows(name, x, layout=layout)
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; "
                "convert them to one dtype and device"
            )
    if v is not None and v.shape != k.shape:
        raise ValueError(f"v has shape {_shape(v)}; expected that of k, {_shape(k)}")
    if q.shape[-2:] != k.shape[-2:]:
        raise ValueError(
            f"q has (heads, d) = {_shape(q)[-2:]} but k has {_shape(k)[-2:]}; they must be equal. Rows are {layout}: "
            "use x.transpose(1, 2) for tensors in the order (B, heads, N, d) of scaled_dot_product_attention"
        )
    if k.ndim == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q is a batch of {q.shape[0]} but k of {k.shape[0]}; they must be equal")
    if k.shape[-3] == 0:
        raise ValueError(f"k has shape {_shape(k)}: no token to attend to")
    if k.shape[-1] == 0:
        raise ValueError(f"k has shape {_shape(k)}: heads of no channels; expected {layout} with d of 1 or more")


def _hint_at_order(q: Tensor, k: Tensor) -> None:
    """More heads than tokens are legal but rare, and tensors in the order of PyTorch's own attention look like that."""
    if torch.compiler.is_compiling() or is_exporting():
        return
    if q.shape[2] > q.shape[1] and k.shape[2] > k.shape[1]:
        _warn_of_order()


@functools.cache  # one warning a process
def _warn_of_order() -> None:
    warnings.warn(
        "q and k have more heads than tokens. Rows are (B, N, heads, d) here; if yours are (B, heads, N, d), as "
        "scaled_dot_product_attention takes them, pass x.transpose(1, 2), which copies nothing",
        UserWarning,
        stacklevel=4,
    )


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} but the tokens are on {device}; move it there")


def check_mask(name: str, mask: Tensor | None, x: Tensor) -> None:
    """Raises if a mask is not one over the tokens of x (B, N, …)."""
    if mask is None:
        return
    _check_device(name, mask, x.device)
    expected = _shape(x)[:2]
    if mask.shape == expected and mask.dtype == torch.bool:
        return
    what = f"{name} has shape {_shape(mask)} and dtype {mask.dtype}"
    if mask.ndim > 2 or (mask.ndim == 2 and mask.shape[-2] == mask.shape[-1] != expected[0]):
        raise ValueError(
            f"{what}; a mask over pairs of tokens is impossible for linear attention, whose queries share one state. "
            f"Pass a bool mask over tokens, (B, N) = {expected}, True where a token is present"
        )
    raise ValueError(f"{what}; expected bool (B, N) = {expected}, True where a token is present")


def _check_local_weight(local_weight: Tensor, v: Tensor, *, images: int) -> None:
    _check_device("local_weight", local_weight, v.device)
    expected = (images, *_shape(v)[-2:], TAPS)
    if local_weight.shape != expected or not local_weight.is_floating_point():
        raise ValueError(
            f"local_weight has shape {_shape(local_weight)} and dtype {local_weight.dtype}; "
            f"expected (B, heads, d, 9) = {expected}, one 3×3 kernel per channel, in floating point"
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


def _check_over_pairs(name: str, x: Tensor, q: Tensor, k: Tensor) -> None:
    """What is given for pairs of tokens broadcasts to (B, heads, Nq, N), and does not enlarge it."""
    _check_device(name, x, q.device)
    expected = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    sizes = zip(reversed(_shape(x)), reversed(expected), strict=False)
    if x.ndim > 4 or any(size not in (1, whole) for size, whole in sizes):
        raise ValueError(
            f"{name} has shape {_shape(x)}; expected one that broadcasts to (B, heads, Nq, N) = {expected}"
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
    query_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """InLine attention: linear in the number of tokens, its rows sum to one, and different queries get different rows.

    The weight of query i on token j is (s/N)·φ(q_i)·φ(k_j) − (s/N²)·Σ_t φ(q_i)·φ(k_t) + 1/N. The matrix of weights is
    never formed: the output is φ(q_i)·S + v̄, where S is the scaled covariance of keys and values. Sums are taken in at
    least float32. The kernels round the factors of products to the inputs' precision, and keep S in bfloat16 for
    bfloat16 inputs.

    Rows are (B, N, heads, d). `torch.nn.functional.scaled_dot_product_attention` takes (B, heads, N, d): transpose
    dimensions 1 and 2 of such tensors.

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
        token_mask: (B, N) bool, True for a key that is present. Absent keys and values count in no sum and are zero to
            the local residual. Default: all are present.
        query_mask: (B, Nq) bool, True for a query that is present. The output of an absent query is zero. Default: all
            are present. In self-attention, where queries and keys are the same tokens, pass the token mask here too.
        backend: "reference", plain PyTorch; "triton", fused kernels on a GPU; "auto", what `set_backend` says, and by
            default the kernels where they can run (an NVIDIA GPU with Triton, bfloat16, float16 or float32, heads of up
            to 128 channels), else the reference.

    Returns:
        (B, Nq, heads, d) in q's dtype.
    """
    _check_qkv(q, k, v, layout=ROWS)
    _hint_at_order(q, k)
    return _inline_attention(
        [x.unsqueeze(2) for x in (q, k, v)],
        (q, k, v),
        feature_map=feature_map,
        scale=scale,
        local_weight=local_weight,
        grids=None if grid is None else [grid],
        num_prefix_tokens=num_prefix_tokens,
        token_mask=token_mask,
        query_mask=query_mask,
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
    query_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`inline_attention` of the outputs of projections.

    The kernels write the gradients of q, k and v into tensors of the projections' layout. Given q, k and v one by one,
    autograd would have to copy their gradients together.

    Args:
        projections: tensors (B, N, m, heads, d) that hold q, k and v in this order, m of them each: one qkv of three,
            or q and kv of one and two.

    The other arguments and the result are those of `inline_attention`.
    """
    if any(x.ndim != 5 for x in projections) or sum(x.shape[2] for x in projections) != 3:
        shapes = ", ".join(str(_shape(x)) for x in projections)
        raise ValueError(f"the projections have shapes {shapes}; expected (B, N, m, heads, d), three m together")
    q, k, v = unstack(projections)
    _check_qkv(q, k, v, layout=ROWS)
    return _inline_attention(
        projections,
        (q, k, v),
        feature_map=feature_map,
        scale=scale,
        local_weight=local_weight,
        grids=None if grid is None else [grid],
        num_prefix_tokens=num_prefix_tokens,
        token_mask=token_mask,
        query_mask=query_mask,
        backend=backend,
    )


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
    """InLine attention of images of different sizes laid end to end. Each image attends to itself alone.

    Args:
        q: (T, heads, d), T the tokens of all images together.
        k: (T, heads, d)
        v: (T, heads, d)
        cu_seqlens: (images + 1,) integers from 0 to T, the first token of each image. They are read on the host, at no
            cost from a list or a CPU tensor; a tensor on a GPU makes the host wait for it. torch.compile makes one
            graph per layout from a list, and breaks the graph at a tensor.
        grids: (height, width) of each image's token map. Needed for local_weight, and checked whenever given.
        feature_map: as for `inline_attention`.
        scale: as for `inline_attention`.
        local_weight: (images, heads, d, 9).
        num_prefix_tokens: tokens before the map, in every image.
        backend: as for `inline_attention`.

    Returns:
        (T, heads, d)
    """
    _check_qkv(q, k, v, layout=PACKED_ROWS)
    if q.shape != k.shape:
        raise ValueError(f"q has shape {_shape(q)}; packed queries and keys are the same tokens, {_shape(k)}")
    return _inline_attention(
        [x[None, :, None] for x in (q, k, v)],
        [x[None] for x in (q, k, v)],
        feature_map=feature_map,
        scale=scale,
        local_weight=local_weight,
        grids=grids,
        num_prefix_tokens=num_prefix_tokens,
        token_mask=None,
        query_mask=None,
        backend=backend,
        bounds=_check_cu_seqlens(cu_seqlens, total=q.shape[0]),
    )[0]


def _inline_attention(
    projections: Sequence[Tensor],
    qkv: Sequence[Tensor],
    *,
    feature_map: str,
    scale: float | None,
    local_weight: Tensor | None,
    grids: Sequence[Grid] | None,
    num_prefix_tokens: int,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    backend: Backend,
    bounds: Sequence[int] | None = None,
) -> Tensor:
    """What all three functions share: the checks, the defaults and the choice of a backend.

    Args:
        projections: q, k and v as `inline_attention_projected` takes them; for a packed batch B is 1.
        qkv: the same as three tensors (B, N, heads, d).
        grids: one (height, width), or one for each packed image.
        bounds: of a packed batch, the first token of each image and the number of all.
    """
    q, k, v = qkv
    check_mask("token_mask", token_mask, k)
    check_mask("query_mask", query_mask, q)
    _check_prefix(num_prefix_tokens)
    lengths = [k.shape[1]] if bounds is None else [end - start for start, end in pairwise(bounds)]
    if grids is not None:
        if len(grids) != len(lengths):
            raise ValueError(f"there are {len(grids)} grids for {len(lengths)} images in cu_seqlens")
        for grid, tokens in zip(grids, lengths, strict=True):
            _check_grid(grid, tokens=tokens, num_prefix_tokens=num_prefix_tokens)
    if local_weight is not None:
        if grids is None:
            needed = "grid=(height, width)" if bounds is None else "grids, a (height, width) for each image"
            raise ValueError(f"local_weight needs {needed}: the token count does not say how the map is shaped")
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"local_weight needs queries on the map of v, but there are {q.shape[1]} queries and {k.shape[1]} keys"
            )
        _check_local_weight(local_weight, v, images=k.shape[0] if bounds is None else len(lengths))
    phi = get_feature_map(feature_map)
    scale = _default_scale(q, scale)
    no_kernel = None if phi.kernel is not None else f"the kernels do not have feature_map={feature_map!r}"
    # No nested function with annotations: torch.compile cannot trace one before 2.10.
    if backends.choose(backend, q, why_not=lambda: no_kernel) == "triton":
        sequences = None
        if bounds is None:
            sizes = [(1, 1)] if grids is None else list(grids)
        else:
            sizes = [(1, length) for length in lengths] if grids is None else list(grids)
            rows = [(start, n, *size) for start, n, size in zip(bounds[:-1], lengths, sizes, strict=True)]
            sequences = _to_device(rows, q.device)
            if local_weight is None:
                sizes = [(1, max(lengths))]
        assert phi.kernel is not None
        return fused.inline_attention(
            projections,
            local_weight,
            token_mask,
            query_mask,
            sequences,
            feature_map=phi.kernel,
            scale=scale,
            grids=sizes,
            num_prefix_tokens=num_prefix_tokens,
        )
    options: dict[str, Any] = dict(feature_map=phi, scale=scale, num_prefix_tokens=num_prefix_tokens)
    if bounds is None:
        options["grid"] = None if grids is None else grids[0]
        return reference.inline_attention(q, k, v, local_weight, token_mask, query_mask, **options)
    outs = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        own = slice(start, end)
        weight = None if local_weight is None else local_weight[i : i + 1]
        options["grid"] = None if grids is None else grids[i]
        outs.append(reference.inline_attention(q[:, own], k[:, own], v[:, own], weight, None, None, **options))
    return torch.cat(outs, dim=1)


def _to_device(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """As a tensor. The host does not wait for what the device is doing."""
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
    """The local residual alone, for attentions that do not fuse it. Arguments are those of `inline_attention`.

    v (B, N, heads, d), local_weight (B, heads, d, 9) → (B, N, heads, d) in v's dtype, zeros for prefix tokens and, as
    queries and keys are the same tokens here, for absent ones
    """
    _check_rows("v", v, layout=ROWS)
    _check_prefix(num_prefix_tokens)
    _check_grid(grid, tokens=v.shape[1], num_prefix_tokens=num_prefix_tokens)
    _check_local_weight(local_weight, v, images=v.shape[0])
    check_mask("token_mask", token_mask, v)
    dtype = reference.accumulation_dtype(v.dtype)
    v_map = zero_absent(v.to(dtype), token_mask)[:, num_prefix_tokens:].unflatten(1, grid).flatten(3)
    out = local_sum(v_map, local_weight.to(dtype).flatten(1, 2)).flatten(1, 2).unflatten(2, _shape(v)[2:])
    out = F.pad(out, (0, 0, 0, 0, num_prefix_tokens, 0))
    return zero_absent(out, token_mask).to(v.dtype)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "relu",
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Vanilla linear attention, φ(q_i)·(Σ_j φ(k_j)v_jᵀ) / (φ(q_i)·Σ_j φ(k_j) + 1e-6), the sums in at least float32.

    q (B, Nq, heads, d), k and v (B, N, heads, d), token_mask (B, N), query_mask (B, Nq) → (B, Nq, heads, d). Masks and
    the order of dimensions are those of `inline_attention`.
    """
    _check_qkv(q, k, v, layout=ROWS)
    check_mask("token_mask", token_mask, k)
    check_mask("query_mask", query_mask, q)
    _hint_at_order(q, k)
    return reference.linear_attention(q, k, v, token_mask, query_mask, feature_map=get_feature_map(feature_map))


def attention_matrix(
    q: Tensor,
    k: Tensor,
    *,
    kind: Literal["inline", "linear", "softmax"] = "inline",
    feature_map: str = "identity",
    scale: float | None = None,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The weights themselves, O(N²), for analysis and for tests.

    Args:
        q: (B, Nq, heads, d)
        k: (B, N, heads, d)
        kind: "inline"; "linear" (vanilla, divided by its row sum + 1e-6); "softmax".
        feature_map: φ, applied to q and k; for softmax too, so that a non-injective map before it can be studied.
        scale: s of inline and softmax, default d^-1/2.
        token_mask: (B, N) bool, True for a key that is present. Columns of absent keys are zero.
        query_mask: (B, Nq) bool, True for a query that is present. Rows of absent queries are zero.
        pair_mask: bool, broadcasts to (B, heads, Nq, N), False where a key is absent for one query. A row is computed
            over the keys that are present for it, and is zero where there are none.
        bias: floating-point, broadcasts to (B, heads, Nq, N). Added to softmax's scaled scores.

    Returns:
        (B, heads, Nq, N), at least float32. InLine's weights may be negative.
    """
    _check_qkv(q, k, None, layout=ROWS)
    check_mask("token_mask", token_mask, k)
    check_mask("query_mask", query_mask, q)
    phi = get_feature_map(feature_map).apply
    s = _default_scale(q, scale)
    dtype = reference.accumulation_dtype(q.dtype)
    present = pair_mask
    if pair_mask is not None:
        _check_over_pairs("pair_mask", pair_mask, q, k)
        if pair_mask.dtype != torch.bool:
            raise ValueError(f"pair_mask is {pair_mask.dtype}; expected bool, False where a key is absent for a query")
    if token_mask is not None:
        tokens = token_mask[:, None, None, :]
        present = tokens if present is None else present & tokens
    if bias is not None:
        if kind != "softmax":
            raise ValueError(f"kind={kind!r} has no scores to add a bias to; only softmax has")
        _check_over_pairs("bias", bias, q, k)
        if not bias.is_floating_point():
            raise ValueError(f"bias is {bias.dtype}; expected a floating-point tensor. A mask is a pair_mask")
    with reference.without_autocast(q.device):
        # Zeros before the product: autograd would multiply a gradient of zero by what an absent token holds.
        q_, k_ = (phi(zero_absent(x.to(dtype), m)) for x, m in ((q, query_mask), (k, token_mask)))
        scores = q_.transpose(1, 2) @ k_.permute(0, 2, 3, 1)  # (B, heads, Nq, N)
        if kind == "softmax":
            scores = s * scores if bias is None else s * scores + bias
            if present is not None:
                # Finite, because a row of −inf alone makes NaN, and gradients of NaN.
                scores = scores.masked_fill(~present, torch.finfo(scores.dtype).min)
            matrix = scores.softmax(-1)
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
        if query_mask is not None:
            matrix = matrix.masked_fill(~query_mask[:, None, :, None], 0)
        return matrix
