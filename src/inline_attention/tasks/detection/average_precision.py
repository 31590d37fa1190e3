"""COCO's average precision of boxes and masks, by pycocotools."""

import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from inline_attention.tasks.detection.annotations import AnnotatedData, AnnotatedImage
from inline_attention.tasks.detection.coco import Rle, load_pycocotools, mask_of

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
KINDS = {"box": "bbox", "mask": "segm"}


@dataclass
class ImageResult:
    """The detections in one image, in pixels of the original image"""

    image_id: int
    boxes: np.ndarray  # (n, 4) x0, y0, x1, y1
    scores: np.ndarray  # (n,)
    labels: np.ndarray  # (n,) from 1 on
    masks: list[Rle] | None  # None: the detector has no mask heads


@dataclass(frozen=True)
class ApResult:
    """Average precision in per cent. A figure is None if there is no object to find."""

    box: dict[str, float | None]  # by `METRICS`
    mask: dict[str, float | None] | None  # None: the detector has no mask heads
    per_class: dict[str, dict[str, float | None]]  # AP by class, then by kind: "box" and, with mask heads, "mask"
    images: int

    def by_kind(self) -> dict[str, dict[str, float | None]]:
        """The figures of boxes and, with mask heads, of masks"""
        return {"box": self.box} | ({} if self.mask is None else {"mask": self.mask})


def encode_masks(masks: Tensor) -> list[Rle]:
    """bool (n, height, width) on any device → run lengths"""
    columns_first = np.asfortranarray(masks.permute(1, 2, 0).to("cpu").numpy().astype(np.uint8))
    return load_pycocotools("mask").encode(columns_first)


def average_precision(data: AnnotatedData, results: Iterable[ImageResult]) -> ApResult:
    """COCO's figures over the images that have a result. Masks count if the results have them."""
    found = {result.image_id: result for result in results}
    images = [image for image in data.images if image.id in found]
    if not images:
        raise ValueError(f"nothing to evaluate: none of the {len(data.images)} images of {data.source} has a result")
    kinds = [kind for kind in KINDS if kind == "box" or all(result.masks is not None for result in found.values())]
    truth = _ground_truth(data, images, masks="mask" in kinds)
    detections = [entry for image in images for entry in _entries(found[image.id], data.category_ids)]
    summaries, by_class = {}, {}
    for kind in kinds:
        summaries[kind], by_class[kind] = _evaluate(truth, detections, kind, [image.id for image in images])
    per_class = {name: {kind: by_class[kind][number] for kind in kinds} for number, name in enumerate(data.class_names)}
    return ApResult(summaries["box"], summaries.get("mask"), per_class, len(images))


def _ground_truth(data: AnnotatedData, images: Sequence[AnnotatedImage], *, masks: bool) -> Any:
    mask_utils = load_pycocotools("mask")
    annotations: list[dict[str, Any]] = []
    for image in images:
        for instance in image.instances:
            x0, y0, x1, y1 = instance.listed or instance.box
            entry: dict[str, Any] = {
                "id": len(annotations) + 1,  # id 0 would mean "no match" to pycocotools
                "image_id": image.id,
                "category_id": data.category_ids[instance.label - 1],
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "area": (x1 - x0) * (y1 - y0),
                "iscrowd": int(instance.crowd),
            }
            if masks:
                entry["segmentation"] = mask_of(instance, image.size)
                entry["area"] = float(mask_utils.area(entry["segmentation"]))
            if instance.area is not None:
                entry["area"] = instance.area
            annotations.append(entry)
    coco = load_pycocotools("coco").COCO()
    coco.dataset = {
        "images": [{"id": image.id, "height": image.size[0], "width": image.size[1]} for image in images],
        "categories": [{"id": id, "name": n} for id, n in zip(data.category_ids, data.class_names, strict=True)],
        "annotations": annotations,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def _entries(result: ImageResult, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    sides = result.boxes[:, 2:] - result.boxes[:, :2]
    boxes = np.concatenate([result.boxes[:, :2], sides], axis=1).tolist()
    rows = zip(boxes, result.scores.tolist(), result.labels.tolist(), strict=True)
    entries: list[dict[str, Any]] = [
        {"image_id": result.image_id, "category_id": category_ids[label - 1], "bbox": box, "score": score}
        for box, score, label in rows
    ]
    if result.masks is not None:
        for entry, mask in zip(entries, result.masks, strict=True):
            entry["segmentation"] = mask
    return entries


def _evaluate(
    truth: Any, detections: list[dict[str, Any]], kind: str, image_ids: list[int]
) -> tuple[dict[str, float | None], list[float | None]]:
    """(the twelve figures, AP of each class)"""
    if kind == "mask":  # with boxes, pycocotools would take the sizes of objects from them
        detections = [{key: value for key, value in entry.items() if key != "bbox"} for entry in detections]
    with contextlib.redirect_stdout(io.StringIO()):
        # loadRes refuses an empty list.
        found = truth.loadRes([dict(entry) for entry in detections]) if detections else _nothing(truth)
        evaluation = load_pycocotools("cocoeval").COCOeval(truth, found, KINDS[kind])
        evaluation.params.imgIds = image_ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures = dict(zip(METRICS, map(_per_cent, evaluation.stats.tolist()), strict=True))
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (IoU, recall, class), all sizes, 100 detections
    by_class = []
    for number in range(precision.shape[2]):
        known = precision[:, :, number][precision[:, :, number] > -1]
        by_class.append(_per_cent(float(known.mean()) if known.size else -1.0))
    return figures, by_class


def _nothing(truth: Any) -> Any:
    coco = load_pycocotools("coco").COCO()
    coco.dataset = {**truth.dataset, "annotations": []}
    coco.createIndex()
    return coco


def _per_cent(value: float) -> float | None:
    return None if value < 0 else 100 * value


def as_records(result: ImageResult, class_names: Sequence[str], *, min_score: float) -> list[dict[str, Any]]:
    """Detections for JSON: class, score, box (x, y, width, height) and, with mask heads, compressed run lengths."""
    records = []
    for entry in _entries(result, range(1, len(class_names) + 1)):
        if entry["score"] >= min_score:
            name = class_names[entry["category_id"] - 1]
            record: dict[str, Any] = {"class": name, "score": entry["score"], "box": entry["bbox"]}
            if mask := entry.get("segmentation"):
                record["mask"] = {"size": list(mask["size"]), "counts": mask["counts"].decode()}
            records.append(record)
    return records
