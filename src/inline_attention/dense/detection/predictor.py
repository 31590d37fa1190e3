"""A trained detector from its weights file, and what it needs to look at images."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from PIL import Image

from inline_attention.dense.detection.average_precision import ImageResult
from inline_attention.dense.detection.coco import AnnotatedImage, CocoData
from inline_attention.dense.detection.data import DetectionDataConfig
from inline_attention.dense.detection.model import HEADS, Detector, create_detector
from inline_attention.models.weights import local_path, read_metadata


@dataclass
class TrainedDetector:
    title: str
    model: Detector
    class_names: list[str]
    data: DetectionDataConfig  # how its images are prepared


def load_detector(
    weights: str, *, short_side: int | None = None, max_side: int | None = None, workers: int | None = None
) -> TrainedDetector:
    """Build what a weights file of `inline detect train` is of, and load it. Sizes override the file's."""
    path = local_path(weights)
    metadata = read_metadata(path) if path.suffix == ".safetensors" else {}
    arguments: dict[str, Any] = json.loads(metadata.get("config", "{}"))
    if arguments.get("head") not in HEADS:
        raise ValueError(f"{weights!r} is not a weights file of `inline detect train`")
    name = metadata["architecture"]
    model = create_detector(name, **{key: arguments[key] for key in ("head", "num_classes", "channels", "kwargs")})
    try:
        model.load_state_dict(safetensors.torch.load_file(path))
    except RuntimeError as error:
        raise ValueError(f"{weights!r} does not fit the model that it says it is of: {error}") from error
    saved: dict[str, int] = json.loads(metadata["preprocessing"])
    short = saved["short_side"] if short_side is None else short_side
    # Without a word about it, a longer short side than trained with has a longer long one.
    longest = max(saved["max_side"], short) if max_side is None else max_side
    data = DetectionDataConfig(short_side=short, train_short_sides=(short,), max_side=longest, workers=workers)
    data.validate()
    return TrainedDetector(f"{arguments['head']} on {name}", model, json.loads(metadata["class_names"]), data)


def with_classes(data: CocoData, class_names: Sequence[str]) -> CocoData:
    """The data with a model's classes, by name; ValueError for a class that the model does not know.

    Classes without objects in these data count for nothing in average precision.
    """
    unknown = [name for name in data.class_names if name not in class_names]
    if unknown:
        raise ValueError(f"{data.source} has classes that the model does not know: {', '.join(unknown[:10])}")
    label_of = {name: label for label, name in enumerate(class_names, start=1)}
    labels = [label_of[name] for name in data.class_names]
    images = [
        replace(image, instances=[replace(i, label=labels[i.label - 1]) for i in image.instances])
        for image in data.images
    ]
    return CocoData(data.source, list(class_names), list(range(1, len(class_names) + 1)), images)


def without_annotations(paths: Sequence[Path], class_names: Sequence[str]) -> CocoData:
    """Image files as a split; an image's id is its position."""
    images = [AnnotatedImage(number, path, _size(path)) for number, path in enumerate(paths)]
    return CocoData(Path(), list(class_names), list(range(1, len(class_names) + 1)), images)


def _size(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except OSError:  # it is skipped and listed when it is to be looked at
        return 1, 1


def as_records(result: ImageResult, class_names: Sequence[str], *, min_score: float) -> list[dict[str, Any]]:
    """For JSON: class, score, box as COCO has it (x, y, width, height), mask as compressed run lengths"""
    records = []
    for box, score, label, mask in zip(result.boxes, result.scores, result.labels, result.masks, strict=True):
        if score >= min_score:
            x0, y0, x1, y1 = (float(side) for side in box)
            records.append(
                {
                    "class": class_names[int(label) - 1],
                    "score": float(score),
                    "box": [x0, y0, x1 - x0, y1 - y0],
                    "mask": {"size": list(mask["size"]), "counts": mask["counts"].decode()},
                }
            )
    return records
