"""MALA, RALA, PolaFormer, the tangent of softmax and rotary positions against their definitions, token by token."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F
from variants import build_variant

import inline_attention
from inline_attention.layers import ATTENTIONS, TangentAttention
from inline_attention.layers.family import find_anchors
from inline_attention.layers.rope import rotate
from inline_attention.layers.tokens import masked_mean
from inline_attention.models.profile import count_macs
from inline_attention.ops import local_residual, tangent_attention
from inline_attention.ops.projections import unstack

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


# A row of weights, for one query: (module, all queries of the head, keys, which query) → weights on the keys. Each
# function has the queries and keys that are present.


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


def tangent_at(anchor: Tensor, query: Tensor, keys: list[Tensor]) -> list[Tensor]:
    s = D**-0.5
    exps = [(s * anchor.dot(k)).exp() for k in keys]
    p = [e / sum(exps) for e in exps]
    mean: Any = sum(x * k for x, k in zip(p, keys, strict=True))
    return [x * (1 + s * (query - anchor).dot(k - mean)) for x, k in zip(p, keys, strict=True)]


def tangent(module: Any, queries: list[Tensor], keys: list[Tensor], i: int) -> list[Tensor]:
    mean: Any = sum(queries) / len(queries)
    return tangent_at(mean, queries[i], keys)


def tangent_by_cluster(module: Any, queries: list[Tensor], keys: list[Tensor], i: int) -> list[Tensor]:
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


ROWS: dict[str, Any] = {"mala": mala, "rala": rala, "tangent": tangent}


def by_definition(module: Any, x: Tensor, row: Any, mask: Tensor | None, *, token_mean: Tensor | None = None) -> Tensor:
    """The output of the module, with the row of each query that is present from `row`"""
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


@every_residual
@every_mask
@pytest.mark.parametrize("anchors", [2, 5])
def test_tangents_at_several_anchors(anchors: int, mask: Tensor | None, residual: bool) -> None:
    module = build("tangent", anchors=anchors, local_residual=residual)
    with torch.no_grad():
        expected = by_definition(module, tokens(), tangent_by_cluster, mask)
        out = module(tokens(), GRID, token_mask=mask)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


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


def test_an_adapter_of_the_projection_moves_the_anchor_too() -> None:
    """The adapter adds to the projection's output, as LoRA does."""
    module = build("tangent")
    adapter = nn.Linear(DIM, 3 * DIM, bias=False).double()
    module.qkv.register_forward_hook(lambda _, args, out: out + adapter(args[0]))
    out = module(tokens(), GRID)
    q, k, v = unstack(module.project(tokens(), GRID))
    expected = module.proj(tangent_attention(q, k, v).flatten(2))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


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


@pytest.mark.parametrize("variant", ["rala", "tangent with 3 anchors and rope"])
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
    with pytest.raises(ValueError, match="anchors=0; expected 1 or more"):
        TangentAttention(DIM, HEADS, anchors=0)
    with pytest.raises(ValueError, match="feature_map='relu': TangentAttention expands"):
        TangentAttention(DIM, HEADS, feature_map="relu")
    with pytest.raises(ValueError, match="feature_map='relu_affine': TangentAttention"):
        TangentAttention(DIM, HEADS, feature_map="relu_affine")
    with pytest.raises(ValueError, match="5 channels, from dim=10 and num_heads=2, are odd"):
        ATTENTIONS["polaformer"](10, 2)
    with pytest.raises(ValueError, match="heads of 6 channels are not a multiple of 4"):
        ATTENTIONS["mala"](12, 2, rope=True)


# Rotary positions


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
    """A row of weights by the table in FusedAttention's docstring; `places` are the numbers of the tokens."""
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
                        weights = tangent(module, *rows, place)
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
