"""Modules built from the operations."""

from .attention import (
    ATTENTIONS,
    Attention,
    InLineAttention,
    LinearAttention,
    LocalSoftmaxAttention,
    MappedSoftmaxAttention,
    SoftmaxAttention,
    register_attention,
)
from .baselines import AngularAttention, EfficientAttention, EnhancedAttention, FocusedAttention, HydraAttention
from .block import Block
from .embed import PatchConv2d, PatchEmbed
from .family import MALAAttention, PolaFormerAttention, RALAAttention, TangentAttention
from .local import LocalWeight

__all__ = [
    "ATTENTIONS",
    "AngularAttention",
    "Attention",
    "Block",
    "EfficientAttention",
    "EnhancedAttention",
    "FocusedAttention",
    "HydraAttention",
    "InLineAttention",
    "LinearAttention",
    "LocalSoftmaxAttention",
    "LocalWeight",
    "MALAAttention",
    "MappedSoftmaxAttention",
    "PatchConv2d",
    "PatchEmbed",
    "PolaFormerAttention",
    "RALAAttention",
    "SoftmaxAttention",
    "TangentAttention",
    "register_attention",
]
