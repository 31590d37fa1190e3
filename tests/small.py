"""Registered models shrunk to run in milliseconds: fewer blocks and channels, the same attention in every stage."""

from typing import Any

import pytest
import torch

import inline_attention

# Maps of 16, 8, 4 and 2 tokens a side (4 for DeiT); windows and stripes that are smaller than some of them.
SIZE = 64
_SHRUNK: dict[str, dict[str, Any]] = {
    "deit": dict(patch_size=16, embed_dim=16, depth=3, num_heads=2),
    "pvt": dict(embed_dims=(8, 16, 16, 32), depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4)),
    "swin": dict(embed_dim=8, depths=(1, 1, 3, 2), num_heads=(1, 2, 2, 4), softmax_window_size=2),
    "cswin": dict(embed_dim=8, depths=(1, 1, 2, 1), num_heads=(2, 2, 2, 4), stripes=(1, 2, 2, 2)),
}
FAMILIES = tuple(_SHRUNK)
# Two or three stages where a family has four: every kind of block, and what is between stages. For tests that compile.
_SHALLOW: dict[str, dict[str, Any]] = {
    "deit": dict(depth=2),
    "pvt": dict(embed_dims=(8, 16), depths=(1, 1), num_heads=(1, 2), mlp_ratios=(2, 2), reductions=(1, 2)),
    "swin": dict(depths=(1, 2), num_heads=(1, 2)),  # windows are shifted in the second block of a stage
    "cswin": dict(depths=(1, 1, 1), num_heads=(2, 2, 2), stripes=(1, 2, 2)),  # no stripes in the last stage
}
# Shrunk, models of one family and one attention are the same; these are all the different ones.
DISTINCT = (
    *(f"{kind}_{family}_tiny" for family in FAMILIES for kind in ("inline", "softmax")),
    "inline_swin_small",
    "inline_swin_base",
)


def deep_ones_are_slow() -> list[Any]:
    """All names, for pytest. Deeper and wider models of a family differ in numbers alone."""
    fast = [*DISTINCT, *inline_attention.list_models("*_study")]
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in inline_attention.list_models()]


def family_of(name: str) -> str:
    return name.split("_")[1]


def shrunk(name: str, **kwargs: Any) -> dict[str, Any]:
    return dict(img_size=SIZE, num_classes=5) | _SHRUNK[family_of(name)] | kwargs


def create_small(name: str, *, seed: int = 0, **kwargs: Any) -> Any:
    """With every parameter random: as initialised, a wrong bias or bias table would hide behind its zeros."""
    torch.manual_seed(seed)
    model = inline_attention.create_model(name, **shrunk(name, **kwargs))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def create_shallow(name: str) -> Any:
    """InLine models have softmax attention in their last blocks, so that both are compiled in one model."""
    mixed = dict(inline_deit_tiny="inline:1", inline_pvt_tiny="IS", inline_swin_tiny="IS", inline_cswin_tiny="ISS")
    options = dict(attention=mixed[name]) if name in mixed else {}
    return create_small(name, **_SHALLOW[family_of(name)], **options)


def image(height: int = SIZE, width: int | None = None, *, batch: int = 2, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, height, width or height, generator=generator)
