"""The attention modules of timm whose `forward` is written again for the linear form.

Some never call `scaled_dot_product_attention`. The others pass q, k and v on as they are projected, without a copy.
"""

import math
from typing import Any

import timm.layers
import torch
from timm.layers import apply_rot_embed_cat
from timm.models import (
    efficientformer,
    eva,
    levit,
    pvt_v2,
    shvit,
    swin_transformer,
    swin_transformer_v2,
    swin_transformer_v2_cr,
    tnt,
)
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.layers.mode import is_plain
from inline_attention.layers.token_grid import GridSource, find_patches, token_mask_of
from inline_attention.ops import Grid

from .modules import LinearizedAttention, number_regions, register


class WholeHeads(LinearizedAttention):
    """Modules that know their heads, but not the channels of one."""

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        return module.num_heads, module.proj.in_features // module.num_heads


class NoMap(LinearizedAttention):
    """Modules that get no local residual: their rows are no map, or a map of a size that they do not know."""

    @classmethod
    def has_map(cls, module: Any) -> bool:
        return False


class Window(LinearizedAttention):
    """Modules that get the tokens of one window."""

    @classmethod
    def num_tokens(cls, module: Any) -> int:
        return module.window_size[0] * module.window_size[1]


class TimmAttention(LinearizedAttention):
    """The base of the vision transformers' attentions: norms of q and k, a norm and a gate of the output."""

    @classmethod
    def grid_source(cls, ancestor: Any) -> GridSource | None:
        return find_patches(ancestor)

    def normed(self: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_norm(q).type_as(v), self.k_norm(k).type_as(v), v

    def finish(self: Any, out: Tensor, x: Tensor) -> Tensor:
        """(B, N, heads, d) → (B, N, C)"""
        out = self.norm(out.flatten(2))
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


@register(timm.layers.Attention)
class LinearizedViTAttention(TimmAttention, timm.layers.Attention):
    """`timm.layers.Attention`, of ViT, DeiT, DINOv2, CLIP and SigLIP."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        token_mask = token_mask_of(attn_mask, is_causal, x)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        projections: tuple[Tensor, ...] = (qkv,)
        is_normed = not (isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity))
        if is_normed:
            projections = tuple(rows.unsqueeze(2) for rows in self.normed(*qkv.unbind(2)))
        out = self.attend_linearly(
            *projections,
            scale=self.scale,
            x=x,
            token_mask=token_mask,
            query_mask=token_mask,
            mean_query=None if is_normed or not is_plain(self.qkv, nn.Linear) else self.mean_query,
        )
        return self.finish(out, x)

    def mean_query(self, token_mean: Tensor) -> Tensor:
        """(B, C) → (B, 1, heads, d). Not a call of `qkv`, whose hooks would see another input."""
        channels = self.num_heads * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[:channels]
        return F.linear(token_mean, self.qkv.weight[:channels], bias).unflatten(-1, (1, self.num_heads, -1))


class RotaryAttention(TimmAttention):
    """Rotary positions are a linear map of each query and key, so the expansion keeps them exactly."""

    def project(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, N, C) → q, k and v (B, N, heads, d)"""
        if self.qkv is not None:
            bias = None
            if getattr(self, "q_bias", None) is not None:
                bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            qkv = self.qkv(x) if bias is None else F.linear(x, self.qkv.weight, bias)
            q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
            return q, k, v
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in projections)
        return q, k, v

    def rotate(self: Any, rows: Tensor, rope: Tensor | None) -> Tensor:
        if rope is None:
            return rows
        prefix, tokens = rows.transpose(1, 2).tensor_split([self.num_prefix_tokens], dim=2)
        tokens = apply_rot_embed_cat(tokens, rope, half=getattr(self, "rotate_half", False))
        return torch.cat([prefix, tokens], dim=2).to(rows.dtype).transpose(1, 2)

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        token_mask = token_mask_of(attn_mask, is_causal, x)
        q, k, v = self.normed(*self.project(x))
        q, k = self.rotate(q, rope), self.rotate(k, rope)
        if (groups := self.num_heads // k.shape[2]) > 1:  # heads that share their keys and values
            k, v = (rows.repeat_interleave(groups, dim=2) for rows in (k, v))
        projections = (rows.unsqueeze(2) for rows in (q, k, v))
        out = self.attend_linearly(*projections, scale=self.scale, x=x, token_mask=token_mask, query_mask=token_mask)
        return self.finish(out, x)


@register(timm.layers.AttentionRope)
class LinearizedRotaryAttention(RotaryAttention, timm.layers.AttentionRope):
    """`timm.layers.AttentionRope`, of ViTs with rotary positions; keys may have fewer heads than queries."""


@register(eva.EvaAttention)
class LinearizedEvaAttention(RotaryAttention, eva.EvaAttention):
    """The attention of EVA, EVA-02 and DINOv3."""


class SwinAttention(Window, WholeHeads):
    """Swin's windows. The bias of relative positions is kept to first order, regions of shifted windows exactly."""

    gets_grid = has_bias = True

    def project(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        """x (B, N, C) → q, k and v (B, N, heads, d), or one tensor (B, N, 3, heads, d)"""
        return (self.qkv(x).unflatten(-1, (3, self.num_heads, -1)),)

    def position_bias(self) -> Tensor:
        """(heads, N, N)"""
        raise NotImplementedError

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.attend_linearly(
            *self.project(x),
            scale=getattr(self, "scale", 1.0),
            x=x,
            grid=self.window_size,
            bias=self.position_bias(),
            regions=None if mask is None else number_regions(mask == 0).repeat(x.shape[0] // mask.shape[0], 1),
        )
        return self.proj_drop(self.proj(out.flatten(2)))


@register(swin_transformer.WindowAttention)
class LinearizedWindowAttention(SwinAttention, swin_transformer.WindowAttention):
    """The windows of Swin."""

    def position_bias(self) -> Tensor:
        return self._get_rel_pos_bias()[0]


class CosineAttention(SwinAttention):
    """Logits are cosines times a learned factor of each head. It becomes a factor of q, which the expansion keeps."""

    is_written_out = False

    def cosines(self: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        factor = self.logit_scale.clamp(max=math.log(100)).exp().view(-1, 1)
        q, k = factor * F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return tuple(rows.to(v.dtype).unsqueeze(2) for rows in (q, k, v))


@register(swin_transformer_v2.WindowAttention)
class LinearizedWindowAttentionV2(CosineAttention, swin_transformer_v2.WindowAttention):
    """The windows of Swin v2."""

    def project(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        bias = None if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return self.cosines(F.linear(x, self.qkv.weight, bias))

    def position_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, 2)
        return 16 * table[self.relative_position_index].sigmoid().permute(2, 0, 1)


@register(swin_transformer_v2_cr.WindowMultiHeadAttention)
class LinearizedWindowAttentionCR(CosineAttention, swin_transformer_v2_cr.WindowMultiHeadAttention):
    """The windows of timm's other Swin v2."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.cosines(self.qkv(x))

    def position_bias(self) -> Tensor:
        return self._relative_positional_encodings()[0]


class LevitAttention(LinearizedAttention):
    """Keys and values of different size, and a bias of relative positions. Maps are (B, C, height, width) or rows."""

    gets_grid = has_bias = True
    is_written_out = False

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        return module.num_heads, module.val_dim

    @classmethod
    def num_tokens(cls, module: Any) -> int:
        return module.attention_bias_idxs.shape[1]

    def project(self: Any, layer: nn.Module, x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """x → one tensor (B, N, 1, heads, size) for each size"""
        out = layer(x)
        rows = out.flatten(2).mT if out.ndim == 4 else out
        return rows.unflatten(-1, (1, self.num_heads, sum(sizes))).split(sizes, dim=-1)

    def attend(self: Any, x: Tensor, *projections: Tensor, grid: Grid | None = None) -> Tensor:
        bias = self.get_attention_biases(x.device)
        out = self.attend_linearly(*projections, scale=self.scale, grid=grid, bias=bias).flatten(2)
        if x.ndim == 4:
            assert grid is not None
            out = out.mT.unflatten(2, grid)
        return self.proj(out)


class LevitSelfAttention(LevitAttention):
    def forward(self: Any, x: Tensor) -> Tensor:
        projections = self.project(self.qkv, x, self.key_dim, self.key_dim, self.val_dim)
        return self.attend(x, *projections, grid=getattr(self, "resolution", None))


@register(levit.Attention)
class LinearizedLevitAttention(LevitSelfAttention, levit.Attention):
    """The attention of LeViT."""


@register(levit.AttentionDownsample)
class LinearizedLevitDownsample(NoMap, LevitAttention, levit.AttentionDownsample):
    """The attention between LeViT's stages. There are fewer queries than keys."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q = self.project(self.q, x, self.key_dim)
        k, v = self.project(self.kv, x, self.key_dim, self.val_dim)
        height, width = (-(-side // self.stride) for side in self.resolution)
        return self.attend(x, *q, k, v, grid=(height, width))


@register(efficientformer.Attention)
class LinearizedEfficientFormerAttention(NoMap, LevitSelfAttention, efficientformer.Attention):
    """The attention of EfficientFormer's last blocks."""


@register(shvit.SHSA)
class LinearizedPartialAttention(LinearizedAttention, shvit.SHSA):
    """The attention of SHViT: one head, of some of the channels."""

    gets_grid = True
    is_written_out = False

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        return 1, module.pdim

    def forward(self, x: Tensor) -> Tensor:
        attending, others = x.tensor_split([self.pdim], dim=1)
        rows = self.qkv(self.pre_norm(attending)).flatten(2).mT[:, :, None, None]  # (B, N, 1, 1, C)
        q, k, v = rows.split([self.qk_dim, self.qk_dim, self.pdim], dim=-1)
        grid = (x.shape[2], x.shape[3])
        out = self.attend_linearly(q, k, v, scale=self.scale, grid=grid).flatten(2).mT.unflatten(2, grid)
        return self.proj(torch.cat([out, others], dim=1))


@register(tnt.Attention)
class LinearizedTntAttention(NoMap, tnt.Attention):
    """The attention of TNT: of the pixels of a patch, and of the patches. A module does not know which of the two."""

    is_written_out = False

    def forward(self, x: Tensor) -> Tensor:
        qk = self.qk(x).unflatten(-1, (2, self.num_heads, self.head_dim))
        v = self.v(x).unflatten(-1, (1, self.num_heads, -1))
        out = self.attend_linearly(qk, v, scale=self.scale)
        return self.proj_drop(self.proj(out.flatten(2)))


@register(pvt_v2.Attention)
class LinearizedReducedAttention(LinearizedAttention, pvt_v2.Attention):
    """The attention of PVT-v2. With reduced keys there are fewer keys than queries, and no local residual."""

    gets_grid = True

    @classmethod
    def has_map(cls, module: Any) -> bool:
        return module.sr is None and module.pool is None

    @classmethod
    def maps(cls, module: Any, x: Tensor, feat_size: Any, *args: Any) -> tuple[Grid, Grid] | None:
        grid = (feat_size[0], feat_size[1])
        if module.pool is not None:
            return grid, (module.pool.output_size, module.pool.output_size)
        step = 1 if module.sr is None else module.sr.stride[0]
        return grid, (grid[0] // step, grid[1] // step)

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        grid = (feat_size[0], feat_size[1])
        keys = x
        if self.sr is not None:
            keys = x.transpose(1, 2).unflatten(2, grid)
            keys = self.norm(self.sr(keys if self.pool is None else self.pool(keys)).flatten(2).mT)
            keys = keys if self.act is None else self.act(keys)
        out = self.attend_linearly(
            self.q(x).unflatten(-1, (1, self.num_heads, self.head_dim)),
            self.kv(keys).unflatten(-1, (2, self.num_heads, self.head_dim)),
            scale=self.scale,
            x=x,
            grid=grid,
        )
        return self.proj_drop(self.proj(out.flatten(2)))
