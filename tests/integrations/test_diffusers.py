"""SANA's linear attention on our operation, in a small random SanaTransformer2DModel of diffusers."""

from typing import Any

import pytest
import torch
from on_use import OnUse
from torch import Tensor

diffusers = OnUse("diffusers")
theirs = OnUse("diffusers.models.attention_processor")
ours = OnUse("inline_attention.integrations.diffusers")


def build(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = dict(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=12,
        sample_size=8,
    )
    return diffusers.SanaTransformer2DModel(**options | kwargs).eval()


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return dict(
        hidden_states=torch.randn(2, 4, 8, 6, generator=generator).to(dtype),
        encoder_hidden_states=torch.randn(2, 5, 12, generator=generator).to(dtype),
        timestep=torch.tensor([3.0, 500.0]),
    )


@pytest.mark.parametrize("qk_norm", [None, "rms_norm_across_heads"])
def test_the_whole_model(qk_norm: str | None) -> None:
    """The same output and the same gradients, within the rounding of float32"""
    outs, grads = [], []
    for fused in (False, True):
        model = build(qk_norm=qk_norm)
        if fused:
            assert ours.use_fused_attention(model) == 2
        out = model(**inputs(), return_dict=False)[0]
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out.square().mean(), [model.transformer_blocks[0].attn1.to_q.weight])[0])
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-6, rtol=1e-4)


def attention(**kwargs: Any) -> Any:
    return build(**kwargs).transformer_blocks[0].attn1


@torch.no_grad()
def test_small_sums() -> None:
    """Sums far below 1e-6: both divide by the sum itself. A query that ReLU takes to zero attends to nothing."""
    attn = attention()
    x = 1e-5 * torch.randn(2, 30, 16)
    x[:, 0] = 0
    expected = theirs.SanaLinearAttnProcessor2_0()(attn, x)
    torch.testing.assert_close(ours.SanaLinearAttnProcessor()(attn, x), expected, atol=1e-8, rtol=1e-4)
    assert (expected - attn.to_out[0].bias).abs().max() > 1e-7


@torch.no_grad()
def test_float64_against_the_formula() -> None:
    attn = attention().double()
    x, source = torch.randn(2, 9, 16, dtype=torch.float64), torch.randn(2, 7, 16, dtype=torch.float64)
    q, k = (layer(y).unflatten(-1, (2, 8)).relu() for layer, y in ((attn.to_q, x), (attn.to_k, source)))
    v = attn.to_v(source).unflatten(-1, (2, 8))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    weights = scores / (scores.sum(-1, keepdim=True) + 1e-15)
    expected = attn.to_out[0](torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))
    out = ours.SanaLinearAttnProcessor()(attn, x, source)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    present = torch.arange(7) < 4
    masked = ours.SanaLinearAttnProcessor()(attn, x, source, present.expand(2, -1))
    torch.testing.assert_close(masked, ours.SanaLinearAttnProcessor()(attn, x, source[:, :4]), atol=1e-12, rtol=1e-12)
    with pytest.raises(ValueError, match="mask over pairs"):
        ours.SanaLinearAttnProcessor()(attn, x, source, torch.ones(2, 9, 7, dtype=torch.bool))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """At most twice as far from the exact result as diffusers, which computes in float32"""
    attn = attention()
    x = 20 + torch.randn(2, 64, 16)
    exact = ours.SanaLinearAttnProcessor()(attn.double(), x.to(dtype).double())
    errors = []
    for processor in (ours.SanaLinearAttnProcessor(), theirs.SanaLinearAttnProcessor2_0()):
        out = processor(attn.to(dtype), x.to(dtype))
        assert out.dtype == dtype
        errors.append((out.double() - exact).abs().max())
    assert errors[0] < 2 * errors[1] + 1e-3


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no SanaLinearAttnProcessor2_0"):
        ours.use_fused_attention(torch.nn.Linear(2, 2))
