"""Linear attentions written token by token: what the tests of layers compare the modules with."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.layers import ATTENTIONS
from inline_attention.ops import local_residual
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import masked_mean

GRID, PREFIX, DIM, HEADS = (3, 4), 1, 16, 2
N, D = PREFIX + 12, DIM // HEADS


def build(kind: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    module = ATTENTIONS[kind](DIM, HEADS, **{"num_prefix_tokens": PREFIX, **kwargs}).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def tokens(count: int = N, seed: int = 0) -> Tensor:
    return torch.randn(2, count, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_mask() -> Tensor:
    return torch.rand(2, N, generator=torch.Generator().manual_seed(4)) < 0.7


def elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def tangent_at(anchor: Tensor, query: Tensor, keys: list[Tensor]) -> list[Tensor]:
    s = D**-0.5
    exps = [(s * anchor.dot(k)).exp() for k in keys]
    p = [e / sum(exps) for e in exps]
    mean: Any = sum(x * k for x, k in zip(p, keys, strict=True))
    return [x * (1 + s * (query - anchor).dot(k - mean)) for x, k in zip(p, keys, strict=True)]


def tangent_row(module: Any, queries: list[Tensor], keys: list[Tensor], i: int) -> list[Tensor]:
    mean: Any = sum(queries) / len(queries)
    return tangent_at(mean, queries[i], keys)


def by_definition(module: Any, x: Tensor, row: Any, mask: Tensor | None) -> Tensor:
    """The output of the module, with the row of each query that is present from `row`

    `row` makes the weights of one query: (module, all queries of the head, keys, which query) → weights on the keys. It
    gets the queries and keys that are present.
    """
    q, k, v = unstack(module.project(x, GRID))
    present = torch.ones(2, N, dtype=torch.bool) if mask is None else mask
    out = torch.zeros_like(v)
    for b in range(2):
        own = present[b].nonzero()[:, 0].tolist()
        for h in range(HEADS):
            for place, i in enumerate(own):
                weights = row(module, [q[b, j, h] for j in own], [k[b, j, h] for j in own], place)
                out[b, i, h] = sum(w * v[b, j, h] for w, j in zip(weights, own, strict=True))
    return finish(module, x, out, v, mask)


def finish(module: Any, x: Tensor, out: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The output of the module from that of its attention: local residual, gate, mask, projection"""
    if module.local is not None:
        weight = module.local(masked_mean(x, mask))
        out = out + local_residual(v, weight, grid=GRID, num_prefix_tokens=PREFIX, token_mask=mask)
    if module.gate is not None:
        out = out * F.linear(x, module.gate.weight, module.gate.bias).view_as(out)
    if mask is not None:
        out = out * mask[:, :, None, None]
    return module.proj(out.flatten(2))


every_residual = pytest.mark.parametrize("residual", [False, True])
every_mask = pytest.mark.parametrize("mask", [None, some_mask()], ids=["whole", "masked"])
