"""Recognises how the annotations of a data set are stored, and reads them."""

from pathlib import Path

from inline_attention.data.sources import list_some
from inline_attention.tasks.detection.annotations import AnnotatedData
from inline_attention.tasks.detection.coco import read_coco
from inline_attention.tasks.detection.config import DetectionDataConfig, Layout
from inline_attention.tasks.detection.yolo import find_description, read_yolo

EXPECTED = (
    "annotations/instances_SPLIT.json and the images in SPLIT/ (COCO), or with data.yaml, images/SPLIT and "
    "labels/SPLIT (YOLO)"
)


def read_split(config: DetectionDataConfig, split: str, *, masks: bool) -> AnnotatedData:
    """Read one split of `config.path`, with masks or only boxes. A ValueError names what is wrong with the data."""
    layout = find_layout(config.path) if config.layout == "auto" else config.layout
    if layout == "coco":
        return read_coco(config.path, split, masks=masks)
    if masks:
        raise ValueError(
            f"{config.path} has YOLO labels, which are boxes alone; mask heads need COCO annotations with "
            "segmentations. To learn boxes alone, train with model.head=faster_rcnn or cascade_rcnn"
        )
    return read_yolo(config.path, split)


def find_layout(path: str | Path) -> Layout:
    """The layout of a data set. ValueError if it has none, or both."""
    root = Path(path)
    is_yaml = root.suffix in (".yaml", ".yml") and root.is_file()
    if not root.is_dir() and not is_yaml:
        what = "is not a folder" if root.exists() else "does not exist"
        raise ValueError(f"data path {str(path)!r} {what}; expected a folder with {EXPECTED}")
    is_coco = any(root.glob("annotations/instances_*.json"))
    is_yolo = find_description(root) is not None
    if is_coco and is_yolo:
        raise ValueError(
            f"{path} has both annotations/instances_SPLIT.json (COCO) and data.yaml (YOLO); choose one with "
            "data.layout=coco or data.layout=yolo (inline detect eval: --layout)"
        )
    if not is_coco and not is_yolo:
        there = [entry.name for entry in root.iterdir() if not entry.name.startswith(".")]
        raise ValueError(f"{path}: expected a folder with {EXPECTED}; there is {list_some(sorted(there), most=10)}")
    return "coco" if is_coco else "yolo"
