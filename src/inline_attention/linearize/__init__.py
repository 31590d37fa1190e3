"""Softmax attention of a trained model turned into a linear one: known modules, conversion, calibration, report."""

from contextlib import suppress

from inline_attention.layers.token_grid import GridSource

from . import (  # noqa: F401 (they register themselves)
    files,
    own_modules,
    timm_fused_modules,
    timm_modules,
    timm_unconverted,
    torchvision_modules,
)
from .calibration import Costs, LayerCost, calibrate, layer_costs
from .convert import Layer, Linearization, Report, linearize, restore
from .modules import FORMS, LinearizedAttention, register

with suppress(ImportError):  # an older timm
    from . import timm_recent_modules  # noqa: F401

__all__ = [
    "FORMS",
    "Costs",
    "GridSource",
    "Layer",
    "LayerCost",
    "Linearization",
    "LinearizedAttention",
    "Report",
    "calibrate",
    "layer_costs",
    "linearize",
    "register",
    "restore",
]
