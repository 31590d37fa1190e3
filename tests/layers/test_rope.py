"""Rotary positions against their definition, token by token."""

import math
from typing import Any

import pytest
import torch
from token_by_token import (
    GRID,
    HEADS,
    PREFIX,
    D,
    N,
    build,
    elu_plus_one,
    every_mask,
    every_residual,
    finish,
    tangent_row,
    tokens,
)
from torch import Tensor
from torch.nn import functional as F

from inline_attention.layers import ATTENTIONS
from inline_attention.layers.rope import rotate
from inline_attention.ops.projections import unstack


def turned(x: Tensor, i: int) -> Tensor:
    """One vector (d,) of token i, pair by pair"""
    if i < PREFIX:
        return x
    out = x.clone()
    for axis, position in enumerate(divmod(i - PREFIX, GRID[1])):
        for m in range(D // 4):
            angle = position * 10_000 ** (-4 * m / D)
            a, b = x[axis * D // 2 + 2 * m], x[axis * D // 2 + 2 * m + 1]
            out[axis * D // 2 + 2 * m] = a * math.cos(angle) - b * math.sin(angle)
            out[axis * D // 2 + 2 * m + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def test_rotation() -> None:
    x = tokens().unflatten(2, (HEADS, D))
    out = rotate(x, GRID, num_prefix_tokens=PREFIX)
    for b in range(2):
        for i in range(N):
            for h in range(HEADS):
                torch.testing.assert_close(out[b, i, h], turned(x[b, i, h], i), atol=1e-13, rtol=1e-13)


def test_products_of_turned_vectors_depend_on_the_offset() -> None:
    x = tokens(1).unflatten(2, (HEADS, D)).expand(-1, 12, -1, -1)
    on_map = rotate(x, GRID, num_prefix_tokens=0).unflatten(1, GRID)
    products = [(on_map[:, y, z] * on_map[:, y + 1, z + 2]).sum(-1) for y in range(2) for z in range(2)]
    for product in products:
        torch.testing.assert_close(product, products[0], atol=1e-12, rtol=1e-12)


def rotated_row(kind: str, q: list[Tensor], k: list[Tensor], places: list[int], i: int) -> list[Tensor]:
    """A row of weights by the table in OneCallAttention's docstring; `places` are the numbers of the tokens."""
    phi: Any = {"inline": lambda x: x, "linear": F.relu, "mala": elu_plus_one}[kind]
    n, s = len(k), D**-0.5
    a = [phi(q[i]).dot(phi(x)) for x in k]
    r = [turned(phi(q[i]), places[i]).dot(turned(phi(x), j)) for x, j in zip(k, places, strict=True)]
    if kind == "linear":
        return [x / (sum(a) + 1e-6) for x in r]
    if kind == "mala":
        z = s / n * sum(a)
        return [(1 + 1 / z) * s / n * x - z / n for x in r]
    return [s / n * x - s / n**2 * sum(r) + 1 / n for x in r]


@every_residual
@every_mask
@pytest.mark.parametrize("kind", ["inline", "linear", "mala", "tangent"])
def test_rope(kind: str, mask: Tensor | None, residual: bool) -> None:
    module = build(kind, rope=True, local_residual=residual)
    x = tokens()
    with torch.no_grad():
        q, k, v = unstack(module.project(x, GRID))
        present = torch.ones(2, N, dtype=torch.bool) if mask is None else mask
        out = torch.zeros_like(v)
        for b in range(2):
            own = present[b].nonzero()[:, 0].tolist()
            for h in range(HEADS):
                queries, keys = ([y[b, j, h] for j in own] for y in (q, k))
                for place, i in enumerate(own):
                    if kind == "tangent":
                        rows = [[turned(y, j) for y, j in zip(ys, own, strict=True)] for ys in (queries, keys)]
                        weights = tangent_row(module, *rows, place)
                    else:
                        weights = rotated_row(kind, queries, keys, own, place)
                    out[b, i, h] = sum(w * v[b, j, h] for w, j in zip(weights, own, strict=True))
        expected = finish(module, x, out, v, mask)
        torch.testing.assert_close(module(x, GRID, token_mask=mask), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "mala"])
def test_rope_where_nothing_turns(kind: str) -> None:
    """On a map of one token all angles are zero, and v̄'s factor is what it is without rope."""
    x = tokens(3)
    plain, rope = (build(kind, rope=rope, num_prefix_tokens=2) for rope in (False, True))
    torch.testing.assert_close(rope(x, (1, 1)), plain(x, (1, 1)), atol=1e-12, rtol=1e-12)


def test_errors() -> None:
    with pytest.raises(ValueError, match="heads of 6 channels are not a multiple of 4"):
        ATTENTIONS["mala"](12, 2, rope=True)
    with pytest.raises(ValueError, match="grid 1×1 with 0 prefix tokens makes 1 tokens, but there are 3"):
        ATTENTIONS["mala"](16, 2, rope=True)(torch.zeros(1, 3, 16), (1, 1))  # one position would serve all tokens
