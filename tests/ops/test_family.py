"""The family of linear attentions against its definition, written out token by token in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from inline_attention import attention_matrix, inline_attention
from inline_attention.ops import (
    FEATURE_MAPS,
    NORMALIZATIONS,
    linear_attention,
    linear_attention_packed,
    linear_attention_projected,
    tangent_attention,
    tangent_attention_projected,
)
from inline_attention.ops.feature_maps import get_feature_map

MASKS = [(), ("token_mask",), ("query_mask",), ("token_mask", "query_mask")]


def make(
    batch: int = 2, queries: int = 13, tokens: int = 13, heads: int = 3, d: int = 5, e: int = 5, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, queries, heads, d, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, tokens, heads, d, generator=generator, dtype=torch.float64)
    v = torch.randn(batch, tokens, heads, e, generator=generator, dtype=torch.float64)
    return q, k, v


def masks(names: tuple[str, ...], q: Tensor, k: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    every = {
        name: torch.rand(x.shape[:2], generator=generator) > 0.3 for name, x in (("token_mask", k), ("query_mask", q))
    }
    return {name: every[name] for name in names}


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalization: str,
    feature_map: str,
    scale: float,
    token_weight: Tensor | None = None,
    query_offset: Tensor | None = None,
    token_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """The papers' formulas, one query and one key at a time."""
    phi = get_feature_map(feature_map).apply
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b, h, i in itertools.product(range(q.shape[0]), range(q.shape[2]), range(q.shape[1])):
        if query_mask is not None and not query_mask[b, i]:
            continue
        keys = [j for j in range(k.shape[1]) if token_mask is None or token_mask[b, j]]
        n = len(keys)
        query = q[b, i, h] if query_offset is None else q[b, i, h] - query_offset[b, 0, h]
        a = [torch.dot(phi(query), phi(k[b, j, h])) for j in keys]
        w = [q.new_tensor(1.0) if token_weight is None else token_weight[b, j, h] for j in keys]
        share = [x / sum(w) for x in w]  # type: ignore[arg-type]
        row = sum(n * p * x for p, x in zip(share, a, strict=True))  # Σ, the row sum
        for j, p, x in zip(keys, share, a, strict=True):
            if normalization == "divide":
                weight = n * p * x / (row + 1e-6)
            elif normalization == "subtract":
                weight = p * (scale * x - scale * row / n + 1)
            else:  # β·a − γ of the scaled scores, β = 1 + 1/Σ and γ = Σ/N
                total = scale * row / n
                weight = p * ((1 + 1 / total) * scale * x - total) if total else p
            out[b, i, h] += weight * v[b, j, h]
    return out


def random_options(names: tuple[str, ...], q: Tensor, k: Tensor, *, weighted: bool) -> dict[str, Any]:
    options: dict[str, Any] = dict(masks(names, q, k), scale=0.7)
    if weighted:
        generator = torch.Generator().manual_seed(3)
        options["token_weight"] = torch.rand(*k.shape[:3], generator=generator, dtype=k.dtype)
    return options


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("names", MASKS)
@pytest.mark.parametrize("feature_map", ["relu", "elu_plus_one", "exp", "signed_halves"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_definition(normalization: Any, feature_map: str, names: tuple[str, ...], weighted: bool) -> None:
    q, k, v = make(queries=4, tokens=6, heads=2, d=3, e=4)
    options = random_options(names, q, k, weighted=weighted) | dict(
        normalization=normalization, feature_map=feature_map
    )
    out = linear_attention(q, k, v, **options)
    torch.testing.assert_close(out, token_by_token(q, k, v, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feature_map", ["identity", "relu"])
def test_query_offset(feature_map: str) -> None:
    q, k, v = make(queries=4, tokens=6, heads=2, d=3)
    options: dict[str, Any] = random_options(("token_mask",), q, k, weighted=True)
    options |= dict(normalization="subtract", feature_map=feature_map, query_offset=q.mean(1, keepdim=True))
    out = linear_attention(q, k, v, **options)
    torch.testing.assert_close(out, token_by_token(q, k, v, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("names", MASKS)
@pytest.mark.parametrize(
    ("kind", "normalization"), [("inline", "subtract"), ("linear", "divide"), ("mala", "magnitude")]
)
def test_attention_matrix(kind: Any, normalization: Any, names: tuple[str, ...], weighted: bool) -> None:
    q, k, v = make(queries=4, tokens=6, heads=2, d=3)
    options = random_options(names, q, k, weighted=weighted)
    if kind == "inline":
        options["query_offset"] = q.mean(1, keepdim=True)
    matrix = attention_matrix(q, k, kind=kind, feature_map="elu_plus_one", **options)
    expected = linear_attention(q, k, v, normalization=normalization, feature_map="elu_plus_one", **options)
    torch.testing.assert_close((matrix @ v.transpose(1, 2)).transpose(1, 2), expected, rtol=1e-12, atol=1e-12)
    if kind != "linear":  # which has its 1e-6
        rows = matrix.sum(-1)
        present = torch.ones_like(rows, dtype=torch.bool)
        if "query_mask" in options:
            present = options["query_mask"][:, None].expand_as(rows)
        torch.testing.assert_close(rows[present], torch.ones_like(rows[present]))


@pytest.mark.parametrize("names", MASKS)
@pytest.mark.parametrize("feature_map", ["elu_plus_one", "signed_halves"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_gradients(normalization: Any, feature_map: str, names: tuple[str, ...]) -> None:
    q, k, v = make(batch=2, queries=4, tokens=4, heads=2, d=2, e=3)
    weight = torch.rand(2, 4, 2, dtype=torch.float64) + 0.1
    offset = torch.randn(2, 1, 2, 2, dtype=torch.float64) if normalization == "subtract" else None
    local = torch.randn(2, 2, 3, 9, dtype=torch.float64)
    tensors = [x if x is None else x.requires_grad_() for x in (q, k, v, weight, offset, local)]
    options: dict[str, Any] = dict(normalization=normalization, feature_map=feature_map, grid=(2, 2))
    options |= masks(names, q, k)

    def call(*x: Any) -> Tensor:
        return linear_attention(*x[:3], token_weight=x[3], query_offset=x[4], local_weight=x[5], **options)

    assert gradcheck(call, tensors, fast_mode=True)
    assert gradgradcheck(call, tensors, fast_mode=True)


def test_gradients_of_the_tangent() -> None:
    q, k, v = (x.requires_grad_() for x in make(batch=1, queries=6, tokens=6, heads=2, d=3))
    mask = torch.tensor([[True, True, False, True, True, True]])
    for options in ({}, dict(token_mask=mask, query_mask=mask)):
        assert gradcheck(lambda *x, options=options: tangent_attention(*x, **options), (q, k, v))
        assert gradgradcheck(lambda *x, options=options: tangent_attention(*x, **options), (q, k, v), fast_mode=True)


def test_the_tangent_without_queries() -> None:
    """There is no mean query to expand around. The gradients of keys and values are zero."""
    q, k, v = (x.requires_grad_() for x in make())
    out = tangent_attention(q[:, :0], k, v)
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_absent_tokens_may_hold_anything(normalization: Any) -> None:
    """A mask is the weights' case of zeros and ones, and what is absent changes no output and no gradient."""
    q, k, v = make()
    mask = masks(("token_mask",), q, k)["token_mask"]
    options: dict[str, Any] = dict(normalization=normalization, feature_map="elu_plus_one")
    weight = torch.rand(*k.shape[:3], dtype=k.dtype)
    expected = linear_attention(q, k, v, token_weight=weight * mask[:, :, None], **options)
    k, v, weight = (x.masked_fill(~mask.view(*mask.shape, *(1,) * (x.ndim - 2)), torch.nan) for x in (k, v, weight))
    tensors = [x.requires_grad_() for x in (q, k, v, weight)]
    out = linear_attention(*tensors[:3], token_weight=weight, token_mask=mask, **options)
    # Not exact for "divide", whose 1e-6 is shared by the tokens present.
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_samples_without_tokens(normalization: Any) -> None:
    q, k, v = (x.requires_grad_() for x in make())
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1] = False
    out = linear_attention(q, k, v, normalization=normalization, token_mask=mask, query_mask=mask)
    assert (out[1] == 0).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))
    out = tangent_attention(q, k, v, token_mask=mask, query_mask=mask)
    assert (out[1] == 0).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_query_that_the_feature_map_erases() -> None:
    """φ(q) = 0: vanilla linear attention gives zero, the others the mean of the values."""
    q, k, v = make(batch=1)
    q = -q.abs()
    q.requires_grad_()
    mean = v.mean(1, keepdim=True).expand_as(v)
    for normalization, expected in (("divide", 0 * v), ("subtract", mean), ("magnitude", mean)):
        out = linear_attention(q, k, v, normalization=normalization)  # type: ignore[arg-type]
        torch.testing.assert_close(out, expected)
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert (grad == 0).all()


def test_mala_of_the_paper() -> None:
    """Weights β·a − γ without a scale, β = 1 + 1/Σ and γ = Σ/N: the scale is N."""
    q, k, v = make(batch=1, heads=1)
    phi = get_feature_map("elu_plus_one").apply
    a = phi(q[0, :, 0]) @ phi(k[0, :, 0]).T
    total = a.sum(-1, keepdim=True)
    expected = ((1 + 1 / total) * a - total / len(a)) @ v[0, :, 0]
    out = linear_attention(q, k, v, normalization="magnitude", feature_map="elu_plus_one", scale=len(a))
    torch.testing.assert_close(out[0, :, 0], expected)


def test_magnitude_is_inline_plus_linear_less_the_mean() -> None:
    q, k, v = make()
    options: dict[str, Any] = dict(feature_map="elu_plus_one")
    parts = inline_attention(q, k, v, **options) + linear_attention(q, k, v, **options) - v.mean(1, keepdim=True)
    torch.testing.assert_close(
        linear_attention(q, k, v, normalization="magnitude", **options), parts, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_projected_and_packed(normalization: Any, feature_map: str) -> None:
    q, k, v = make()
    options: dict[str, Any] = dict(normalization=normalization, feature_map=feature_map)
    expected = linear_attention(q, k, v, **options)
    torch.testing.assert_close(linear_attention_projected(torch.stack([q, k, v], 2), **options), expected)
    packed = linear_attention_packed(*(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens=[0, 13, 26], **options)
    torch.testing.assert_close(packed.view_as(expected), expected)


def softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def test_tangent_touches_softmax() -> None:
    """At the anchor it is softmax attention. Half the distance from there leaves a quarter of the error."""
    q, k, v = make(tokens=30, queries=30, d=8)
    anchor = q.mean(1, keepdim=True)
    errors = []
    for distance in (0, 0.04, 0.02, 0.01):
        near = anchor + distance * (q - anchor)
        out = tangent_attention(near, k, v, anchor=anchor, scale=0.5)
        errors.append((out - softmax(near, k, v, 0.5)).norm())
    assert errors[0] < 1e-13
    for larger, smaller in itertools.pairwise(errors[1:]):
        assert 3.8 < larger / smaller < 4.2


def test_tangent_around_zero_is_inline() -> None:
    q, k, v = make()
    out = tangent_attention(q, k, v, anchor=torch.zeros_like(q[:, :1]))
    torch.testing.assert_close(out, inline_attention(q, k, v))


def test_tangent_is_its_parts() -> None:
    q, k, v = make()
    mask = masks(("token_mask",), q, k)["token_mask"]
    options: dict[str, Any] = dict(token_mask=mask, query_mask=mask)
    anchor = torch.stack([x[m].mean(0) for x, m in zip(q, mask, strict=True)])[:, None]
    weight = (q.shape[-1] ** -0.5 * (anchor * k).sum(-1)).exp()
    expected = linear_attention(
        q, k, v, normalization="subtract", feature_map="identity", token_weight=weight, query_offset=anchor, **options
    )
    torch.testing.assert_close(tangent_attention(q, k, v, **options), expected)
    torch.testing.assert_close(tangent_attention_projected(torch.stack([q, k, v], 2), **options), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(normalization="sum"), "normalization='sum' is unknown; expected one of divide, subtract, magnitude"),
        (dict(query_offset=torch.zeros(2, 1, 3, 5)), "query_offset belongs to normalization='subtract'"),
        (dict(normalization="subtract", query_offset=torch.zeros(2, 3, 5)), r"expected \(B, 1, heads, d\)"),
        (dict(token_weight=torch.zeros(2, 13)), r"expected \(B, N, heads\) = \(2, 13, 3\)"),
        (dict(token_weight=torch.zeros(2, 13, 3, dtype=torch.int64)), "in floating point"),
        (dict(feature_map="softplus"), "feature_map='softplus' is unknown"),
        (dict(scale="a"), "scale='a'; expected a number"),  # "divide" does not use it
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_attention(*make(), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_half_precision(normalization: Any, dtype: torch.dtype) -> None:
    q, k, v = make(d=16, e=16)
    options: dict[str, Any] = dict(normalization=normalization, feature_map="elu_plus_one")
    rounded = [x.to(dtype) for x in (q, k, v)]
    out = linear_attention(*rounded, **options)
    assert out.dtype == dtype
    exact = linear_attention(*(x.double() for x in rounded), **options)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_activation_checkpointing() -> None:
    q, k, v = (x.requires_grad_() for x in make())
    expected = torch.autograd.grad(linear_attention(q, k, v).square().sum(), (q, k, v))
    out = checkpoint(linear_attention, q, k, v, use_reentrant=False)
    for grad, other in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(grad, other)


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
            outs = [linear_attention(q, k, v, normalization=normalization) for normalization in NORMALIZATIONS]
            return [*outs, tangent_attention(q, k, v)]

    tensors = make()
    program = torch.export.export(Module(), tensors)
    torch.testing.assert_close(program.module()(*tensors), Module()(*tensors))
