"""CSwin with InLine, linear or softmax attention.

InLine attention: "Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590.
CSwin: "CSWin Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows", CVPR 2022,
arXiv 2107.00652.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models import register_model
from torch import Tensor, nn

from inline_attention.layers import Attention, Block, MappedSoftmaxAttention, SoftmaxAttention
from inline_attention.layers.embed import pad_image
from inline_attention.layers.local import LocalTerm
from inline_attention.layers.padding import Padding
from inline_attention.layers.registry import AttentionSpec, build_attention, check_choices, parse_attention
from inline_attention.layers.windows import WindowPlan, keys_to_attend, to_windows
from inline_attention.layers.written_out import WrittenOut
from inline_attention.ops import Grid
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import masked_mean, zero_absent

from .base import PyramidModel, Stage, StateDict, adapt_attention, check_positive, check_stages, drop_path_rates
from .published import PUBLISHED, Published, share_link
from .registry import build, register_family


class StripeAttention(SoftmaxAttention):
    """Softmax attention in stripes, vertical ones for half of the heads and horizontal ones for the other half.

    Each branch adds a depthwise convolution of v, computed inside its stripes, as a positional term.

    Args:
        stripe: width of a stripe; None for one branch that attends over everything.
    """

    def __init__(self, dim: int, num_heads: int, *, stripe: int | None, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.stripe = stripe
        branches = 1 if stripe is None else 2
        if num_heads % branches:
            raise ValueError(f"num_heads={num_heads} is not even, but half of the heads attend in each direction")
        width = dim // branches
        self.positions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(branches))

    def attend(
        self, projections: Sequence[Tensor], *, grid: Grid, token_mask: Tensor | None, local_weight: Tensor | None
    ) -> Tensor:
        assert local_weight is None
        q, k, v = unstack(projections)
        v = zero_absent(v, token_mask)  # the positional convolution reads beyond the border
        if self.stripe is None:
            return self.attend_branch(q, k, v, None, self.positions[0], grid=grid, token_mask=token_mask)
        windows = [(grid[0], self.stripe), (self.stripe, grid[1])]
        branches = zip(*(x.chunk(2, dim=2) for x in (q, k, v)), windows, self.positions, strict=True)
        out = [self.attend_branch(*branch, grid=grid, token_mask=token_mask) for branch in branches]
        return torch.cat(out, dim=2)

    def attend_branch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Grid | None,
        position: nn.Module,
        *,
        grid: Grid,
        token_mask: Tensor | None,
    ) -> Tensor:
        """(B, N, branch heads, d) → the same"""
        heads = q.shape[2:]
        plan = WindowPlan.fit(grid, window, shifted=False)
        stripes = [to_windows(x.unflatten(1, grid).flatten(3), plan) for x in (q, k, v)]
        present = stripes[0].token_mask  # False for the padding that completes stripes
        if token_mask is not None:
            present = to_windows(token_mask.unflatten(1, grid)[..., None], plan).tokens[..., 0]
        rows = (x.tokens.unflatten(2, heads) for x in stripes)
        mask = None if present is None else keys_to_attend(present)[:, None, None, :]
        out = self.softmax_rows(*rows, mask=mask).flatten(2)
        # The padding was added after the projection, so v is zero there, as beyond a border.
        v_map = stripes[2].tokens.unflatten(1, plan.window).permute(0, 3, 1, 2)
        out = out + position(v_map).permute(0, 2, 3, 1).flatten(1, 2)
        return plan.merge(out, batch=q.shape[0]).flatten(1, 2).unflatten(2, heads)

    def write_out(self, x: Tensor, grid: Grid, **options: Any) -> WrittenOut:
        found = super().write_out(x, grid, **options)
        place = torch.arange(grid[0] * grid[1], device=x.device)
        stripes = torch.zeros_like(place)[None]  # (branches, N): which stripe a token is in
        if self.stripe is not None:
            stripes = torch.stack([place % grid[1] // self.stripe, place // grid[1] // self.stripe])
        by_head = stripes.repeat_interleave(self.num_heads // len(stripes), 0)

        def matrix(rows: slice, samples: slice, heads: slice, mask: Tensor | None) -> Tensor:
            together = by_head[None, heads, rows, None] == by_head[None, heads, None, :]
            return found.matrix(rows, samples, heads, together if mask is None else together & mask)

        convolutions = [conv for conv in self.positions if isinstance(conv, nn.Conv2d)]
        weight = torch.cat([conv.weight for conv in convolutions])[:, 0][None]
        bias = torch.cat([conv.bias for conv in convolutions if conv.bias is not None])
        local = (*found.local, LocalTerm(weight, bias, regions=stripes))
        return replace(found, matrix=matrix, local=local, stripes=self.stripe is not None)


class MappedStripeAttention(MappedSoftmaxAttention, StripeAttention):
    """The same with φ applied to q and k before the softmax."""


# Softmax attention of this family, by the names that models take.
SOFTMAX: dict[str, type[Attention]] = {cls.kind: cls for cls in (StripeAttention, MappedStripeAttention)}


class CSwinBlock(Block):
    """A block whose local weight is made from the block's input, before the norm."""

    def attention_branch(self, x: Tensor, grid: Grid, padding: Padding | None = None, **options: Any) -> Tensor:
        token_mask = None if padding is None else padding.token_mask
        mean = masked_mean(x, token_mask)
        return self.attn(self.norm1(x), grid, token_mean=mean, token_mask=token_mask, **options)


@register_notrace_module
class ConvEmbed(nn.Module):
    """Overlapping patches: (B, in_chans, H, W) → (B, ceil(H/4), ceil(W/4), dim)"""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, 7, stride=4, padding=2)
        self.norm = nn.LayerNorm(dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(pad_image(x, 4)).permute(0, 2, 3, 1))


class ConvMerging(nn.Module):
    """(B, H, W, in_dim) → (B, ceil(H/2), ceil(W/2), dim)"""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class CSwin(PyramidModel):
    """A pyramid of four stages with a depthwise positional term in every attention.

    Args:
        img_size: input size, an int or (height, width). Other sizes run too: stripes pad the map.
        in_chans: channels of the image.
        num_classes: classes; 0 for none.
        global_pool: "avg" or "" (the map).
        embed_dim: channels of the first stage; they double from stage to stage.
        depths: blocks, by stage.
        num_heads: heads, by stage.
        mlp_ratio: hidden channels of every block's MLP, as a multiple of its channels.
        stripes: by stage, the width of softmax attention's stripes. The last stage attends over the whole map in one
            branch, and so does a stage whose map at img_size is not larger than its stripe. `set_input_size` does not
            change them.
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

    checkpoint_names = r"stage1\.0\.|stages\.1\.downsample\.conv\."
    norm_eps = 1e-5

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 64,
        depths: Sequence[int] = (2, 4, 18, 1),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        mlp_ratio: float = 4.0,
        stripes: Sequence[int] = (1, 2, 7, 7),
        attention: AttentionSpec = "IISS",
        feature_map: str | None = None,
        local_residual: bool | None = None,
        gain: bool | float = False,
        rope: bool = False,
        anchors: int | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        check_positive(embed_dim=embed_dim, mlp_ratio=mlp_ratio)
        check_stages(depths, num_heads=num_heads, stripes=stripes)
        dims = [embed_dim * 2**i for i in range(len(depths))]
        super().__init__(dims, img_size=img_size, in_chans=in_chans, global_pool=global_pool)
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
            grid = self.stage_grid(stage)
            stripe = None if stage == len(dims) - 1 or max(grid) <= stripes[stage] else stripes[stage]
            options: dict[str, Any] = dict(stripe=stripe) if name in SOFTMAX else dict(position_conv=True, grid=grid)
            return build_attention(name, dims[stage], num_heads[stage], **options, **choices)

        self.patch_embed = ConvEmbed(in_chans, embed_dim)
        self.attention = parse_attention(attention, depths)
        check_choices(self.attention, rope=rope, anchors=anchors)
        rates = drop_path_rates(drop_path_rate, depths)
        self.stages = nn.ModuleList()
        options = dict(mlp_ratio=mlp_ratio, norm_eps=self.norm_eps, proj_drop=proj_drop_rate)
        for i, dim in enumerate(dims):
            blocks = [
                CSwinBlock(dim, attn(name, i), drop_path=rate, **options)
                for name, rate in zip(self.attention[i], rates[i], strict=True)
            ]
            self.stages.append(Stage(ConvMerging(dims[i - 1], dim) if i else nn.Identity(), blocks))
        self.norm = nn.LayerNorm(self.num_features, eps=self.norm_eps)
        self.build_head(num_classes, drop_rate)
        self.init_weights()

    def minimum_size(self) -> int:
        """A map with more than one stripe on each side is cut and padded; a smaller one is a single stripe."""
        attentions = self.modules_by_stage(StripeAttention)
        sides = [attn.stripe * 4 * 2**stage + 1 for stage, attn in attentions if attn.stripe is not None]
        return max([super().minimum_size(), *sides])

    def adapt_state_dict(self, state_dict: Mapping[str, Tensor], *, img_size: Grid | None = None) -> StateDict:
        own = self.state_dict(keep_vars=True)
        out = {}
        for name, value in state_dict.items():
            name = name.replace("stage1_conv_embed.0.", "patch_embed.conv.")
            name = name.replace("stage1_conv_embed.2.", "patch_embed.norm.")
            name = re.sub(r"^merge(\d)\.", lambda m: f"stages.{m[1]}.downsample.", name)
            name = re.sub(r"^stage(\d)\.(\d+)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks.{m[2]}.", name)
            name = re.sub(r"(blocks\.\d+\.)(qkv|proj)\.", r"\1attn.\2.", name)
            if match := re.search(r"\.attns\.(\d+)\.get_v\.(weight|bias)$", name):
                block = name[: match.start()]
                linear = f"{block}.attn.position.{match[2]}"
                name = linear if linear in own else f"{block}.attn.positions.{match[1]}.{match[2]}"
            name, value = adapt_attention(name, value, own)
            out[name] = value
        return out


PUBLISHED |= {
    "inline_cswin_tiny": Published(83.2, share_link("49fa2ecc543647c4b970")),
    "inline_cswin_small": Published(83.8, share_link("59f4e65f776f4052b93c")),
    "inline_cswin_base": Published(84.5, share_link("91e17121df284ae38521")),
    "inline_cswin_base_384": Published(85.7),
    "softmax_cswin_tiny": Published(82.7),
    "softmax_cswin_small": Published(83.6),
    "softmax_cswin_base": Published(84.2),
}

default_cfgs = register_family(
    CSwin,
    *(f"{kind}_cswin_{size}" for kind in ("inline", "softmax") for size in ("tiny", "small", "base")),
    "inline_cswin_base_384",
    first_conv="patch_embed.conv",
)

_TINY = dict(embed_dim=64, num_heads=(2, 4, 8, 16))
_BASE = dict(embed_dim=96, num_heads=(4, 8, 16, 32))


@register_model
def inline_cswin_tiny(pretrained: bool = False, **kwargs: Any) -> CSwin:
    """InLine-CSwin-T."""
    return build(CSwin, "inline_cswin_tiny", pretrained, kwargs, depths=(2, 4, 18, 1), **_TINY)


@register_model
def inline_cswin_small(pretrained: bool = False, **kwargs: Any) -> CSwin:
    """InLine-CSwin-S."""
    return build(CSwin, "inline_cswin_small", pretrained, kwargs, depths=(3, 6, 29, 2), **_TINY)


@register_model
def inline_cswin_base(pretrained: bool = False, **kwargs: Any) -> CSwin:
    """InLine-CSwin-B."""
    return build(CSwin, "inline_cswin_base", pretrained, kwargs, depths=(3, 6, 29, 2), **_BASE)


@register_model
def inline_cswin_base_384(pretrained: bool = False, **kwargs: Any) -> CSwin:
    """InLine-CSwin-B at 384, stripes of 12."""
    return build(
        CSwin, "inline_cswin_base_384", pretrained, kwargs, depths=(3, 6, 29, 2), stripes=(1, 2, 12, 12), **_BASE
    )


@register_model
def softmax_cswin_tiny(pretrained: bool = False, **kwargs: Any) -> CSwin:
    """CSwin-T, the softmax baseline."""
    return build(CSwin, "softmax_cswin_tiny", pretrained, kwargs, attention="softmax", depths=(1, 2, 21, 1), **_TINY)


@register_model
def softmax_cswin_small(pretrained: bool = False, **kwargs: Any) -> CSwin:
    """CSwin-S, the softmax baseline."""
    return build(CSwin, "softmax_cswin_small", pretrained, kwargs, attention="softmax", depths=(2, 4, 32, 2), **_TINY)


@register_model
def softmax_cswin_base(pretrained: bool = False, **kwargs: Any) -> CSwin:
    """CSwin-B, the softmax baseline."""
    return build(CSwin, "softmax_cswin_base", pretrained, kwargs, attention="softmax", depths=(2, 4, 32, 2), **_BASE)
