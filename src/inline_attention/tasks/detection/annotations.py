"""Images and the objects in them, as the readers of COCO and YOLO files return them."""

import logging
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from inline_attention.data.decode import UnreadableImage, image_size
from inline_attention.tasks.detection.boxes import Size

_logger = logging.getLogger(__name__)

# Far above any real image. Training compares every object with each of the 300,000 anchors of an image.
MAX_OBJECTS = 10_000
# Side of a box in pixels. Thinner boxes can lose their area to the rounding of float32, and their loss is infinite.
THINNEST = 0.01

Box = tuple[float, float, float, float]  # x0, y0, x1, y1
# Polygons x0, y0, x1, y1, … or run lengths as in a COCO file. Arrays of float32 take a sixth of the memory of lists.
Segmentation = list[np.ndarray] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Instance:
    label: int  # 1 for the first class: 0 is the background
    box: Box  # inside the image, unless it is empty
    segmentation: Segmentation | None  # None: only boxes were read
    area: float | None  # decides if COCO counts it as small, medium or large. None: the area of the mask, or of the box
    crowd: bool  # a region of many objects: not used in training, and detections inside it do not count
    listed: Box | None = None  # the box in the file, if it reaches beyond the image: COCO evaluates against that
    empty: bool = False  # the box or mask encloses nothing: not used in training, and COCO counts it as missed


@dataclass
class AnnotatedImage:
    id: int
    path: Path
    size: Size
    instances: list[Instance] = field(default_factory=list)

    @property
    def objects(self) -> list[Instance]:
        """The instances to learn from and to find"""
        return [instance for instance in self.instances if not (instance.crowd or instance.empty)]

    def add(self, instance: Instance, where: str) -> None:
        """where: the place of the instance in its file, for a message"""
        if len(self.instances) == MAX_OBJECTS:
            raise ValueError(f"{where}: {self.path.name} has more than {MAX_OBJECTS:,} objects, which is the limit")
        self.instances.append(instance)


@dataclass
class AnnotatedData:
    """One split. The label of an object is the position of its class, counted from 1."""

    source: Path  # the annotations, for messages
    class_names: list[str]
    category_ids: list[int]  # the numbers of the classes in the files
    images: list[AnnotatedImage]


def box_inside(x0: float, y0: float, x1: float, y1: float, size: Size) -> Box | None:
    """The part of a box inside an image of this (height, width). None: there is none, or it is thinner than THINNEST"""
    x0, y0, x1, y1 = max(0.0, x0), max(0.0, y0), min(float(size[1]), x1), min(float(size[0]), y1)
    return (x0, y0, x1, y1) if min(x1 - x0, y1 - y0) >= THINNEST else None


def warn_of_empty(data: AnnotatedData, split: str) -> None:
    empty = sum(instance.empty for image in data.images for instance in image.instances)
    if empty:
        _logger.warning(
            "%s [%s]: %d objects with an empty box or mask are not used in training. Average precision counts them as "
            "missed, as COCO does",
            *(data.source, split, empty),
        )


def check_objects(data: AnnotatedData) -> None:
    """ValueError if no image has an object."""
    if not any(image.objects for image in data.images):
        raise ValueError(f"{data.source}: none of its {len(data.images)} images has an object to learn or to find")


def check_same_categories(train: AnnotatedData, val: AnnotatedData) -> None:
    """ValueError unless two splits have the same classes in the same order."""
    if train.class_names != val.class_names:
        differing = sorted(set(train.class_names) ^ set(val.class_names)) or ["their order"]
        raise ValueError(f"{train.source} and {val.source} have different categories: {', '.join(differing[:10])}")


def with_classes(data: AnnotatedData, class_names: Sequence[str]) -> AnnotatedData:
    """The data with the class numbers of a model, matched by name. ValueError for a class that the model does not have.

    Average precision ignores classes that have no object in the data.
    """
    unknown = [name for name in data.class_names if name not in class_names]
    if unknown:
        raise ValueError(
            f"{data.source} has classes that the model does not know: {', '.join(unknown[:10])}; "
            f"the model knows {', '.join(class_names[:10])}{', …' if len(class_names) > 10 else ''}"
        )
    labels = {label: class_names.index(name) + 1 for label, name in enumerate(data.class_names, start=1)}
    images = [
        replace(image, instances=[replace(instance, label=labels[instance.label]) for instance in image.instances])
        for image in data.images
    ]
    return AnnotatedData(data.source, list(class_names), list(range(1, len(class_names) + 1)), images)


def without_annotations(paths: Sequence[Path], class_names: Sequence[str]) -> AnnotatedData:
    """Image files as a split without objects. The id of an image is its position."""
    images = [AnnotatedImage(number, path, header_size(path)) for number, path in enumerate(paths)]
    return AnnotatedData(Path(), list(class_names), list(range(1, len(class_names) + 1)), images)


def header_size(path: Path) -> Size:
    """The size of an image from its header. 1 × 1 if it cannot be read: the loader will skip and list such an image."""
    try:
        return image_size(path)
    except UnreadableImage:
        return 1, 1


def excerpt(value: Any) -> str:
    """The beginning of a value from a file, for messages. Deeply nested lists stay short."""
    text = "missing" if value is None else reprlib.repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
