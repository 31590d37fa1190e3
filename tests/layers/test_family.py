"""MALA, RALA and PolaFormer against their definitions, token by token."""

from typing import Any

import pytest
import torch
from token_by_token import (
    DIM,
    GRID,
    HEADS,
    PREFIX,
    D,
    N,
    build,
    by_definition,
    elu_plus_one,
    every_mask,
    every_residual,
    finish,
    tokens,
)
from torch import Tensor
from variants import build_variant

import inline_attention
from inline_attention.layers import ATTENTIONS
from inline_attention.models.profile import count_macs
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import masked_mean


def mala(module: Any, queries: list[Tensor], keys: list[Tensor], i: int) -> list[Tensor]:
    n, s = len(keys), D**-0.5
    a = [s / n * elu_plus_one(queries[i]).dot(elu_plus_one(k)) for k in keys]
    total = sum(a)
    return [(1 + 1 / total) * x - total / n for x in a]


def rala(module: Any, queries: list[Tensor], keys: list[Tensor], i: int) -> list[Tensor]:
    mean = sum(queries) / len(queries)
    exps = [(D**-0.5 * mean.dot(k)).exp() for k in keys]  # type: ignore[union-attr]
    alpha = [len(keys) * e / sum(exps) for e in exps]
    a = [w * elu_plus_one(queries[i]).dot(elu_plus_one(k)) for w, k in zip(alpha, keys, strict=True)]
    return [x / (sum(a) + 1e-6) for x in a]


ROWS: dict[str, Any] = {"mala": mala, "rala": rala}


@every_residual
@every_mask
@pytest.mark.parametrize("fused_qkv", [True, False])
@pytest.mark.parametrize("kind", ROWS)
def test_definition(kind: str, fused_qkv: bool, mask: Tensor | None, residual: bool) -> None:
    module = build(kind, local_residual=residual, fused_qkv=fused_qkv)
    with torch.no_grad():
        expected = by_definition(module, tokens(), ROWS[kind], mask)
        out = module(tokens(), GRID, token_mask=mask)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


@every_residual
@every_mask
def test_polaformer(mask: Tensor | None, residual: bool) -> None:
    """Signs compared channel by channel."""
    module = build("polaformer", local_residual=residual)
    x = tokens()
    with torch.no_grad():
        q, k, v = unstack(module.project(x, GRID))
        present = torch.ones(2, N, dtype=torch.bool) if mask is None else mask
        power = (1 + 4 / (1 + (-module.power).exp())).view(HEADS, D)
        out = torch.zeros_like(v)
        for b in range(2):
            own = present[b].nonzero()[:, 0].tolist()
            for h in range(HEADS):
                for i in own:
                    same, opposite = {}, {}
                    for j in own:
                        products = q[b, i, h].abs() ** power[h] * k[b, j, h].abs() ** power[h]
                        agree = q[b, i, h].sign() == k[b, j, h].sign()
                        same[j], opposite[j] = products[agree].sum(), products[~agree].sum()
                    for part, half in ((same, slice(0, D // 2)), (opposite, slice(D // 2, D))):
                        total = sum(part.values()) + 1e-6
                        out[b, i, h, half] = sum(part[j] / total * v[b, j, h, half] for j in own)
        expected = finish(module, x, out, v, mask)
        torch.testing.assert_close(module(x, GRID, token_mask=mask), expected, atol=1e-12, rtol=1e-12)


@every_mask
def test_the_mean_query_is_that_of_the_mean_token(mask: Tensor | None) -> None:
    """This also holds if the local residual uses another mean, as in CSwin."""
    for kind in ("tangent", "rala"):
        for options in ({}, {"fused_qkv": False}, {"qkv_bias": False}):
            module = build(kind, **options)
            q = unstack(module.project(tokens(), GRID))[0].flatten(2)
            expected = masked_mean(q, mask).view(2, 1, HEADS, D)
            found = module.mean_query(masked_mean(tokens(), mask))
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    module = build("tangent")
    with_mean = module(tokens(), GRID, token_mask=mask, token_mean=tokens(2)[:, 0])
    assert torch.equal(with_mean, module(tokens(), GRID, token_mask=mask))


@pytest.mark.parametrize("variant", [pytest.param("rala", marks=pytest.mark.slow), "tangent with 3 anchors and rope"])
def test_one_graph(variant: str) -> None:
    """torch.compile breaks nothing apart, forward and backward."""
    torch._dynamo.reset()
    module = build_variant(variant, DIM, HEADS, num_prefix_tokens=PREFIX, local_residual=True).double()
    grads = []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        out = call(tokens(), GRID)
        grads.append(torch.autograd.grad(out.square().sum(), list(module.parameters())))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-10, rtol=1e-10)


# DeiT-T with 3 heads: millions of parameters, billions of multiply-accumulates; docs/attention.md has them.
@pytest.mark.parametrize(
    ("kind", "parameters", "macs"),
    [("mala", 5.7, 1.1), ("rala", 6.2, 1.2), ("polaformer", 6.2, 1.3), ("tangent", 5.7, 1.1)],
)
def test_cost_on_deit_tiny(kind: str, parameters: float, macs: float) -> None:
    with torch.device("meta"):
        model: Any = inline_attention.create_model("inline_deit_tiny", attention=kind, num_heads=3)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == parameters
    assert round(count_macs(model) / 1e9, 1) == macs


def test_errors() -> None:
    with pytest.raises(ValueError, match="5 channels, from dim=10 and num_heads=2, are odd"):
        ATTENTIONS["polaformer"](10, 2)
