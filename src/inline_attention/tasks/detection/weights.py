"""Detectors from and for weights files."""

from inline_attention.tasks.dense.weights import TaskModels, TrainedModel
from inline_attention.tasks.detection.config import DetectionDataConfig, DetectorConfig
from inline_attention.tasks.detection.model import HEADS, Detector, create_detector

TrainedDetector = TrainedModel[Detector, DetectionDataConfig]


def _create(config: DetectorConfig, num_classes: int, weights: str | None) -> Detector:
    return create_detector(
        config.name,
        config.head,
        num_classes=num_classes,
        weights=weights,
        drop_path=config.drop_path,
        kwargs=config.kwargs,
        channels=config.channels,
        regions=config.regions,
    )


MODELS: TaskModels[Detector, DetectorConfig, DetectionDataConfig] = TaskModels(
    task="detection",
    command="inline detect train",
    create=_create,
    title=lambda config: f"{config.name} + {HEADS[config.head][0]}",
    model=DetectorConfig(),
    data=DetectionDataConfig(),
    arguments=("head", "channels"),
    preparation=("short_side", "max_side", "val_split"),
)


def load_detector(weights: str) -> TrainedDetector:
    """A detector from a weights file (or its URL) that `inline detect train` wrote."""
    return MODELS.load(weights)
