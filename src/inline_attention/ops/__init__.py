"""The mathematics, as functions of tensors."""

from .attention import (
    NORMALIZATIONS,
    Normalization,
    inline_attention,
    inline_attention_packed,
    inline_attention_projected,
    linear_attention,
    linear_attention_packed,
    linear_attention_projected,
    local_residual,
    tangent_attention,
    tangent_attention_projected,
)
from .backends import Backend, get_backend, set_backend, use_backend
from .feature_maps import FEATURE_MAPS, FeatureMap
from .local import Grid, LocalSource
from .local_weight import make_local_weight
from .matrix import attention_matrix
from .mlp import add_mlp
from .normed_linear import norm_linear
from .projections import OutputProjection

__all__ = [
    "FEATURE_MAPS",
    "NORMALIZATIONS",
    "Backend",
    "FeatureMap",
    "Grid",
    "LocalSource",
    "Normalization",
    "OutputProjection",
    "add_mlp",
    "attention_matrix",
    "get_backend",
    "inline_attention",
    "inline_attention_packed",
    "inline_attention_projected",
    "linear_attention",
    "linear_attention_packed",
    "linear_attention_projected",
    "local_residual",
    "make_local_weight",
    "norm_linear",
    "set_backend",
    "tangent_attention",
    "tangent_attention_projected",
    "use_backend",
]
