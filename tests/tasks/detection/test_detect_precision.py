"""Average precision against its definition, written out in loops."""

from pathlib import Path

import numpy as np
import pytest
from coco_shapes import CATEGORY_IDS, draw_shapes, write_annotations

from inline_attention.tasks.detection.annotations import AnnotatedData, AnnotatedImage, Instance
from inline_attention.tasks.detection.average_precision import ImageResult, average_precision
from inline_attention.tasks.detection.coco import Rle, mask_of, read_coco

mask_utils = pytest.importorskip("pycocotools.mask")

SIDE = 160
AREAS = {"AP": (0, 1e10), "APs": (0, 32**2), "APm": (32**2, 96**2), "APl": (96**2, 1e10)}


def ellipse(x0: float, y0: float, x1: float, y1: float) -> np.ndarray:
    """bool (SIDE, SIDE): the ellipse that touches the box"""
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    return ((2 * x - x0 - x1) / (x1 - x0)) ** 2 + ((2 * y - y0 - y1) / (y1 - y0)) ** 2 <= 1


def encode(mask: np.ndarray) -> Rle:
    return mask_utils.encode(np.asfortranarray(mask.astype(np.uint8)))


def decode(runs: Rle) -> np.ndarray:
    return mask_utils.decode([runs])[:, :, 0].astype(bool)


def random_box(draw: np.random.Generator) -> np.ndarray:
    sides = np.exp(draw.uniform(np.log(8), np.log(155), 2))
    corner = draw.uniform(0, SIDE - sides)
    return np.concatenate([corner, corner + sides])


def random_data(seed: int) -> tuple[AnnotatedData, list[ImageResult]]:
    """Objects, some of them crowds, and detections that are theirs, moved, or nothing's."""
    draw = np.random.default_rng(seed)
    images, results = [], []
    for number in range(10):
        image = AnnotatedImage(100 + number, Path(f"{number}.png"), (SIDE, SIDE))
        boxes, scores, labels, masks = [], [], [], []
        for _ in range(int(draw.integers(0, 7))):
            box, label, crowd = random_box(draw), int(draw.integers(1, 4)), bool(draw.random() < 0.15)
            mask = ellipse(*box)
            segmentation = {**encode(mask)}
            segmentation["counts"] = segmentation["counts"].decode()
            image.instances.append(Instance(label, tuple(box.tolist()), segmentation, float(mask.sum()), crowd))
            for _ in range(int(draw.integers(0, 5))):
                moved = np.clip(box + draw.normal(0, 0.08, 4) * np.tile(box[2:] - box[:2], 2), 0, SIDE)
                moved[2:] = np.maximum(moved[2:], moved[:2] + 1)
                boxes.append(moved)
                labels.append(label if draw.random() < 0.8 else int(draw.integers(1, 4)))
        boxes += [random_box(draw) for _ in range(int(draw.integers(0, 4)))]
        labels += [int(draw.integers(1, 4)) for _ in range(len(boxes) - len(labels))]
        scores = draw.random(len(boxes))
        masks = [encode(ellipse(*box)) for box in boxes]
        images.append(image)
        results.append(
            ImageResult(image.id, np.array(boxes).reshape(-1, 4), scores, np.array(labels, dtype=int), masks)
        )
    # The fourth class has neither objects nor detections.
    return AnnotatedData(Path("random.json"), ["a", "b", "c", "d"], [1, 5, 6, 9], images), results


def overlap(found: np.ndarray, true: np.ndarray, *, crowd: bool) -> float:
    """bool masks, or boxes (4,)"""
    if found.ndim == 2:
        both, one, other = (found & true).sum(), found.sum(), true.sum()
    else:
        width, height = np.minimum(found[2:], true[2:]) - np.maximum(found[:2], true[:2])
        both = max(0, width) * max(0, height)
        one, other = np.prod(found[2:] - found[:2]), np.prod(true[2:] - true[:2])
    whole = one if crowd else one + other - both
    return float(both / whole) if whole else 0.0


def precision_of_class(
    data: AnnotatedData, results: list[ImageResult], label: int, threshold: float, area: tuple[float, float], kind: str
) -> float | None:
    """The mean precision at 101 recalls, where precision at a recall is the best at that recall or any above."""
    verdicts: list[tuple[float, bool]] = []  # (score, right), those that count
    total = 0
    for image, result in zip(data.images, results, strict=True):
        objects = [o for o in image.instances if o.label == label]
        aside = [o.crowd or not area[0] <= o.area <= area[1] for o in objects]
        total += aside.count(False)
        chosen = [n for n in range(len(result.scores)) if result.labels[n] == label]
        taken = [False] * len(objects)
        for n in sorted(chosen, key=lambda n: -result.scores[n])[:100]:
            if kind == "box":
                shape, size = result.boxes[n], float(np.prod(result.boxes[n][2:] - result.boxes[n][:2]))
                truth = [np.array(o.box) for o in objects]
            else:
                shape = decode(result.masks[n])
                size = float(shape.sum())
                truth = [decode(mask_of(o, image.size)) for o in objects]
            overlaps = [overlap(shape, t, crowd=o.crowd) for t, o in zip(truth, objects, strict=True)]
            free = [m for m, o in enumerate(objects) if overlaps[m] >= threshold and (o.crowd or not taken[m])]
            counted = [m for m in free if not aside[m]] or free
            if counted:
                best = max(counted, key=lambda m: overlaps[m])
                taken[best] = True
                if not aside[best]:
                    verdicts.append((float(result.scores[n]), True))
            elif area[0] <= size <= area[1]:
                verdicts.append((float(result.scores[n]), False))
    if total == 0:
        return None
    verdicts.sort(key=lambda verdict: -verdict[0])
    right = np.cumsum([verdict[1] for verdict in verdicts])
    precision, recall = right / np.arange(1, len(verdicts) + 1), right / total
    points = [precision[recall >= level - 1e-12] for level in np.linspace(0, 1, 101)]
    return float(np.mean([point.max() if len(point) else 0.0 for point in points]))


@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_the_definition_on_random_detections(seed: int) -> None:
    data, results = random_data(seed)
    measured = average_precision(data, results)
    thresholds = np.linspace(0.5, 0.95, 10)
    for kind, figures in measured.by_kind().items():
        for name, area in AREAS.items():
            cells = [
                [precision_of_class(data, results, label, t, area, kind) for t in thresholds] for label in (1, 2, 3, 4)
            ]
            known = [row for row in cells if row[0] is not None]
            assert known, "the random data have objects of every size"
            assert figures[name] == pytest.approx(100 * np.mean(known), abs=1e-9), (kind, name)
            if name == "AP":
                assert figures["AP50"] == pytest.approx(100 * np.mean([row[0] for row in known]), abs=1e-9)
                assert figures["AP75"] == pytest.approx(100 * np.mean([row[5] for row in known]), abs=1e-9)
                of_classes = [classes[kind] for classes in measured.per_class.values()]
                assert of_classes[:3] == pytest.approx([100 * np.mean(row) for row in cells[:3]], abs=1e-9)
                assert of_classes[3] is None
    assert measured.images == 10


def test_a_perfect_detector_and_a_blind_one() -> None:
    data, _ = random_data(3)
    blind, perfect = [], []
    for image in data.images:
        none = np.zeros((0, 4)), np.zeros(0), np.zeros(0, dtype=int)
        blind.append(ImageResult(image.id, *none, []))
        objects = image.objects
        boxes = np.array([o.box for o in objects]).reshape(-1, 4)
        masks = [mask_of(o, image.size) for o in objects]
        labels = np.array([o.label for o in objects], dtype=int)
        perfect.append(ImageResult(image.id, boxes, np.linspace(0.5, 1, len(objects)), labels, masks))
    best, worst = average_precision(data, perfect), average_precision(data, blind)
    assert best.by_kind()["box"]["AP"] == best.by_kind()["mask"]["AP"] == pytest.approx(100)
    assert worst.by_kind()["box"]["AP"] == worst.by_kind()["mask"]["AP"] == 0


def test_images_without_a_result_are_not_counted() -> None:
    data, results = random_data(4)
    part = [result for result in results if result.image_id % 2]
    reduced = AnnotatedData(data.source, data.class_names, data.category_ids, [i for i in data.images if i.id % 2])
    assert average_precision(data, part) == average_precision(reduced, part)
    assert average_precision(data, part).images == 5
    with pytest.raises(ValueError, match="none of the 10 images"):
        average_precision(data, [])


@pytest.mark.parametrize("kept", ["area", "box", "beyond", "empty"])
def test_boxes_alone_have_the_precision_of_pycocotools(tmp_path: Path, kept: str) -> None:
    """Files without masks: with or without areas, with boxes beyond the image or empty; against pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    content = draw_shapes(tmp_path, split="val", images=12, seed=5)
    for number, entry in enumerate(content["annotations"]):
        del entry["segmentation"]
        if kept == "beyond" and number % 3 == 0:
            entry["bbox"] = [-6, entry["bbox"][1], 30, entry["bbox"][3] + 60]
        if kept == "empty" and number % 4 == 0:
            entry["bbox"] = [*entry["bbox"][:2], 0, entry["bbox"][3]]
        entry["area"] = entry["bbox"][2] * entry["bbox"][3] * (0.7 if kept == "area" else 1)
    path = write_annotations(tmp_path, "val", content)
    truth = COCO(str(path))
    if kept == "box":  # pycocotools needs areas; the reader takes those of the boxes
        for entry in content["annotations"]:
            del entry["area"]
        write_annotations(tmp_path, "val", content)
    data = read_coco(tmp_path, "val", masks=False)
    draw = np.random.default_rng(0)
    results, found = [], []
    for image in data.images:
        boxes = np.array([i.box for i in image.instances for _ in range(2)]).reshape(-1, 4)
        boxes = boxes + draw.normal(0, 2.5, boxes.shape)
        labels = draw.integers(1, 4, len(boxes))
        labels[::2] = [i.label for i in image.instances]
        scores = draw.random(len(boxes))
        results.append(ImageResult(image.id, boxes, scores, labels, None))
        for (x0, y0, x1, y1), score, label in zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True):
            box = [x0, y0, x1 - x0, y1 - y0]
            found.append(dict(image_id=image.id, category_id=CATEGORY_IDS[label - 1], bbox=box, score=score))
    measured = average_precision(data, results)
    evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    expected = [None if value < 0 else 100 * value for value in evaluation.stats.tolist()]
    assert list(measured.box.values()) == pytest.approx(expected, abs=1e-9)
    assert 0 < expected[0] < 100
    assert measured.mask is None
    assert all(classes.keys() == {"box"} for classes in measured.per_class.values())
