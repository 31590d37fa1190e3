"""The linear attentions that InLine attention is compared with, written from their definitions.

Each class has `global_attention` and `weights`, the same as a matrix. `tests/layers/test_baselines.py` compares both
with a version written token by token. x̂ stands for x / ‖x‖.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.ops import Grid, attention_matrix, linear_attention_projected
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import accumulation_dtype, token_count, without_autocast, zero_absent

from .attention import Attention
from .embed import resize_map, with_value
from .local import LocalTerm
from .registry import register_attention
from .tokens import scores, through_state

FOCUSED_EPS = 1e-6


def unit(x: Tensor) -> Tensor:
    """Rows (…, d) divided by their norm, zero for a row of zeros. At least float32: float16 rounds the eps to zero."""
    return F.normalize(x.to(accumulation_dtype(x.dtype)), dim=-1)


def unit_tokens(x: Tensor) -> Tensor:
    """Tokens (B, N, heads, d) divided by their norm over all features, in at least float32"""
    return unit(x.flatten(2)).view_as(x)


@register_attention
class HydraAttention(Attention):
    """As many heads as features: out_i = q̂_i ⊙ Σ_j (k̂_j ⊙ v_j), norms over all features.

    "Hydra Attention: Efficient Attention with Many Heads", arXiv 2209.07484.
    """

    kind = "hydra"

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        state = (zero_absent(unit_tokens(k), token_mask) * zero_absent(v, token_mask)).sum(1, keepdim=True)
        return (unit_tokens(q) * state).to(v.dtype)

    def operands(self, projections: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """One head per feature: (B, N, C, 1)"""
        q, k, v = unstack(projections)
        q, k, v = (x.flatten(2)[..., None] for x in (unit_tokens(q), unit_tokens(k), v))
        return q, k, v

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        return scores(q[:, rows], k, mask)


@register_attention
class EfficientAttention(Attention):
    """Queries through a softmax over features, keys through one over tokens: out = ρ(q) (ρ(k)ᵀ v).

    "Efficient Attention: Attention with Linear Complexities", WACV 2021, arXiv 1812.01243.
    """

    kind = "efficient"

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        dtype = accumulation_dtype(q.dtype)
        k, count = k.to(dtype), token_count(k, token_mask)
        if token_mask is not None:
            # Finite, because the softmax of −inf alone, where a sample has no token, is NaN. Such a sample's v is zero.
            k = k.masked_fill(~token_mask[:, :, None, None], torch.finfo(dtype).min)
        # Each feature of ρ(k) sums to one over the tokens, and ρ(q) to one over the features. So a row of weights sums
        # to one by itself, and "subtract", which takes the row's mean away and adds 1/N, changes nothing.
        rows = (x.to(dtype).unsqueeze(2) for x in (q.to(dtype).softmax(-1), count * k.softmax(1), v))
        return linear_attention_projected(
            *rows,
            normalization="subtract",
            feature_map="identity",
            scale=1.0,
            token_mask=token_mask,
            query_mask=token_mask,
            backend=self.backend,
        ).to(v.dtype)

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        q = q[:, rows].softmax(-1)
        if mask is None:
            return scores(q, k.softmax(1), None)
        # Each query has its own sum, over the tokens that it sees.
        p = (k - k.amax(1, keepdim=True)).exp()
        sums = mask.to(p.dtype) @ p.transpose(1, 2)  # (B, heads, rows, d)
        return scores(q / sums.transpose(1, 2).clamp(min=torch.finfo(p.dtype).tiny), p, mask)


@register_attention
class AngularAttention(Attention):
    """Linear angular attention: y_i = ½·v_i + (1/π)·q̂_i (Σ_j k̂_j v_jᵀ), out_i = y_i / ‖y_i‖ + a convolution of v.

    The convolution has 9 taps along the sequence of all tokens and one filter per head.
    "Castling-ViT: Compressing Self-Attention via Switching Towards Linear-Angular Attention", CVPR 2023,
    arXiv 2211.10526.
    """

    kind = "angular"
    masks_padding = False  # the convolution runs from the end of one row of the map into the next

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.conv = nn.Conv2d(
            num_heads, num_heads, (9, 1), padding=(4, 0), groups=num_heads, bias=False, **self.factory
        )

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        v = zero_absent(v, token_mask)
        y = 0.5 * v + through_state(unit(q), zero_absent(unit(k), token_mask), v) / math.pi
        return self.normalise(y).to(v.dtype) + self.conv(v.transpose(1, 2)).transpose(1, 2)

    def operands(self, projections: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = unstack(projections)
        return unit(q), unit(k), v

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        own = torch.eye(k.shape[1], dtype=torch.bool, device=k.device)[rows]
        if mask is not None:
            own = own & mask
        return scores(q[:, rows], k, mask) / math.pi + 0.5 * own

    def normalise(self, out: Tensor) -> Tensor:
        return unit(out)

    def local_terms(self, local_weight: Tensor | None) -> list[LocalTerm]:
        filters = self.conv.weight[:, 0].mT.repeat_interleave(self.head_dim, 0)  # (C, 1, 9)
        return [*super().local_terms(local_weight), LocalTerm(filters[None], on_map=False)]


class MapConv(nn.Conv2d):
    """A 5×5 depthwise convolution of v on the token map. Prefix tokens take no part.

    With the channels of one head, all heads share the filters. (B, N, heads, d) → the same
    """

    def __init__(self, channels: int, **factory: Any) -> None:
        super().__init__(channels, channels, 5, padding=2, groups=channels, **factory)

    def on_tokens(self, v: Tensor, grid: Grid, *, num_prefix_tokens: int) -> Tensor:
        batch, _, *heads = v.shape
        maps = v[:, num_prefix_tokens:].permute(0, 2, 3, 1).reshape(-1, self.in_channels, *grid)
        out = self(maps).reshape(batch, *heads, math.prod(grid)).permute(0, 3, 1, 2)
        return F.pad(out, (0, 0, 0, 0, num_prefix_tokens, 0))

    def local_term(self, dim: int) -> LocalTerm:
        assert self.bias is not None
        copies = dim // self.in_channels
        return LocalTerm(self.weight[:, 0].repeat(copies, 1, 1)[None], self.bias.repeat(copies))


@register_attention
class EnhancedAttention(Attention):
    """Vanilla ReLU linear attention and a 5×5 depthwise convolution of v on the map.

    "EfficientViT: Multi-Scale Linear Attention for High-Resolution Dense Prediction", ICCV 2023, arXiv 2205.14756.
    """

    kind = "enhanced"

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.conv = MapConv(dim, **self.factory)

    def uses_grid(self) -> bool:
        return True

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        rows = (x.unsqueeze(2) for x in (q, k, v))
        out = linear_attention_projected(*rows, token_mask=token_mask, query_mask=token_mask, backend=self.backend)
        v = zero_absent(v, token_mask)
        return out + self.conv.on_tokens(v, grid, num_prefix_tokens=self.num_prefix_tokens)

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        return attention_matrix(q[:, rows], k, kind="linear", feature_map="relu", pair_mask=mask)

    def local_terms(self, local_weight: Tensor | None) -> list[LocalTerm]:
        return [*super().local_terms(local_weight), self.conv.local_term(self.num_heads * self.head_dim)]


@register_attention
class FocusedAttention(Attention):
    """Focused linear attention: queries and keys are cubed, and keep their norm.

    Keys get a learned position. q and k pass a ReLU and are divided by a learned scale per channel. Then
    x ← ‖x‖·x³ / ‖x³‖ with norms over all features, linear attention, and a 5×5 depthwise convolution of v whose filters
    the heads share.
    "FLatten Transformer: Vision Transformer using Focused Linear Attention", ICCV 2023, arXiv 2308.00442.

    Args:
        grid: (height, width) of the token map that the positions are for. They are resized to other maps.
    """

    kind = "focused"
    follows = ("local_residual",)
    masks_padding = False  # learned positions are resized to the image's own map

    def __init__(self, dim: int, num_heads: int, *, grid: Grid | None = None, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if grid is None:
            raise ValueError("focused attention learns positions: pass grid=(height, width) of the token map")
        self.position_map = nn.Parameter(torch.empty(1, *grid, dim, **self.factory))
        self.prefix_position = None
        if self.num_prefix_tokens:
            self.prefix_position = nn.Parameter(torch.empty(1, self.num_prefix_tokens, dim, **self.factory))
        self.feature_scale = nn.Parameter(torch.empty(dim, **self.factory))
        self.conv = MapConv(self.head_dim, **self.factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.position_map, self.prefix_position, self.feature_scale):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def uses_grid(self) -> bool:
        return True

    def set_grid(self, grid: Grid) -> None:
        self.position_map = with_value(self.position_map, resize_map(self.position_map, grid, mode="bicubic"))

    def focus(self, x: Tensor) -> Tensor:
        """(B, N, C) → the same"""
        x = (F.relu(x) + FOCUSED_EPS) / F.softplus(self.feature_scale)
        cube = x**3
        return cube * (x.norm(dim=-1, keepdim=True) / cube.norm(dim=-1, keepdim=True))

    def sharpen(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """q and k (B, N, heads, d) as their products are taken, in at least float32"""
        dtype = accumulation_dtype(q.dtype)
        positions = resize_map(self.position_map, grid, mode="bicubic").flatten(1, 2)
        if self.prefix_position is not None:
            positions = torch.cat([self.prefix_position, positions], 1)
        with without_autocast(q.device):
            q_, k_ = q.flatten(2).to(dtype), k.flatten(2).to(dtype) + positions.to(dtype)
            return self.focus(q_).view_as(q), self.focus(k_).view_as(k)

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        q, k = self.sharpen(q, k, grid)
        # The operation adds 1e-6 to a sum, and this attention to a mean: hence the division of q.
        rows = (x.unsqueeze(2) for x in (q / token_count(k, token_mask), k, v.to(q.dtype)))
        out = linear_attention_projected(
            *rows, feature_map="identity", token_mask=token_mask, query_mask=token_mask, backend=self.backend
        ).to(v.dtype)
        v = zero_absent(v, token_mask)
        return out + self.conv.on_tokens(v, grid, num_prefix_tokens=self.num_prefix_tokens)

    def operands(self, projections: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = unstack(projections)
        return *self.sharpen(q, k, grid), v

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        count = k.shape[1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        shares = scores(q[:, rows], k, mask) / count
        return shares / (shares.sum(-1, keepdim=True) + FOCUSED_EPS)

    def local_terms(self, local_weight: Tensor | None) -> list[LocalTerm]:
        return [*super().local_terms(local_weight), self.conv.local_term(self.num_heads * self.head_dim)]
