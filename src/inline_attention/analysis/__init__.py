"""The paper's measurements, as functions of models and images that return numbers.

Each is a file in `measures`, with its table and its figure. `capture` and `observe` return the attention layers of a
running model, written out as matrices.
"""

from .base import Analysis, Findings, Subject
from .hooks import capture, layer_names, observe
from .measures import analysis_class, analysis_names
from .measures.confusion import ConfusionResult, measure_confusion
from .measures.injectivity import InjectivityResult, measure_injectivity, plane_weights
from .measures.locality import LocalityResult, measure_locality
from .measures.maps import MapsResult, attention_maps
from .measures.masking import MaskingResult, measure_masking
from .measures.rank import RankResult, measure_rank
from .record import LayerAttention

__all__ = [
    "Analysis",
    "ConfusionResult",
    "Findings",
    "InjectivityResult",
    "LayerAttention",
    "LocalityResult",
    "MapsResult",
    "MaskingResult",
    "RankResult",
    "Subject",
    "analysis_class",
    "analysis_names",
    "attention_maps",
    "capture",
    "layer_names",
    "measure_confusion",
    "measure_injectivity",
    "measure_locality",
    "measure_masking",
    "measure_rank",
    "observe",
    "plane_weights",
]
