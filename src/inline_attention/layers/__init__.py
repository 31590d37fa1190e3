"""Modules built from the operations."""

# Each of these files registers its attentions. Messages list them in this order.
# isort: off
from .inline import InLineAttention, LinearAttention
from .softmax import LocalSoftmaxAttention, MappedSoftmaxAttention, SoftmaxAttention
from .baselines import AngularAttention, EfficientAttention, EnhancedAttention, FocusedAttention, HydraAttention
from .family import MALAAttention, PolaFormerAttention, RALAAttention
from .tangent import TangentAttention
# isort: on

from .attention import Attention
from .block import Block
from .embed import PatchConv2d, PatchEmbed
from .local import LocalWeight
from .registry import ATTENTIONS, register_attention

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
