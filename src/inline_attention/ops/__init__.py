"""The mathematics, as functions of tensors."""

from .attention import (
    attention_matrix,
    inline_attention,
    inline_attention_packed,
    inline_attention_projected,
    linear_attention,
    local_residual,
)
from .feature_maps import FEATURE_MAPS

__all__ = [
    "FEATURE_MAPS",
    "attention_matrix",
    "inline_attention",
    "inline_attention_packed",
    "inline_attention_projected",
    "linear_attention",
    "local_residual",
]
