"""Costs by stage: against the published figures, and linear in the number of pixels where they should be."""

from typing import Any

import pytest
import torch
from small import create_small, deep_ones_are_slow

import inline_attention
from inline_attention.layers.registry import describe_attention
from inline_attention.models.profile import count_macs, profile
from inline_attention.models.summary import SUMMARIES, count

# Billions of multiply-accumulates, as another counter finds them in the official models; baselines as published.
PUBLISHED_GMACS = {
    "inline_deit_tiny": 1.11,
    "inline_deit_small": 4.98,
    "inline_deit_base": 17.21,
    "inline_pvt_tiny": 1.99,
    "inline_pvt_small": 3.93,
    "inline_pvt_medium": 6.89,
    "inline_pvt_large": 10.16,
    "inline_swin_tiny": 4.48,
    "inline_swin_small": 8.75,
    "inline_swin_base": 15.43,
    "inline_swin_base_384": 46.31,
    "inline_cswin_tiny": 4.33,
    "inline_cswin_small": 6.80,
    "inline_cswin_base": 14.93,
    "inline_cswin_base_384": 46.35,
    "softmax_deit_tiny": 1.2,
    "softmax_deit_small": 4.6,
    "softmax_deit_base": 17.6,
    "softmax_pvt_tiny": 1.9,
    "softmax_pvt_small": 3.8,
    "softmax_pvt_medium": 6.7,
    "softmax_pvt_large": 9.8,
    "softmax_swin_tiny": 4.5,
    "softmax_swin_small": 8.7,
    "softmax_swin_base": 15.4,
    "softmax_cswin_tiny": 4.3,
    "softmax_cswin_small": 6.9,
    "softmax_cswin_base": 15.0,
}


def on_meta(name: str, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return inline_attention.create_model(name, **kwargs)


@pytest.mark.parametrize("name", deep_ones_are_slow())
def test_summary_and_published_macs(name: str) -> None:
    model = on_meta(name)
    costs = profile(model)
    macs = sum(cost.macs for cost in costs)
    params = sum(p.numel() for p in model.parameters())
    assert sum(cost.params for cost in costs) == params
    assert SUMMARIES[name] == (model.img_size[0], describe_attention(model.attention), params, macs)
    if name.endswith("_study"):
        return  # our own
    published = PUBLISHED_GMACS[name] * 1e9
    if name.startswith("inline_"):
        assert macs == pytest.approx(published, rel=0.01)
    else:  # printed with one decimal, by different counters
        assert macs == pytest.approx(published, abs=0.1e9)


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_all_inline_models_are_linear_in_pixels(name: str) -> None:
    model = on_meta(name, attention="inline")
    sides = (224, 448, 896)
    macs = [count_macs(model, img_size=(side, side)) for side in sides]
    # What does not grow: the head, the kernel generators and the class token, a few millions.
    per_pixel = [m / side**2 for m, side in zip(macs, sides, strict=True)]
    assert max(per_pixel) <= 1.02 * min(per_pixel)
    slopes = [(b - a) / (4 * s * s - s * s) for a, b, s in zip(macs, macs[1:], sides, strict=False)]
    assert max(slopes) == pytest.approx(min(slopes), rel=1e-3)


def test_summaries_are_counted_as_costs_are() -> None:
    assert count("inline_deit_study") == SUMMARIES["inline_deit_study"]


def test_softmax_is_not() -> None:
    model = on_meta("softmax_deit_tiny")
    small, large = (count_macs(model, img_size=(side, side)) for side in (224, 896))
    assert large > 2 * 16 * small


def test_counts_of_one_block_by_hand() -> None:
    """A DeiT of one block on a 2×3 map: each product counted on paper."""
    model = on_meta("inline_deit_tiny", embed_dim=8, depth=1, num_heads=2, num_classes=5, img_size=(32, 48))
    stem, blocks, head = profile(model)
    tokens, dim, d = 7, 8, 4
    assert stem.macs == 6 * 3 * 16 * 16 * dim
    linear = tokens * dim * (3 * dim + dim + 2 * 4 * dim)
    state = 2 * tokens * dim * d
    generator = dim * d + dim * 9 * d
    local = 9 * 6 * dim
    assert blocks.macs == linear + state + generator + local
    assert head.macs == 5 * dim
    assert (stem.shape, blocks.shape, head.shape) == ((tokens, dim), (tokens, dim), (5,))
    assert all(cost.activation_bytes > 0 for cost in (stem, blocks, head))


def test_activation_memory_grows_with_the_map() -> None:
    model = on_meta("inline_pvt_tiny")
    small, large = (sum(c.activation_bytes for c in profile(model, img_size=(s, s))) for s in (224, 448))
    assert large == pytest.approx(4 * small, rel=0.05)


def test_only_on_the_meta_device() -> None:
    with pytest.raises(ValueError, match="build the model under"):
        profile(create_small("inline_deit_tiny"))
