"""Detectors from and for weights files."""

import json
from dataclasses import dataclass
from typing import Any

from inline_attention.dense.detection.config import DetectionDataConfig, DetectorConfig
from inline_attention.dense.detection.model import HEADS, Detector, create_detector
from inline_attention.dense.weights import find_weights, load_whole, task_file

TASK = "detection"  # in the metadata of a file


def title(config: DetectorConfig) -> str:
    return f"{config.name} + {HEADS[config.head][0]}"


def arguments_of(config: DetectorConfig) -> dict[str, Any]:
    """What builds the model again, beside its backbone's name and its class count."""
    return {"head": config.head, "channels": config.channels, "kwargs": config.kwargs}


def preparation(config: DetectionDataConfig) -> str:
    """What a weights file should say about its images and where they were evaluated, under "preprocessing"."""
    return json.dumps({"short_side": config.short_side, "max_side": config.max_side, "val_split": config.val_split})


def build(config: DetectorConfig, *, num_classes: int) -> Detector:
    """The detector, with the weights that the configuration names: a detector's, or a classifier's below the heads."""
    whole, source = find_weights(config.weights, TASK)
    model = create_detector(
        config.name,
        config.head,
        num_classes=num_classes,
        weights=source,
        drop_path=config.drop_path,
        kwargs=config.kwargs,
        channels=config.channels,
        regions=config.regions,
    )
    if whole is not None:
        load_whole(model, whole, backbone_only=config.reset_head)
    return model


@dataclass
class TrainedDetector:
    """A detector from a weights file, with what the file says about it."""

    model: Detector
    title: str
    class_names: list[str]
    data: DetectionDataConfig  # how images are prepared


def load_detector(weights: str) -> TrainedDetector:
    """A detector from a weights file (or its URL) that `inline detect train` wrote."""
    found = task_file(weights, TASK)
    if found is None:
        raise ValueError(f"{weights!r} is no weights file of `inline detect train`")
    path, metadata = found
    class_names = json.loads(metadata["class_names"])
    config = DetectorConfig(name=metadata["architecture"], **json.loads(metadata["config"]))
    model = build(config, num_classes=len(class_names))
    load_whole(model, path)
    return TrainedDetector(
        model.eval(), title(config), class_names, DetectionDataConfig(**json.loads(metadata["preprocessing"]))
    )
