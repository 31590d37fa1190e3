"""The published models and their softmax baselines; importing this registers them with timm."""

# isort: off
# In the order of the paper's tables, in which the models are listed.
from .deit import DeiT
from .pvt import PVT
from .swin import Swin
from .cswin import CSwin
# isort: on

from .registry import create_model, list_models

__all__ = ["CSwin", "DeiT", "PVT", "Swin", "create_model", "list_models"]
