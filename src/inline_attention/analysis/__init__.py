"""The paper's measurements, as functions of models and images that return numbers; pictures of them are in `plots`."""

from .confusion import ConfusionResult, measure_confusion
from .extract import LayerAttention, capture, layer_names, observe
from .injectivity import InjectivityResult, measure_injectivity, plane_weights
from .locality import LocalityResult, measure_locality
from .maps import MapsResult, attention_maps
from .masking import MaskingResult, measure_masking
from .rank import RankResult, measure_rank

__all__ = [
    "LayerAttention",
    "capture",
    "layer_names",
    "observe",
    "InjectivityResult",
    "measure_injectivity",
    "plane_weights",
    "ConfusionResult",
    "measure_confusion",
    "LocalityResult",
    "measure_locality",
    "MapsResult",
    "attention_maps",
    "MaskingResult",
    "measure_masking",
    "RankResult",
    "measure_rank",
]
