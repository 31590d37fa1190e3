"""Attention matrices, O(N²), for analyses and tests."""

from typing import Literal

import torch
from torch import Tensor

from . import reference
from .checks import (
    ROWS,
    check_mask,
    check_one_query,
    check_over_pairs,
    check_qkv,
    check_token_weight,
    default_scale,
)
from .feature_maps import get_feature_map
from .reference import zero_absent

NORMALIZATION_OF = {"inline": "subtract", "linear": "divide", "mala": "magnitude"}


def attention_matrix(
    q: Tensor,
    k: Tensor,
    *,
    kind: Literal["inline", "linear", "mala", "softmax"] = "inline",
    feature_map: str = "identity",
    scale: float | None = None,
    token_weight: Tensor | None = None,
    query_offset: Tensor | None = None,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The matrix of attention weights, O(N²), for analyses and tests.

    Args:
        q: (B, Nq, heads, d)
        k: (B, N, heads, d)
        kind: "inline", "linear" and "mala" are the normalizations "subtract", "divide" and "magnitude" of
            `linear_attention`; "softmax".
        feature_map: φ, applied to q and k; for softmax too, so that a non-injective map before it can be studied.
        scale: s, default d^-1/2. "linear" does not depend on it.
        token_weight: (B, N, heads), as for `linear_attention`. Not for softmax.
        query_offset: (B, 1, heads, d), as for `linear_attention`. For "inline" alone.
        token_mask: (B, N) bool, True for a key that is present. Columns of absent keys are zero.
        query_mask: (B, Nq) bool, True for a query that is present. Rows of absent queries are zero.
        pair_mask: bool, broadcasts to (B, heads, Nq, N), False where a key is absent for one query. A row is computed
            over the keys that are present for it, and is zero where there are none.
        bias: floating-point, broadcasts to (B, heads, Nq, N). Added to softmax's scaled scores.

    Returns:
        (B, heads, Nq, N), at least float32. Weights of "inline" and "mala" may be negative.
    """
    if kind != "softmax" and kind not in NORMALIZATION_OF:
        names = ", ".join([*NORMALIZATION_OF, "softmax"])
        raise ValueError(f"kind={kind!r} is unknown; expected one of {names}")
    check_qkv(q, k, None, layout=ROWS)
    check_mask("token_mask", token_mask, k)
    check_mask("query_mask", query_mask, q)
    check_token_weight(token_weight, k)
    check_one_query("query_offset", query_offset, q)
    if token_weight is not None and kind == "softmax":
        raise ValueError("kind='softmax' has no token_weight; add the logarithm of the weights as a bias")
    if query_offset is not None and kind != "inline":
        raise ValueError(f"query_offset belongs to kind='inline', not to {kind!r}")
    present = pair_mask
    if pair_mask is not None:
        check_over_pairs("pair_mask", pair_mask, q, k)
        if pair_mask.dtype != torch.bool:
            raise ValueError(f"pair_mask is {pair_mask.dtype}; expected bool, False where a key is absent for a query")
    if token_mask is not None:
        tokens = token_mask[:, None, None, :]
        present = tokens if present is None else present & tokens
    if bias is not None:
        if kind != "softmax":
            raise ValueError(f"kind={kind!r} has no scores to add a bias to; only softmax has")
        check_over_pairs("bias", bias, q, k)
        if not bias.is_floating_point():
            raise ValueError(f"bias is {bias.dtype}; expected a floating-point tensor. A mask is a pair_mask")

    phi = get_feature_map(feature_map).apply
    s = default_scale(q, scale)
    if kind == "linear":
        s = 1.0  # it cancels
    dtype = reference.accumulation_dtype(q.dtype)
    with reference.without_autocast(q.device):
        # Zeros before the product: autograd would multiply a gradient of zero by what an absent token holds.
        q_ = q.to(dtype) if query_offset is None else q.to(dtype) - query_offset.to(dtype)
        q_, k_ = (phi(zero_absent(x, m)) for x, m in ((q_, query_mask), (k.to(dtype), token_mask)))
        scores = q_.transpose(1, 2) @ k_.permute(0, 2, 3, 1)  # (B, heads, Nq, N)
        if kind == "softmax":
            scores = s * scores if bias is None else s * scores + bias
            if present is not None:
                # Finite, because a row of −inf alone makes NaN, and gradients of NaN.
                scores = scores.masked_fill(~present, torch.finfo(scores.dtype).min)
            matrix = scores.softmax(-1)
        else:
            matrix = _linear_rows(s * scores, NORMALIZATION_OF[kind], s, token_weight, present)
        if present is not None:
            matrix = matrix.masked_fill(~present, 0)
        if query_mask is not None:
            matrix = matrix.masked_fill(~query_mask[:, None, :, None], 0)
        return matrix


def _linear_rows(
    products: Tensor, normalization: str, scale: float, token_weight: Tensor | None, present: Tensor | None
) -> Tensor:
    """`weighted_rows` over the keys that are present for each query: products s·a_ij (B, heads, Nq, N) → the same"""
    count: Tensor | int = products.shape[-1]
    shares = torch.ones_like(products[:, :, :1])
    if token_weight is not None:
        shares = token_weight.to(products.dtype).permute(0, 2, 1)[:, :, None]
    if present is not None:
        count = present.sum(-1, keepdim=True).clamp(min=1).to(products.dtype)
        shares = shares.masked_fill(~present, 0)
        products = products.masked_fill(~present, 0)
    total = shares.sum(-1, keepdim=True)
    shares = shares / total.where(total > 0, 1)
    return weighted_rows(products, shares, normalization=normalization, eps=scale * reference.LINEAR_EPS / count)


def weighted_rows(products: Tensor, shares: Tensor, *, normalization: str, eps: Tensor | float = 0.0) -> Tensor:
    """Rows of weights p_j·(g(z_i)·(s·a_ij − z_i) + f(z_i)) with z_i = Σ_j p_j·s·a_ij, as in `reference.factors`.

    Args:
        products: s·a_ij, (B, heads, Nq, N)
        shares: p_j, each token's share in all sums. Broadcasts to the products.
        eps: what "divide" adds to z.
    """
    z = (shares * products).sum(-1, keepdim=True)
    g, f = reference.factors(z, normalization, eps)
    return shares * (g * (products - z) + f)
