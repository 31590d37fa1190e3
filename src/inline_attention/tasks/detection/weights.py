"""Detectors from and for weights files."""

from inline_attention.tasks.dense.weights import TaskModels, TrainedModel
from inline_attention.tasks.detection.config import DetectionDataConfig, DetectorConfig
from inline_attention.tasks.detection.model import HEADS, Detector, create_detector

TrainedDetector = TrainedModel[Detector, DetectionDataConfig]

MODELS: TaskModels[Detector, DetectorConfig, DetectionDataConfig] = TaskModels(
    task="detection",
    command="inline detect train",
    create=create_detector,
    heads=HEADS,
    model=DetectorConfig(),
    data=DetectionDataConfig(),
    arguments=("channels",),
    preparation=("short_side", "max_side", "val_split"),
    unstored=("regions",),
)


def load_detector(weights: str) -> TrainedDetector:
    """A detector from a weights file (or its URL) that `inline detect train` wrote."""
    return MODELS.load(weights)
