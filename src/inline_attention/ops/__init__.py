"""The mathematics, as functions of tensors."""

from .attention import (
    attention_matrix,
    inline_attention,
    inline_attention_packed,
    inline_attention_projected,
    linear_attention,
    local_residual,
)
from .backends import Backend, get_backend, set_backend, use_backend
from .feature_maps import FEATURE_MAPS, FeatureMap
from .local import Grid
from .local_weight import make_local_weight

__all__ = [
    "FEATURE_MAPS",
    "Backend",
    "FeatureMap",
    "Grid",
    "attention_matrix",
    "get_backend",
    "inline_attention",
    "inline_attention_packed",
    "inline_attention_projected",
    "linear_attention",
    "local_residual",
    "make_local_weight",
    "set_backend",
    "use_backend",
]
