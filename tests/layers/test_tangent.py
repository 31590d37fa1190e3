"""The tangent of softmax against its definition, token by token."""

from typing import Any

import pytest
import torch
from token_by_token import (
    DIM,
    GRID,
    HEADS,
    N,
    build,
    by_definition,
    every_mask,
    every_residual,
    tangent_at,
    tangent_row,
    tokens,
)
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F

from inline_attention.layers import TangentAttention
from inline_attention.layers.tangent import expand_at_anchors, find_anchors
from inline_attention.ops import tangent_attention
from inline_attention.ops.projections import unstack


def row_by_cluster(module: Any, queries: list[Tensor], keys: list[Tensor], i: int) -> list[Tensor]:
    m = module.anchors
    mean: Any = sum(queries) / len(queries)
    anchors = [min(queries, key=lambda q: float((q - mean).norm()))]
    while len(anchors) < m:
        anchors.append(max(queries, key=lambda q: min(float((q - a).norm()) for a in anchors)))

    def nearest(q: Tensor) -> int:
        return min(range(m), key=lambda c: float((q - anchors[c]).norm()))

    for _ in range(2):
        chosen = [nearest(q) for q in queries]
        for c in range(m):
            own = [q for q, x in zip(queries, chosen, strict=True) if x == c]
            if own:
                anchors[c] = sum(own) / len(own)  # type: ignore[assignment]
    return tangent_at(anchors[nearest(queries[i])], queries[i], keys)


@every_residual
@every_mask
@pytest.mark.parametrize("fused_qkv", [True, False])
def test_definition(fused_qkv: bool, mask: Tensor | None, residual: bool) -> None:
    module = build("tangent", local_residual=residual, fused_qkv=fused_qkv)
    with torch.no_grad():
        expected = by_definition(module, tokens(), tangent_row, mask)
        out = module(tokens(), GRID, token_mask=mask)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


@every_residual
@every_mask
@pytest.mark.parametrize("anchors", [2, 5])
def test_tangents_at_several_anchors(anchors: int, mask: Tensor | None, residual: bool) -> None:
    module = build("tangent", anchors=anchors, local_residual=residual)
    with torch.no_grad():
        expected = by_definition(module, tokens(), row_by_cluster, mask)
        out = module(tokens(), GRID, token_mask=mask)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_an_adapter_of_the_projection_moves_the_anchor_too() -> None:
    """The adapter adds to the projection's output, as LoRA does."""
    module = build("tangent")
    adapter = nn.Linear(DIM, 3 * DIM, bias=False).double()
    module.qkv.register_forward_hook(lambda _, args, out: out + adapter(args[0]))
    out = module(tokens(), GRID)
    q, k, v = unstack(module.project(tokens(), GRID))
    expected = module.proj(tangent_attention(q, k, v).flatten(2))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_the_anchor_is_the_mean_of_the_queries_that_an_adapter_made() -> None:
    """Its dropout would draw other numbers for the mean token."""

    class Adapter(nn.Module):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear, self.calls = linear, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return F.dropout(self.linear(x))

    module = build("tangent")
    module.qkv = Adapter(module.qkv)
    torch.manual_seed(1)
    out = module(tokens(), GRID)
    assert module.qkv.calls == 1
    torch.manual_seed(1)
    q, k, v = unstack(module.project(tokens(), GRID))
    torch.testing.assert_close(out, module.proj(tangent_attention(q, k, v).flatten(2)), atol=1e-12, rtol=1e-12)


def test_an_anchor_for_every_query_is_softmax() -> None:
    softmax, module = build("softmax"), build("tangent", anchors=N)
    torch.testing.assert_close(module(tokens(), GRID), softmax(tokens(), GRID), atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_more_anchors_are_nearer_to_softmax() -> None:
    def output(kind: str, **options: Any) -> Tensor:
        module = build(kind, **options)
        module.qkv.weight.div_(2)  # scores of order one
        return module(tokens(), GRID)

    softmax = output("softmax")
    tangents = [output("tangent", anchors=m) for m in (1, 4, 10)]
    errors = [(out - softmax).norm() for out in (output("inline", local_residual=False), *tangents)]
    assert errors == sorted(errors, reverse=True)


def test_the_error_falls_with_the_square_of_the_distance() -> None:
    """Queries at half the distance from their mean: a quarter of the error."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(1, 1, 2, 4, generator=generator, dtype=torch.float64)
    away, k, v = (torch.randn(1, 9, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    away = away - away.mean(1, keepdim=True)
    errors = []
    for distance in (1 / 64, 1 / 128):
        q = mean + distance * away
        softmax = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        errors.append((tangent_attention(q, k, v) - softmax).norm())
    assert 3.8 < errors[0] / errors[1] < 4.2


@pytest.mark.parametrize("anchors", [1, 3])
def test_gradients_of_tangents(anchors: int) -> None:
    """Those of all parameters; the choice of anchors does not change in a small neighbourhood."""
    module = build("tangent", anchors=anchors, local_residual=True)
    parameters = dict(module.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x, GRID))

    inputs = (tokens().requires_grad_(), *(p.detach().clone().requires_grad_() for p in parameters.values()))
    assert gradcheck(call, inputs, fast_mode=True)


def test_anchors_when_there_are_fewer_queries() -> None:
    module = build("tangent", anchors=4)
    mask = torch.zeros(2, N, dtype=torch.bool)
    mask[0, [3, 7]] = True
    out = module(tokens(), GRID, token_mask=mask)
    softmax = build("softmax")
    expected = softmax(tokens()[:1, [3, 7]], (1, 1))
    torch.testing.assert_close(out[:1, [3, 7]], expected, atol=1e-12, rtol=1e-12)
    assert torch.equal(out[1], module.proj.bias.expand_as(out[1]))


def test_absent_queries_may_hold_anything() -> None:
    """Wherever the queries come from: those of the module are finite."""
    q = torch.randn(2, 9, HEADS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.7

    def expand(q: Tensor) -> Tensor:
        options: Any = dict(token_mask=mask, query_mask=mask)
        return expand_at_anchors(lambda a: tangent_attention(q, q, q, anchor=a, **options), q, mask, count=2)

    expected = expand(q)
    for garbage in (torch.nan, torch.inf):
        torch.testing.assert_close(expand(q.masked_fill(~mask[:, :, None, None], garbage)), expected)


def test_anchors_of_separate_clusters_are_their_means() -> None:
    """Far from zero, where products of queries and anchors differ in their last digits."""
    generator = torch.Generator().manual_seed(0)
    centres = 1000 + torch.tensor([[0.0, 0.0], [0.0, 8.0], [8.0, 0.0]])
    q = (centres[:, None] + torch.randn(3, 20, 2, generator=generator)).flatten(0, 1)
    anchors, nearest = find_anchors(q, None, count=3)
    labels = nearest.unflatten(0, (3, 20))
    assert sorted(labels[:, 0].tolist()) == [0, 1, 2]
    assert torch.equal(labels, labels[:, :1].expand(-1, 20))
    torch.testing.assert_close(anchors[labels[:, 0]], q.unflatten(0, (3, 20)).mean(1))


def test_a_query_unlike_the_others_gets_an_anchor_of_its_own() -> None:
    """The query of a class token is such a query."""
    q = torch.cat([torch.full((1, 4), 9.0), torch.randn(40, 4, generator=torch.Generator().manual_seed(0))])
    anchors, nearest = find_anchors(q, None, count=2)
    assert (nearest == nearest[0]).sum() == 1
    torch.testing.assert_close(anchors[nearest[0]], q[0])


def test_errors() -> None:
    with pytest.raises(ValueError, match="anchors=0; expected 1 or more"):
        TangentAttention(DIM, HEADS, anchors=0)
    with pytest.raises(ValueError, match="feature_map='relu': TangentAttention expands"):
        TangentAttention(DIM, HEADS, feature_map="relu")
    with pytest.raises(ValueError, match="feature_map='relu_affine': TangentAttention"):
        TangentAttention(DIM, HEADS, feature_map="relu_affine")
