"""PVT with InLine, linear or softmax attention.

InLine attention: "Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590.
PVT: "Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions", ICCV 2021,
arXiv 2102.12122.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.models import register_model
from torch import Tensor, nn

from inline_attention.layers import Attention, Block, MappedSoftmaxAttention, PatchEmbed, SoftmaxAttention
from inline_attention.layers.embed import resize_map, with_value
from inline_attention.layers.padding import resize_map_for_each
from inline_attention.layers.registry import AttentionSpec, build_attention, check_choices, parse_attention
from inline_attention.layers.written_out import WrittenOut
from inline_attention.ops import Grid

from .base import (
    PyramidModel,
    Stage,
    StateDict,
    adapt_attention,
    ceil_grid,
    check_stages,
    drop_path_rates,
    unflatten_positions,
)
from .published import PUBLISHED, Published, share_link
from .registry import build, register_family


class ReducedSoftmaxAttention(SoftmaxAttention):
    """Softmax attention whose keys and values come from a map reduced by a strided convolution.

    Rows and columns that do not fill a whole stride are dropped, as in any strided convolution.
    """

    def __init__(self, dim: int, num_heads: int, *, reduction: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, fused_qkv=False, **kwargs)
        self.sr: nn.Module = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        self.reduction = reduction
        if reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, stride=reduction)
            self.norm = nn.LayerNorm(dim, eps=1e-5)

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        heads = (self.num_heads, self.head_dim)
        q = self.project_queries(x, self.q).unflatten(-1, (1, *heads))
        if self.reduction > 1:
            if min(grid) < self.reduction:
                raise ValueError(
                    f"a map of {grid[0]}×{grid[1]} is smaller than the reduction {self.reduction} of its keys; "
                    "use larger images or InLine attention in this stage"
                )
            x = self.norm(self.sr(x.unflatten(1, grid).permute(0, 3, 1, 2)).flatten(2).mT)
        return q, self.kv(x).unflatten(-1, (2, *heads))

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        if token_mask is None or self.reduction == 1:
            return super().global_attention(q, k, v, grid=grid, token_mask=token_mask)
        # The convolution drops an incomplete patch at the border, so a key belongs to the image if the last token of
        # its patch does. An image smaller than one patch keeps the first key, whose patch is padded with zeros.
        last = self.reduction - 1
        keys = token_mask.unflatten(1, grid)[:, last :: self.reduction, last :: self.reduction].flatten(1)
        keys = keys | (torch.arange(keys.shape[1], device=keys.device) == 0)
        return self.softmax_rows(q, k, v, mask=keys[:, None, None, :])

    def write_out(self, x: Tensor, grid: Grid, **options: Any) -> WrittenOut:
        found = super().write_out(x, grid, **options)
        if self.reduction == 1:
            return found
        return replace(found, key_grid=(grid[0] // self.reduction, grid[1] // self.reduction))


class MappedReducedSoftmaxAttention(MappedSoftmaxAttention, ReducedSoftmaxAttention):
    """The same with φ applied to q and k before the softmax."""


# Softmax attention of this family, by the names that models take.
SOFTMAX: dict[str, type[Attention]] = {
    cls.kind: cls for cls in (ReducedSoftmaxAttention, MappedReducedSoftmaxAttention)
}


class PatchDownsample(nn.Module):
    """Embeds patches of the previous stage's map: (B, H, W, C) → (B, ceil(H/2), ceil(W/2), C')"""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.embed = PatchEmbed(2, in_dim, dim, norm=nn.LayerNorm(dim, eps=1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.permute(0, 3, 1, 2))


torch.fx.wrap("resize_map")  # torch.fx records a call: what it computes depends on sizes


class PVTStage(Stage):
    """A stage with a position embedding, interpolated to the map."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module], *, grid: Grid, dim: int) -> None:
        super().__init__(downsample, blocks)
        self.pos_embed = nn.Parameter(torch.empty(1, *grid, dim))

    def embed(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        x = self.downsample(x)
        grid = (x.shape[1], x.shape[2])
        if sizes is not None:
            return x + resize_map_for_each(self.pos_embed, sizes, grid, mode="bilinear")
        return x + resize_map(self.pos_embed, grid, mode="bilinear")


class PVT(PyramidModel):
    """A pyramid of four stages with position embeddings, no class token and no final norm.

    Args:
        img_size: input size, an int or (height, width). Other sizes run too: position embeddings are interpolated.
        in_chans: channels of the image.
        num_classes: classes; 0 for none.
        global_pool: "avg" or "" (the map).
        embed_dims: channels, by stage.
        depths: blocks, by stage.
        num_heads: heads, by stage.
        mlp_ratios: hidden channels of the MLPs, as multiples of the stage's channels.
        reductions: by stage, the stride with which softmax attention reduces its keys. Other attentions use all keys.
        attention: the attention of each stage; see `parse_attention`.
        feature_map: φ of InLine and linear attention; None for the default of each.
        local_residual: the 3×3 residual of InLine and linear attention; None for the default of each.
        gain: a learned factor of the queries of each head, from 1 or from this number; see `Attention`. The published
            models have none.
        rope: rotary positions of queries and keys, in the attentions that have them; see `OneCallAttention`.
        anchors: of tangent attention; None for one.
        drop_rate: dropout before the head.
        proj_drop_rate: dropout after projections.
        drop_path_rate: stochastic depth of the last block. It grows linearly from 0 in the first.
    """

    checkpoint_names = r"block1\.0\.|stages\.0\.pos_embed"
    norm_eps = 1e-6

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (2, 4, 10, 16),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        reductions: Sequence[int] = (8, 4, 2, 1),
        attention: AttentionSpec = "inline",
        feature_map: str | None = None,
        local_residual: bool | None = None,
        gain: bool | float = False,
        rope: bool = False,
        anchors: int | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        check_stages(depths, embed_dims=embed_dims, num_heads=num_heads, mlp_ratios=mlp_ratios, reductions=reductions)
        embed_dims = embed_dims[: len(depths)]
        super().__init__(embed_dims, img_size=img_size, in_chans=in_chans, global_pool=global_pool)
        choices: dict[str, Any] = dict(
            feature_map=feature_map,
            local_residual=local_residual,
            gain=gain,
            rope=rope,
            anchors=anchors,
            proj_drop=proj_drop_rate,
            own=SOFTMAX,
        )

        def attn(name: str, stage: int) -> Attention:
            options: dict[str, Any] = dict(reduction=reductions[stage])
            if name not in SOFTMAX:
                options = dict(fused_qkv=False, grid=self.stage_grid(stage))
            return build_attention(name, embed_dims[stage], num_heads[stage], **options, **choices)

        self.patch_embed = PatchEmbed(4, in_chans, embed_dims[0], norm=nn.LayerNorm(embed_dims[0], eps=1e-5))
        self.attention = parse_attention(attention, depths)
        check_choices(self.attention, rope=rope, anchors=anchors)
        rates = drop_path_rates(drop_path_rate, depths)
        self.stages = nn.ModuleList()
        for i, dim in enumerate(embed_dims):
            options = dict(mlp_ratio=mlp_ratios[i], norm_eps=self.norm_eps, proj_drop=proj_drop_rate)
            blocks = [
                Block(dim, attn(name, i), drop_path=rate, **options)
                for name, rate in zip(self.attention[i], rates[i], strict=True)
            ]
            downsample = PatchDownsample(embed_dims[i - 1], dim) if i else nn.Identity()
            self.stages.append(PVTStage(downsample, blocks, grid=self.stage_grid(i), dim=dim))
        self.norm = nn.Identity()
        self.build_head(num_classes, drop_rate)
        self.init_weights()

    def minimum_size(self) -> int:
        """Softmax attention with reduced keys needs a map with at least one key."""
        attentions = self.modules_by_stage(ReducedSoftmaxAttention)
        return max([super().minimum_size(), *(attn.reduction * 4 * 2**stage for stage, attn in attentions)])

    def set_input_size(self, img_size: int | Sequence[int]) -> None:
        """Resizes the position embeddings once. Without this call they are resized at every other size."""
        super().set_input_size(img_size)
        for i, stage in enumerate(self.stages):
            assert isinstance(stage, PVTStage)
            resized = resize_map(stage.pos_embed, self.stage_grid(i), mode="bilinear")
            stage.pos_embed = with_value(stage.pos_embed, resized)

    def adapt_state_dict(self, state_dict: Mapping[str, Tensor], *, img_size: Grid | None = None) -> StateDict:
        source = self.source_size(img_size)
        own = self.state_dict(keep_vars=True)
        out = {}
        for name, value in state_dict.items():
            name = name.replace("patch_embed1.", "patch_embed.")
            name = re.sub(r"^patch_embed(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.downsample.embed.", name)
            name = re.sub(r"^block(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks.", name)
            name = re.sub(r"^pos_embed(\d)$", lambda m: f"stages.{int(m[1]) - 1}.pos_embed", name)
            name, value = adapt_attention(name, value, own)
            if match := re.fullmatch(r"stages\.(\d+)\.pos_embed", name):
                stage = int(match[1])
                grid = ceil_grid(source, 4 * 2**stage)
                if value.ndim == 3:  # the official layout; ours keeps the grid
                    value = unflatten_positions(name, value, grid)
                if stage < len(self.stages):
                    value = resize_map(value, self.stage_grid(stage), mode="bilinear")
            out[name] = value
        return out


PUBLISHED |= {
    "inline_pvt_tiny": Published(78.2, share_link("90ac52b1555b401eb5e6")),
    "inline_pvt_small": Published(82.0, share_link("1ab953b2479d433080a3")),
    "inline_pvt_medium": Published(83.2, share_link("a72aec31e6084bc0a280")),
    "inline_pvt_large": Published(83.6, share_link("efd91318ba964f01b288")),
    "softmax_pvt_tiny": Published(75.1),
    "softmax_pvt_small": Published(79.8),
    "softmax_pvt_medium": Published(81.2),
    "softmax_pvt_large": Published(81.7),
}

default_cfgs = register_family(
    PVT, *(f"{kind}_pvt_{size}" for kind in ("inline", "softmax") for size in ("tiny", "small", "medium", "large"))
)

_SOFTMAX = dict(attention="softmax", num_heads=(1, 2, 5, 8))


@register_model
def inline_pvt_tiny(pretrained: bool = False, **kwargs: Any) -> PVT:
    """InLine-PVT-T."""
    return build(PVT, "inline_pvt_tiny", pretrained, kwargs, depths=(2, 2, 2, 2))


@register_model
def inline_pvt_small(pretrained: bool = False, **kwargs: Any) -> PVT:
    """InLine-PVT-S."""
    return build(PVT, "inline_pvt_small", pretrained, kwargs, depths=(3, 4, 6, 3))


@register_model
def inline_pvt_medium(pretrained: bool = False, **kwargs: Any) -> PVT:
    """InLine-PVT-M."""
    return build(PVT, "inline_pvt_medium", pretrained, kwargs, depths=(3, 4, 18, 3))


@register_model
def inline_pvt_large(pretrained: bool = False, **kwargs: Any) -> PVT:
    """InLine-PVT-L."""
    return build(PVT, "inline_pvt_large", pretrained, kwargs, depths=(3, 8, 27, 3))


@register_model
def softmax_pvt_tiny(pretrained: bool = False, **kwargs: Any) -> PVT:
    """PVT-T, the softmax baseline."""
    return build(PVT, "softmax_pvt_tiny", pretrained, kwargs, depths=(2, 2, 2, 2), **_SOFTMAX)


@register_model
def softmax_pvt_small(pretrained: bool = False, **kwargs: Any) -> PVT:
    """PVT-S, the softmax baseline."""
    return build(PVT, "softmax_pvt_small", pretrained, kwargs, depths=(3, 4, 6, 3), **_SOFTMAX)


@register_model
def softmax_pvt_medium(pretrained: bool = False, **kwargs: Any) -> PVT:
    """PVT-M, the softmax baseline."""
    return build(PVT, "softmax_pvt_medium", pretrained, kwargs, depths=(3, 4, 18, 3), **_SOFTMAX)


@register_model
def softmax_pvt_large(pretrained: bool = False, **kwargs: Any) -> PVT:
    """PVT-L, the softmax baseline."""
    return build(PVT, "softmax_pvt_large", pretrained, kwargs, depths=(3, 8, 27, 3), **_SOFTMAX)
