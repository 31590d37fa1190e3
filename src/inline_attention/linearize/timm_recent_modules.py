"""Attention modules that timm has since 1.0.30."""

from typing import Any

from timm.models import cpubone, gemma4_vit, iformer, lowformer
from torch import Tensor

from inline_attention.ops import Grid

from .modules import register
from .timm_fused_modules import FusedAttention, MapAttention, NoMap


@register(iformer.SHMA)
class LinearizedSingleHeadAttention(MapAttention, iformer.SHMA):
    """The attention of iFormer, in windows and of the whole map."""

    def token_map(self, x: Tensor, *args: Any) -> Grid:
        return (self.window_size, self.window_size) if self.window_size else super().token_map(x)

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        return 1, module.proj.c.in_channels

    @classmethod
    def num_tokens(cls, module: Any) -> int | None:
        return module.window_size**2 or None


@register(lowformer.ConvAttention)
class LinearizedLowFormerAttention(NoMap, FusedAttention, lowformer.ConvAttention):
    """The attention of LowFormer, on a reduced map."""


@register(cpubone.ConvAttention)
class LinearizedCpuBoneAttention(NoMap, FusedAttention, cpubone.ConvAttention):
    """The attention of CPUBone, on a reduced map."""


@register(gemma4_vit.Gemma4Attention)
class LinearizedGemma4Attention(NoMap, FusedAttention, gemma4_vit.Gemma4Attention):
    """The attention of Gemma 4's image encoder."""
