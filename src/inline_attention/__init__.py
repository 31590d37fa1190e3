"""InLine attention for vision: one exact linear attention, and the published models behind timm's contract."""

from inline_attention._version import __version__
from inline_attention.layers import InLineAttention, LinearAttention, SoftmaxAttention
from inline_attention.linearize import linearize, restore
from inline_attention.models import create_model, list_models
from inline_attention.models.weights import load_model, load_weights, save_weights
from inline_attention.ops import (
    attention_matrix,
    inline_attention,
    inline_attention_packed,
    linear_attention,
    linear_attention_packed,
    set_backend,
    tangent_attention,
    use_backend,
)
from inline_attention.optimize import optimize

__all__ = [
    "InLineAttention",
    "LinearAttention",
    "SoftmaxAttention",
    "__version__",
    "attention_matrix",
    "create_model",
    "inline_attention",
    "inline_attention_packed",
    "linear_attention",
    "linear_attention_packed",
    "linearize",
    "list_models",
    "load_model",
    "load_weights",
    "optimize",
    "restore",
    "save_weights",
    "set_backend",
    "tangent_attention",
    "use_backend",
]
