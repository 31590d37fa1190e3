"""The published models and their softmax baselines; importing this registers them with timm."""

from .cswin import CSwin
from .deit import DeiT
from .pvt import PVT
from .registry import create_model, list_models
from .swin import Swin

__all__ = ["CSwin", "DeiT", "PVT", "Swin", "create_model", "list_models"]
