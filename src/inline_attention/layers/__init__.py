"""Modules built from the operations."""

from .attention import ATTENTIONS, Attention, InLineAttention, LinearAttention, SoftmaxAttention
from .block import Block
from .embed import PatchEmbed
from .local import LocalKernel

__all__ = [
    "ATTENTIONS",
    "Attention",
    "Block",
    "InLineAttention",
    "LinearAttention",
    "LocalKernel",
    "PatchEmbed",
    "SoftmaxAttention",
]
