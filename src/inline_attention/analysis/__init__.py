"""The paper's measurements, as functions of models and images that return numbers; pictures of them are in `plots`."""

from .capture import LayerAttention, capture, layer_names, observe

__all__ = ["LayerAttention", "capture", "layer_names", "observe"]
