"""The attention modules of timm: vision transformers with and without rotary positions, Swin, PVT-v2."""

from typing import Any

import timm.layers
import torch
from timm.layers import apply_rot_embed_cat
from timm.models import eva, pvt_v2, swin_transformer
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.layers.token_grid import GridSource, find_patches, token_mask_of

from .modules import LEFT_ALONE, LinearizedAttention, number_regions, register

LEFT_ALONE.update(
    dict.fromkeys(
        (
            timm.layers.AttentionPoolLatent,
            timm.layers.AttentionPoolPrr,
            timm.layers.AttentionPool2d,
            timm.layers.RotAttentionPool2d,
        ),
        "softmax, left alone: it pools",
    )
)


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
        if not (isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)):
            projections = tuple(rows.unsqueeze(2) for rows in self.normed(*qkv.unbind(2)))
        out = self.attend_linearly(*projections, scale=self.scale, x=x, token_mask=token_mask, query_mask=token_mask)
        return self.finish(out, x)


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


@register(swin_transformer.WindowAttention)
class LinearizedWindowAttention(LinearizedAttention, swin_transformer.WindowAttention):
    """Swin's windows. The bias of relative positions is kept to first order, regions of shifted windows exactly."""

    gets_grid = True

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        return module.num_heads, module.qkv.out_features // 3 // module.num_heads

    @classmethod
    def num_tokens(cls, module: Any) -> int:
        return module.window_area

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.attend_linearly(
            self.qkv(x).unflatten(-1, (3, self.num_heads, -1)),
            scale=self.scale,
            x=x,
            grid=self.window_size,
            bias=self._get_rel_pos_bias()[0],
            regions=None if mask is None else number_regions(mask == 0).repeat(x.shape[0] // mask.shape[0], 1),
        )
        return self.proj_drop(self.proj(out.flatten(2)))


@register(pvt_v2.Attention)
class LinearizedReducedAttention(LinearizedAttention, pvt_v2.Attention):
    """The attention of PVT-v2. With reduced keys there are fewer keys than queries, and no local residual."""

    gets_grid = True

    @classmethod
    def has_map(cls, module: Any) -> bool:
        return module.sr is None and module.pool is None

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
