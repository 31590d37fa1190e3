"""Each linear attention of the comparison against its definition, written token by token."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from variants import VARIANTS, build_variant

import inline_attention
from inline_attention.layers import ATTENTIONS, Attention, FocusedAttention
from inline_attention.models.profile import count_macs

GRID, PREFIX, DIM, HEADS = (3, 4), 1, 8, 2
N, D = PREFIX + 12, DIM // HEADS


def build(kind: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = dict(num_prefix_tokens=PREFIX, grid=GRID) | kwargs
    module = build_variant(kind, DIM, HEADS, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def tokens(count: int = N, seed: int = 0) -> Tensor:
    return torch.randn(2, count, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, C) each"""
    q, k, v = module.qkv(x).split(DIM, dim=-1)
    return q, k, v


def heads(x: Tensor) -> list[Tensor]:
    return list(x.split(D, dim=-1))


def convolved(v: Tensor, filters: Tensor, bias: Tensor, *, side: int = 5) -> Tensor:
    """v (B, N, C) on the map with filters (C, side, side), by definition; zeros for the prefix token."""
    out = torch.zeros_like(v)
    reach = side // 2
    for y in range(GRID[0]):
        for x in range(GRID[1]):
            total = bias.expand(v.shape[0], -1).clone()
            for dy in range(-reach, reach + 1):
                for dx in range(-reach, reach + 1):
                    if 0 <= y + dy < GRID[0] and 0 <= x + dx < GRID[1]:
                        neighbour = v[:, PREFIX + (y + dy) * GRID[1] + x + dx]
                        total += filters[:, dy + reach, dx + reach] * neighbour
            out[:, PREFIX + y * GRID[1] + x] = total
    return out


def hydra(module: Any, x: Tensor) -> Tensor:
    q, k, v = split(module, x)
    out = torch.zeros_like(v)
    for i in range(N):
        for j in range(N):
            q_hat, k_hat = (t / t.square().sum(-1, keepdim=True).sqrt() for t in (q[:, i], k[:, j]))
            out[:, i] += q_hat * k_hat * v[:, j]
    return out


def efficient(module: Any, x: Tensor) -> Tensor:
    out = []
    for q, k, v in zip(*map(heads, split(module, x)), strict=True):
        p_q = q.exp() / q.exp().sum(2, keepdim=True)
        p_k = k.exp() / k.exp().sum(1, keepdim=True)
        out.append(torch.einsum("bic,bjc,bjd->bid", p_q, p_k, v))
    return torch.cat(out, -1)


def angular(module: Any, x: Tensor) -> Tensor:
    out = []
    for head, (q, k, v) in enumerate(zip(*map(heads, split(module, x)), strict=True)):
        y = 0.5 * v
        for i in range(N):
            for j in range(N):
                cosine = torch.cosine_similarity(q[:, i], k[:, j])[:, None]
                y[:, i] = y[:, i] + cosine * v[:, j] / math.pi
        y = y / y.norm(dim=-1, keepdim=True)
        for i in range(N):
            for tap in range(9):
                if 0 <= i + tap - 4 < N:
                    y[:, i] += module.conv.weight[head, 0, tap, 0] * v[:, i + tap - 4]
        out.append(y)
    return torch.cat(out, -1)


def enhanced(module: Any, x: Tensor) -> Tensor:
    out = []
    for q, k, v in zip(*map(heads, split(module, x)), strict=True):
        similarity = q.clamp(min=0) @ k.clamp(min=0).mT
        out.append(similarity @ v / (similarity.sum(-1, keepdim=True) + 1e-6))
    v = split(module, x)[2]
    return torch.cat(out, -1) + convolved(v, module.conv.weight[:, 0], module.conv.bias)


def focused(module: Any, x: Tensor) -> Tensor:
    q, k, v = split(module, x)
    k = k + torch.cat([module.prefix_position, module.position_map.reshape(1, 12, DIM)], 1)
    sharp = []
    for t in (q, k):
        t = (t.clamp(min=0) + 1e-6) / (1 + module.feature_scale.exp()).log()
        length = t.square().sum(-1, keepdim=True).sqrt()
        sharp.append(length * t**3 / t.pow(6).sum(-1, keepdim=True).sqrt())
    out = []
    for q_, k_, v_ in zip(*map(heads, (*sharp, v)), strict=True):
        z = 1 / (torch.einsum("bic,bc->bi", q_, k_.mean(1)) + 1e-6)
        state = (k_ * N**-0.5).mT @ (v_ * N**-0.5)
        out.append(q_ @ state * z[..., None])
    filters, bias = module.conv.weight[:, 0].repeat(HEADS, 1, 1), module.conv.bias.repeat(HEADS)
    return torch.cat(out, -1) + convolved(v, filters, bias)


DEFINITIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "hydra": hydra,
    "efficient": efficient,
    "angular": angular,
    "enhanced": enhanced,
    "focused": focused,
}


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_definition(kind: str) -> None:
    module = build(kind)
    with torch.no_grad():
        expected = module.proj(DEFINITIONS[kind](module, tokens()))
        torch.testing.assert_close(module(tokens(), GRID), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", VARIANTS)
def test_written_out(kind: str) -> None:
    """weights @ v is the attention before local terms, and chosen rows equal those of the whole matrix."""
    module: Attention = build(kind)
    with torch.no_grad():
        projections = module.project(tokens(), GRID)
        q, k, v = module.operands(projections, GRID)
        weights = module.weights(q, k)
        terms = module.local_terms(module.local_weight(tokens(), None, None))
        attended = module.normalise(torch.einsum("bhij,bjhd->bihd", weights, v)).flatten(2)
        for term in terms:
            assert len(term.weight.shape) == 4
            if term.on_map:
                bias = torch.zeros(DIM, dtype=v.dtype) if term.bias is None else term.bias
                for image in range(2):
                    kernel = term.weight[image % len(term.weight)]
                    added = convolved(v.flatten(2)[image : image + 1], kernel, bias, side=kernel.shape[-1])
                    attended[image] += added[0]
            else:
                line = nn.functional.pad(v.flatten(2), (0, 0, 4, 4))
                attended += sum(term.weight[0, :, 0, t] * line[:, t : t + N] for t in range(9))
        out = module.merge(module.apply_gate(attended[..., None], tokens()))
        torch.testing.assert_close(out, module(tokens(), GRID), atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(module.weights(q, k, rows=slice(2, 5)), weights[:, :, 2:5])


@pytest.mark.parametrize("kind", VARIANTS)
def test_absent_tokens_make_a_smaller_map(kind: str) -> None:
    """The last row of the map is padding: the output of the map without it."""
    module = build(kind)
    if kind == "focused":
        nn.init.zeros_(module.position_map)  # positions are resized to a smaller map
    present = torch.arange(N) < PREFIX + 8
    x = tokens().masked_fill(~present[:, None], 1e3)
    with torch.no_grad():
        out = module(x, GRID, token_mask=present.expand(2, -1))
        torch.testing.assert_close(out[:, present], module(x[:, present], (2, 4)), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", VARIANTS)
def test_masked_for_one_query(kind: str) -> None:
    """The row is that of a module that never saw the masked tokens."""
    module: Attention = build(kind)
    seen = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.7
    seen.fill_diagonal_(True)
    with torch.no_grad():
        q, k, _ = module.operands(module.project(tokens(), GRID), GRID)
        masked = module.weights(q, k, mask=seen)
        assert (masked[:, :, ~seen] == 0).all()
        for i in range(N):
            keep = seen[i].nonzero()[:, 0]
            place = int((keep == i).nonzero())
            expected = module.weights(q[:, keep], k[:, keep])[:, :, place]
            torch.testing.assert_close(masked[:, :, i, keep], expected, atol=1e-10, rtol=1e-10)
        everything = module.weights(q, k, mask=torch.ones_like(seen))
        torch.testing.assert_close(everything, module.weights(q, k), atol=1e-12, rtol=1e-10)


def test_rows_sum_to_one_where_they_should() -> None:
    for kind in ("inline", "linear", "softmax", "mapped_softmax", "efficient", "enhanced"):
        module: Attention = build(kind)
        with torch.no_grad():
            q, k, _ = module.operands(module.project(tokens(), GRID), GRID)
            sums = module.weights(q, k).sum(-1)
        # Division by a sum plus 1e-6; a query that ReLU takes to zero attends to nothing.
        assert (((sums - 1).abs() < 1e-3) | (sums.abs() < 1e-9)).all(), kind


def test_a_negative_kernel_diverges_and_says_so() -> None:
    """Vanilla linear attention with φ = identity divides by a sum that can be zero. Nothing clips the result."""
    module: Any = ATTENTIONS["linear"](2, 1, feature_map="identity").double()
    with torch.no_grad():
        module.qkv.weight.copy_(torch.eye(2).repeat(3, 1))
        module.qkv.bias.zero_()
        x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 1e-7]]], dtype=torch.float64)
        q, k, _ = module.operands(module.project(x, (1, 3)), (1, 3))
        assert module.weights(q, k).abs().max() > 1e5
        assert ATTENTIONS["inline"](2, 1).double().weights(q, k).abs().max() < 2


@pytest.mark.parametrize("kind", DEFINITIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(kind: str, dtype: torch.dtype) -> None:
    module = build(kind)
    with torch.no_grad():
        exact = module(tokens(), GRID)
        out = module.to(dtype)(tokens().to(dtype), GRID)
    assert out.dtype == dtype
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_focused_positions_follow_the_map() -> None:
    module = build("focused")
    with torch.no_grad():
        other = module(tokens(1 + 5 * 6), (5, 6))
        module.set_grid((5, 6))
        assert module.position_map.shape == (1, 5, 6, DIM)
        torch.testing.assert_close(module(tokens(1 + 5 * 6), (5, 6)), other)
    with pytest.raises(ValueError, match="pass grid="):
        FocusedAttention(DIM, HEADS)


# DeiT-T as published: 192 channels, 3 heads; parameters in millions, 1.1 G multiply-accumulates.
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("linear", 5.7), ("hydra", 5.7), ("efficient", 5.7), ("angular", 5.7), ("enhanced", 5.8), ("focused", 6.2)],
)
def test_published_cost_on_deit_tiny(kind: str, parameters: float) -> None:
    with torch.device("meta"):
        model: Any = inline_attention.create_model("inline_deit_tiny", attention=kind, num_heads=3)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == parameters
    assert round(count_macs(model) / 1e9, 1) == 1.1


def test_published_cost_of_inline_deit_tiny() -> None:
    with torch.device("meta"):
        model: Any = inline_attention.create_model("inline_deit_tiny")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 6.5
    assert round(count_macs(model) / 1e9, 1) == 1.1
