"""DeiT with InLine, linear or softmax attention.

InLine attention: "Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590.
DeiT: "Training data-efficient image transformers & distillation through attention", ICML 2021, arXiv 2012.12877.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from timm.models import register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from inline_attention.layers import Block, PatchEmbed
from inline_attention.layers.embed import resize_map, with_value
from inline_attention.layers.padding import own_tokens, resize_map_for_each, sizes_on_map
from inline_attention.layers.registry import AttentionSpec, build_attention, check_choices, parse_attention
from inline_attention.ops import Grid

from .base import (
    Part,
    StateDict,
    VisionModel,
    adapt_attention,
    ceil_grid,
    check_positive,
    drop_path_rates,
    to_pair,
    unflatten_positions,
)
from .published import PUBLISHED, Published, share_link
from .registry import build, register_family
from .shipped import SHIPPED

torch.fx.wrap("resize_map")  # torch.fx records a call: what it computes depends on sizes


class DeiT(VisionModel):
    """A plain vision transformer with a class token.

    Args:
        img_size: input size, an int or (height, width). Other sizes run too: position embeddings are interpolated.
        patch_size: side of a patch.
        in_chans: channels of the image.
        num_classes: classes; 0 for none.
        global_pool: "token" (the class token), "avg" (mean of the map's tokens) or "" (all tokens).
        embed_dim: channels of a token.
        depth: blocks.
        num_heads: heads.
        mlp_ratio: hidden channels of every block's MLP, as a multiple of embed_dim.
        attention: the attention of the blocks; see `parse_attention`. The model is one stage.
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

    checkpoint_names = r"cls_token|blocks\.0\."
    layers_name = "blocks"
    pools = ("token", "avg", "")
    out_indices = 3
    num_prefix_tokens = 1
    norm_eps = 1e-6

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
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
        check_positive(
            patch_size=patch_size, embed_dim=embed_dim, depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio
        )
        super().__init__(embed_dim, img_size=img_size, in_chans=in_chans, global_pool=global_pool)
        self.patch_size = patch_size
        self.embed_dim = embed_dim
        self.grid = ceil_grid(self.img_size, patch_size)  # of the position embedding
        self.feature_info = [dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=patch_size) for i in range(depth)]

        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_prefix_tokens + self.grid[0] * self.grid[1], embed_dim))
        self.attention = parse_attention(attention, [depth])
        check_choices(self.attention, rope=rope, anchors=anchors)
        rates = drop_path_rates(drop_path_rate, [depth])[0]
        self.blocks = nn.ModuleList()
        for name, rate in zip(self.attention[0], rates, strict=True):
            attn = build_attention(
                name,
                embed_dim,
                num_heads,
                feature_map=feature_map,
                local_residual=local_residual,
                gain=gain,
                rope=rope,
                anchors=anchors,
                num_prefix_tokens=self.num_prefix_tokens,
                grid=self.grid,
                proj_drop=proj_drop_rate,
            )
            options = dict(mlp_ratio=mlp_ratio, norm_eps=self.norm_eps, proj_drop=proj_drop_rate, drop_path=rate)
            self.blocks.append(Block(embed_dim, attn, **options))
        self.norm = nn.LayerNorm(embed_dim, eps=self.norm_eps)
        self.build_head(num_classes, drop_rate)
        self.init_weights()

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(
            stem=r"^cls_token|^pos_embed|^patch_embed",
            blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        )

    def set_input_size(self, img_size: int | Sequence[int]) -> None:
        """Resizes the position embeddings once. Without this call they are resized at every other size."""
        self.img_size = to_pair(img_size)
        grid = ceil_grid(self.img_size, self.patch_size)
        self.pos_embed = with_value(self.pos_embed, self._resized_pos_embed(self.pos_embed, self.grid, grid))
        self.grid = grid
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attn.set_grid(grid)

    def _resized_pos_embed(self, pos_embed: Tensor, old: Grid, new: Grid) -> Tensor:
        prefix, rest = pos_embed.split([self.num_prefix_tokens, old[0] * old[1]], dim=1)
        own = rest.unflatten(1, old)
        resized = resize_map(own, new, mode="bicubic")
        return pos_embed if resized is own else torch.cat([prefix, resized.flatten(1, 2)], dim=1)

    def _own_pos_embed(self, sizes: Tensor, grid: Grid) -> Tensor:
        """Position embeddings of padded images (B, 1 + H·W, C), each at the size of its image"""
        prefix, rest = self.pos_embed.split([self.num_prefix_tokens, self.grid[0] * self.grid[1]], dim=1)
        own = resize_map_for_each(rest.unflatten(1, self.grid), sizes, grid, mode="bicubic").flatten(1, 2)
        return torch.cat([prefix.expand(len(sizes), -1, -1), own], dim=1)

    def embed(self, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Grid]:
        """Images → tokens (B, 1 + H·W, C) with their position, and the grid"""
        x = self.embed_images(x, sizes)
        grid = (x.shape[1], x.shape[2])
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x.flatten(1, 2)], dim=1)
        if sizes is not None:
            return x + self._own_pos_embed(sizes_on_map(sizes, self.patch_size), grid), grid
        return x + self._resized_pos_embed(self.pos_embed, self.grid, grid), grid

    def parts(self) -> Iterator[Part]:
        grid: Grid = (0, 0)

        def embed(x: Tensor) -> Tensor:
            nonlocal grid
            x, grid = self.embed(x)
            return x

        def run_blocks(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.run_block(block, x, grid)
            return x

        yield "stem", [self.patch_embed, self.cls_token, self.pos_embed], embed
        yield "blocks", [self.blocks], run_blocks
        yield "head", [self.norm, self.head], lambda x: self.forward_head(self.norm(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) → normed tokens (B, 1 + H·W / patch², C)"""
        x, grid = self.embed(x)
        for block in self.blocks:
            x = self.run_block(block, x, grid)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        sizes: Tensor | None = None,
    ) -> Any:
        """Returns the features after chosen blocks (all, the last n, or by index) and, by default, the final ones.

        With `return_prefix_tokens` each is a pair (map, prefix tokens). `sizes` (B, 2) are the true heights and widths
        of images that were padded at the bottom and right. The features of each then equal those of the image alone.
        Tokens beyond its border are undefined.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt={output_fmt!r}; expected 'NCHW' or 'NLC'")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, grid = self.embed(x, sizes)
        padding = None
        if sizes is not None:
            own = sizes_on_map(sizes, self.patch_size)
            padding = own_tokens(own, grid, num_prefix_tokens=self.num_prefix_tokens)
        taken = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self.run_block(block, x, grid, padding)
            if index in take:
                taken.append(self.norm(x) if norm else x)
        features: list[Any] = [y[:, self.num_prefix_tokens :] for y in taken]
        if output_fmt == "NCHW":
            features = [y.unflatten(1, grid).permute(0, 3, 1, 2) for y in features]
        if return_prefix_tokens:
            features = [(y, z[:, : self.num_prefix_tokens]) for y, z in zip(features, taken, strict=True)]
        return features if intermediates_only else (self.norm(x), features)

    def pool(self, x: Tensor) -> Tensor:
        if self.global_pool == "token":
            return x[:, 0]
        return x[:, self.num_prefix_tokens :].mean(1) if self.global_pool == "avg" else x

    def adapt_state_dict(self, state_dict: Mapping[str, Tensor], *, img_size: Grid | None = None) -> StateDict:
        own = self.state_dict(keep_vars=True)
        out = {}
        for name, value in state_dict.items():
            name, value = adapt_attention(name, value, own)
            if name == "pos_embed":
                prefix, rest = value.split([self.num_prefix_tokens, value.shape[1] - self.num_prefix_tokens], dim=1)
                source = ceil_grid(self.source_size(img_size), self.patch_size)
                if img_size is None and rest.shape[1] == self.grid[0] * self.grid[1]:
                    source = self.grid
                rest = resize_map(unflatten_positions(name, rest, source), self.grid, mode="bicubic")
                value = torch.cat([prefix, rest.flatten(1, 2)], dim=1)
            out[name] = value
        return out


PUBLISHED |= {
    "inline_deit_tiny": Published(74.5, share_link("1d6b8191ad6d4114b291")),
    "inline_deit_small": Published(80.2, share_link("2f3898b07e9247f3beb3")),
    "inline_deit_base": Published(82.3, share_link("10bdd726d4b0435eb34e")),
    "softmax_deit_tiny": Published(72.2),
    "softmax_deit_small": Published(79.8),
    "softmax_deit_base": Published(81.8),
}

default_cfgs = register_family(DeiT, "inline_deit_tiny", "softmax_deit_tiny", "softmax_deit_small", "softmax_deit_base")
default_cfgs |= register_family(DeiT, "inline_deit_small", input_size=288)
default_cfgs |= register_family(DeiT, "inline_deit_base", input_size=448)

# The small models whose weights come with the package. Their MLP ratios make up for the parameters of the local
# residual, so that all have the same number of parameters.
STUDY: dict[str, Any] = dict(img_size=64, num_classes=100, patch_size=4, embed_dim=160, depth=7, num_heads=5)
default_cfgs |= register_family(
    DeiT,
    *SHIPPED,
    tag="tiny_imagenet_100c",
    input_size=STUDY["img_size"],
    num_classes=STUDY["num_classes"],
    crop_pct=1.0,
    interpolation="bilinear",
    paper_ids=None,
    paper_name=None,
)


@register_model
def inline_deit_tiny(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """InLine-DeiT-T at 224."""
    return build(DeiT, "inline_deit_tiny", pretrained, kwargs, embed_dim=192, num_heads=6)


@register_model
def inline_deit_small(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """InLine-DeiT-S at 288."""
    return build(DeiT, "inline_deit_small", pretrained, kwargs, embed_dim=320, num_heads=10)


@register_model
def inline_deit_base(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """InLine-DeiT-B at 448."""
    return build(DeiT, "inline_deit_base", pretrained, kwargs, embed_dim=384, num_heads=12)


@register_model
def softmax_deit_tiny(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """DeiT-T, the softmax baseline."""
    return build(DeiT, "softmax_deit_tiny", pretrained, kwargs, embed_dim=192, num_heads=3, attention="softmax")


@register_model
def softmax_deit_small(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """DeiT-S, the softmax baseline."""
    return build(DeiT, "softmax_deit_small", pretrained, kwargs, embed_dim=384, num_heads=6, attention="softmax")


@register_model
def softmax_deit_base(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """DeiT-B, the softmax baseline."""
    return build(DeiT, "softmax_deit_base", pretrained, kwargs, embed_dim=768, num_heads=12, attention="softmax")


def _study(variant: str, pretrained: bool, kwargs: dict[str, Any], *, attention: str, mlp_ratio: float) -> DeiT:
    # Image size and class count are part of the configuration, from which timm passes them on.
    architecture = {key: value for key, value in STUDY.items() if key not in ("img_size", "num_classes")}
    return build(DeiT, variant, pretrained, kwargs, **architecture, attention=attention, mlp_ratio=mlp_ratio)


@register_model
def inline_deit_study(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """A small InLine-DeiT at 64; its weights come with the package."""
    return _study("inline_deit_study", pretrained, kwargs, attention="inline", mlp_ratio=3.5)


@register_model
def linear_deit_study(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """The same with linear attention."""
    return _study("linear_deit_study", pretrained, kwargs, attention="linear", mlp_ratio=4.5)


@register_model
def softmax_deit_study(pretrained: bool = False, **kwargs: Any) -> DeiT:
    """The same with softmax attention."""
    return _study("softmax_deit_study", pretrained, kwargs, attention="softmax", mlp_ratio=4.5)
