"""Detectors from and for weights files."""

import json
from dataclasses import dataclass
from typing import Any

from inline_attention.dense.detection.config import DetectionDataConfig, DetectorConfig
from inline_attention.dense.detection.model import HEADS, Detector, create_detector
from inline_attention.dense.weights import find_weights, load_whole, read_configuration, restore_whole, task_file

TASK = "detection"  # in the metadata of a file
_PREPARATION = ("short_side", "max_side")  # what of the data configuration belongs to the weights


def title(config: DetectorConfig) -> str:
    return f"{config.name} + {HEADS[config.head][0]}"


def arguments_of(config: DetectorConfig) -> dict[str, Any]:
    """What builds the model again, beside its backbone's name and its class count."""
    return {"head": config.head, "channels": config.channels, "kwargs": config.kwargs}


def preparation(config: DetectionDataConfig) -> str:
    """What a weights file should say about its images, under the key "preprocessing"."""
    return json.dumps({key: getattr(config, key) for key in _PREPARATION})


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
    config, data = read_configuration(
        found, DetectorConfig(), DetectionDataConfig(), arguments=("head", "channels"), preparation=_PREPARATION
    )
    model, class_names = restore_whole(found, lambda num_classes: build(config, num_classes=num_classes))
    return TrainedDetector(model, title(config), class_names, data)
