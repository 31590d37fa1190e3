"""The public functions: linear attentions of token rows and of packed images.

They are one operation, out_i = g(z_i)·φ(q_i)·S + f(z_i)·v̄ with z_i = s·φ(q_i)·k̄. S is the scaled covariance of keys
and values, k̄ and v̄ are their means. `normalization` chooses g and f. Inputs are checked and defaults filled in here,
before a backend is called.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backends, reference
from .backends import Backend, fused
from .checks import (
    PACKED_ROWS,
    ROWS,
    check_cu_seqlens,
    check_grid,
    check_local,
    check_local_weight,
    check_mask,
    check_one_query,
    check_prefix,
    check_qkv,
    check_rows,
    check_token_weight,
    default_scale,
    hint_at_order,
    shape_of,
)
from .feature_maps import FEATURE_MAPS, FeatureMap, get_feature_map
from .local import Grid, LocalSource, local_sum
from .local_weight import make_local_weight
from .projections import unstack
from .reference import masked_mean, mean_of_rows, zero_absent

Normalization = Literal["divide", "subtract", "magnitude"]
NORMALIZATIONS = get_args(Normalization)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalization: Normalization = "divide",
    feature_map: str = "relu",
    scale: float | None = None,
    token_weight: Tensor | None = None,
    query_offset: Tensor | None = None,
    local_weight: Tensor | None = None,
    grid: Grid | None = None,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The family of linear attentions: vanilla, InLine, MALA, and their forms with weighted tokens.

    With a_ij = φ(q_i)·φ(k_j), N tokens and the scale s, the weight of query i on token j is

    | normalization | weight | known as |
    |---|---|---|
    | divide | a_ij / (Σ_t a_it + 1e-6) | vanilla linear attention |
    | subtract | (s/N)·a_ij − (s/N²)·Σ_t a_it + 1/N | InLine attention, see `inline_attention` |
    | magnitude | (1 + 1/z_i)·(s/N)·a_ij − z_i/N with z_i = (s/N)·Σ_t a_it | MALA |

    The matrix of weights is never formed, and the cost is linear in N. Sums are taken in at least float32.

    Args:
        q: queries (B, Nq, heads, d). Any strides: views into a qkv projection's output need no copy.
        k: keys (B, N, heads, d).
        v: values (B, N, heads, e). e may differ from d.
        normalization: "divide", "subtract" or "magnitude".
        feature_map: φ, applied to q and k: "relu", "identity", "leaky_relu" (slope 0.01), "exp" (of 0.2·x),
            "elu_plus_one", or "signed_halves" (the positive and the negative part, 2·d features).
        scale: s; the 1/N is inside. Default d^-1/2. "divide" does not depend on it. MALA's paper has s = N.
        token_weight: (B, N, heads), finite and non-negative, which is not checked: a GPU would have to be waited for.
            How much each key counts in all sums. Only the proportions matter, as the weights are divided by their sum.
            Gradients flow to them. Default: all keys count the same.
        query_offset: (B, 1, heads, d), subtracted from the queries before φ. With "subtract" alone.
        local_weight: as for `inline_attention`, here and below.
        grid: (height, width) of the token map.
        num_prefix_tokens: tokens before the map.
        token_mask: (B, N) bool, True for a key that is present.
        query_mask: (B, Nq) bool, True for a query that is present.
        backend: "auto", "reference" or "triton".

    Returns:
        (B, Nq, heads, e) in q's dtype.
    """
    return _attention_of_rows(
        q,
        k,
        v,
        normalization=normalization,
        feature_map=feature_map,
        scale=scale,
        token_weight=token_weight,
        query_offset=query_offset,
        local_weight=local_weight,
        grid=grid,
        num_prefix_tokens=num_prefix_tokens,
        token_mask=token_mask,
        query_mask=query_mask,
        backend=backend,
    )


def linear_attention_projected(
    *projections: Tensor,
    normalization: Normalization = "divide",
    feature_map: str = "relu",
    scale: float | None = None,
    token_weight: Tensor | None = None,
    query_offset: Tensor | None = None,
    local_weight: Tensor | LocalSource | None = None,
    grid: Grid | None = None,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`linear_attention` of the outputs of projections.

    The kernels write the gradients of q, k and v in the layout of the projections. With separate q, k and v, autograd
    has to copy their gradients into one tensor.

    Args:
        projections: tensors (B, N, m, heads, d) that together hold q, k and v, in this order: one qkv with m = 3, or
            q with m = 1 and kv with m = 2.
        local_weight: (B, heads, e, 9), or a `LocalSource`, what it is made from. In inference the attention's kernel
            makes it for short sequences.

    The other arguments and the result are those of `linear_attention`.
    """
    return _attention_of_projections(
        projections,
        normalization=normalization,
        feature_map=feature_map,
        scale=scale,
        token_weight=token_weight,
        query_offset=query_offset,
        local_weight=local_weight,
        grid=grid,
        num_prefix_tokens=num_prefix_tokens,
        token_mask=token_mask,
        query_mask=query_mask,
        backend=backend,
    )


def linear_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | Sequence[int],
    grids: Sequence[Grid] | None = None,
    normalization: Normalization = "divide",
    feature_map: str = "relu",
    scale: float | None = None,
    local_weight: Tensor | None = None,
    num_prefix_tokens: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """`linear_attention` of images of different sizes laid end to end. Each image attends to itself alone.

    Args:
        q: (T, heads, d), T the tokens of all images together.
        k: (T, heads, d)
        v: (T, heads, e)
        cu_seqlens: (images + 1,) integers from 0 to T, the first token of each image. The host reads them. A list or a
            CPU tensor costs nothing; for a tensor on a GPU the host waits. With a list, torch.compile makes one graph
            per layout. With a tensor, it breaks the graph.
        grids: (height, width) of each image's token map. Needed for local_weight, and checked in any case.
        normalization: as for `linear_attention`, here and below.
        feature_map: φ.
        scale: s.
        local_weight: (images, heads, e, 9).
        num_prefix_tokens: tokens before the map, in every image.
        backend: "auto", "reference" or "triton".

    Returns:
        (T, heads, e)
    """
    check_qkv(q, k, v, layout=PACKED_ROWS)
    if q.shape != k.shape:
        raise ValueError(f"q has shape {shape_of(q)}; packed queries and keys are the same tokens, {shape_of(k)}")
    return _attention(
        [x[None, :, None] for x in (q, k, v)],
        [x[None] for x in (q, k, v)],
        normalization=normalization,
        feature_map=feature_map,
        scale=scale,
        local_weight=local_weight,
        grids=grids,
        num_prefix_tokens=num_prefix_tokens,
        backend=backend,
        bounds=check_cu_seqlens(cu_seqlens, total=q.shape[0]),
    )[0]


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
        feature_map: φ, applied to q and k, as for `linear_attention`.
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
    return _attention_of_rows(
        q,
        k,
        v,
        normalization="subtract",
        feature_map=feature_map,
        scale=scale,
        local_weight=local_weight,
        grid=grid,
        num_prefix_tokens=num_prefix_tokens,
        token_mask=token_mask,
        query_mask=query_mask,
        backend=backend,
    )


def inline_attention_projected(
    *projections: Tensor,
    feature_map: str = "identity",
    scale: float | None = None,
    local_weight: Tensor | LocalSource | None = None,
    grid: Grid | None = None,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`inline_attention` of the outputs of projections, as `linear_attention_projected` takes them."""
    return linear_attention_projected(
        *projections,
        normalization="subtract",
        feature_map=feature_map,
        scale=scale,
        local_weight=local_weight,
        grid=grid,
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
    """`inline_attention` of images of different sizes laid end to end, as `linear_attention_packed` takes them."""
    return linear_attention_packed(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        grids=grids,
        normalization="subtract",
        feature_map=feature_map,
        scale=scale,
        local_weight=local_weight,
        num_prefix_tokens=num_prefix_tokens,
        backend=backend,
    )


def tangent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    anchor: Tensor | None = None,
    scale: float | None = None,
    local_weight: Tensor | None = None,
    grid: Grid | None = None,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The first-order expansion of softmax attention around one query, the anchor. Its cost is linear in N.

    Softmax attention is a function of the query, o(q) = Σ_j softmax_j(s·q·k_j)·v_j. With p = softmax(s·a·k) at the
    anchor a, its value there is the p-weighted mean of the values, and its derivative the scaled p-weighted covariance
    of keys and values. So this is `linear_attention` with normalization "subtract", φ the identity, the weights p and
    the offset a, in one operation. The error grows with the square of a query's distance from the anchor. Around
    a = 0 it is InLine attention.

    Args:
        q: (B, Nq, heads, d)
        k: (B, N, heads, d)
        v: (B, N, heads, e)
        anchor: (B, 1, heads, d). Default: the mean of the queries that are present.

    The other arguments and the result are those of `inline_attention`.
    """
    return _attention_of_rows(
        q,
        k,
        v,
        normalization="subtract",
        feature_map="identity",
        scale=scale,
        anchored=True,
        anchor=anchor,
        local_weight=local_weight,
        grid=grid,
        num_prefix_tokens=num_prefix_tokens,
        token_mask=token_mask,
        query_mask=query_mask,
        backend=backend,
    )


def tangent_attention_projected(
    *projections: Tensor,
    anchor: Tensor | None = None,
    scale: float | None = None,
    local_weight: Tensor | None = None,
    grid: Grid | None = None,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`tangent_attention` of the outputs of projections, as `linear_attention_projected` takes them."""
    return _attention_of_projections(
        projections,
        normalization="subtract",
        feature_map="identity",
        scale=scale,
        anchored=True,
        anchor=anchor,
        local_weight=local_weight,
        grid=grid,
        num_prefix_tokens=num_prefix_tokens,
        token_mask=token_mask,
        query_mask=query_mask,
        backend=backend,
    )


def _attention_of_rows(q: Tensor, k: Tensor, v: Tensor, *, grid: Grid | None, **options: Any) -> Tensor:
    check_qkv(q, k, v, layout=ROWS)
    hint_at_order(q, k)
    grids = None if grid is None else [grid]
    return _attention([x.unsqueeze(2) for x in (q, k, v)], (q, k, v), grids=grids, **options)


def _attention_of_projections(projections: Sequence[Tensor], *, grid: Grid | None, **options: Any) -> Tensor:
    if any(x.ndim != 5 for x in projections) or sum(x.shape[2] for x in projections) != 3:
        shapes = ", ".join(str(shape_of(x)) for x in projections)
        raise ValueError(
            f"the projections have shapes {shapes}; expected (B, N, m, heads, d), the m of all adding up to 3"
        )
    q, k, v = unstack(projections)
    check_qkv(q, k, v, layout=ROWS)
    return _attention(projections, (q, k, v), grids=None if grid is None else [grid], **options)


def _attention(
    projections: Sequence[Tensor],
    qkv: Sequence[Tensor],
    *,
    normalization: Normalization,
    feature_map: str,
    scale: float | None,
    token_weight: Tensor | None = None,
    query_offset: Tensor | None = None,
    anchored: bool = False,
    anchor: Tensor | None = None,
    local_weight: Tensor | LocalSource | None,
    grids: Sequence[Grid] | None,
    num_prefix_tokens: int,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: Backend,
    bounds: Sequence[int] | None = None,
) -> Tensor:
    """What all functions share: the checks, the defaults and the choice of a backend.

    Args:
        projections: q, k and v as `linear_attention_projected` takes them; for a packed batch B is 1.
        qkv: the same as three tensors (B, N, heads, d).
        anchored: for tangent attention. The token weights are the softmax of the anchor's scores, and the anchor is
            the query offset.
        anchor: (B, 1, heads, d). Default: the mean of the queries that are present.
        grids: one (height, width), or one for each packed image.
        bounds: of a packed batch: the first token of each image, and the number of all tokens at the end.
    """
    q, k, v = qkv
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r} is unknown; expected one of {', '.join(NORMALIZATIONS)}")
    if query_offset is not None and normalization != "subtract":
        raise ValueError(f"query_offset belongs to normalization='subtract', not to {normalization!r}")
    check_mask("token_mask", token_mask, k)
    check_mask("query_mask", query_mask, q)
    check_token_weight(token_weight, k)
    check_one_query("query_offset", query_offset, q)
    check_one_query("anchor", anchor, q)
    check_local(
        local_weight,
        q,
        v,
        grids=grids,
        lengths=[k.shape[1]] if bounds is None else _lengths(bounds),
        num_prefix_tokens=num_prefix_tokens,
        packed=bounds is not None,
    )
    if anchored and anchor is None:
        anchor = mean_of_rows(q, query_mask)

    def make(source: LocalSource) -> Tensor:
        return make_local_weight(masked_mean(source.x, token_mask), *source[1:], backend=backend)

    phi = get_feature_map(feature_map)
    scale = default_scale(q, scale)
    if normalization == "divide":
        scale = 1.0  # it cancels
    if token_weight is not None:
        token_weight = reference.normalised_weight(token_weight, token_mask)
    inputs = reference.Inputs(
        q,
        k,
        v,
        token_weight=token_weight,
        query_offset=anchor if anchored else query_offset,
        token_mask=token_mask,
        query_mask=query_mask,
    )
    options: dict[str, Any] = dict(normalization=normalization, scale=scale, num_prefix_tokens=num_prefix_tokens)
    features, values = phi.expansion * q.shape[-1], v.shape[-1]
    if backends.choose(backend, q, why_not=lambda: fused.why_not_widths(features, values, q.device)) == "triton":
        return _by_kernel(
            projections, inputs, local_weight, phi, grids, bounds, anchored=anchored, make=make, **options
        )
    if isinstance(local_weight, LocalSource):
        local_weight = make(local_weight)
    if anchor is not None:
        inputs = inputs._replace(token_weight=reference.anchor_weight(anchor, k, token_mask, scale))
    return _by_reference(inputs._replace(local_weight=local_weight), grids, bounds, feature_map=phi, **options)


def _by_kernel(
    projections: Sequence[Tensor],
    inputs: reference.Inputs,
    local_weight: Tensor | LocalSource | None,
    phi: FeatureMap,
    grids: Sequence[Grid] | None,
    bounds: Sequence[int] | None,
    **options: Any,
) -> Tensor:
    q, k, v, _, token_weight, query_offset, token_mask, query_mask = inputs
    if phi.kernel is None:  # φ before the kernels, on zeros where a token is absent
        offset = 0 if query_offset is None else query_offset
        projections = [
            phi.apply(zero_absent(q - offset, query_mask)).to(q.dtype).unsqueeze(2),
            phi.apply(zero_absent(k, token_mask)).unsqueeze(2),
            v.unsqueeze(2),
        ]
        phi, query_offset = FEATURE_MAPS["identity"], None
    sequences = None
    if bounds is None:
        sizes = [(1, 1)] if grids is None else list(grids)
    else:
        lengths = _lengths(bounds)
        sizes = [(1, length) for length in lengths] if grids is None else list(grids)
        rows = [(start, n, *size) for start, n, size in zip(bounds[:-1], lengths, sizes, strict=True)]
        sequences = _to_device(rows, q.device)
        if local_weight is None:
            sizes = [(1, max(lengths))]
    return fused.attention(
        projections,
        local_weight,
        token_mask,
        query_mask,
        sequences,
        token_weight,
        query_offset,
        feature_map=phi.kernel,
        grids=sizes,
        **options,
    )


def _by_reference(
    inputs: reference.Inputs, grids: Sequence[Grid] | None, bounds: Sequence[int] | None, **options: Any
) -> Tensor:
    if bounds is None:
        return reference.attention(inputs, grid=None if grids is None else grids[0], **options)
    q, k, v, local_weight, *_ = inputs  # images that are packed have nothing else
    outs = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        own = slice(start, end)
        weight = None if local_weight is None else local_weight[i : i + 1]
        tensors = reference.Inputs(q[:, own], k[:, own], v[:, own], weight)
        outs.append(reference.attention(tensors, grid=None if grids is None else grids[i], **options))
    return torch.cat(outs, dim=1)


def _lengths(bounds: Sequence[int]) -> list[int]:
    """The tokens of each packed image"""
    return [end - start for start, end in pairwise(bounds)]


def _to_device(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """A tensor on the device, made without waiting for queued work."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(rows, device=device)
    if torch.cuda.is_current_stream_capturing():
        # A replay would read the host's memory again, which is freed below. A number that fills a tensor is recorded.
        numbers = [torch.full((), number, device=device) for row in rows for number in row]
        return torch.stack(numbers).view(len(rows), -1)
    return torch.tensor(rows, pin_memory=True).to(device, non_blocking=True)


def local_residual(
    v: Tensor,
    local_weight: Tensor,
    *,
    grid: Grid,
    num_prefix_tokens: int = 0,
    token_mask: Tensor | None = None,
) -> Tensor:
    """The local residual alone, for attentions that do not fuse it. Arguments are those of `inline_attention`.

    v (B, N, heads, d), local_weight (B, heads, d, 9) → (B, N, heads, d) in v's dtype, zeros for prefix tokens. Queries
    and keys are the same tokens here, so absent tokens are zero too.
    """
    check_rows("v", v, layout=ROWS)
    check_prefix(num_prefix_tokens)
    check_grid(grid, tokens=v.shape[1], num_prefix_tokens=num_prefix_tokens)
    check_local_weight(local_weight, v, images=v.shape[0])
    check_mask("token_mask", token_mask, v)
    dtype = reference.accumulation_dtype(v.dtype)
    v_map = zero_absent(v.to(dtype), token_mask)[:, num_prefix_tokens:].unflatten(1, grid).flatten(3)
    out = local_sum(v_map, local_weight.to(dtype).flatten(1, 2)).flatten(1, 2).unflatten(2, shape_of(v)[2:])
    out = F.pad(out, (0, 0, 0, 0, num_prefix_tokens, 0))
    return zero_absent(out, token_mask).to(v.dtype)
