"""Average precision against its definition, written out in loops."""

from pathlib import Path

import numpy as np
import pytest

from inline_attention.tasks.detection.average_precision import ImageResult, average_precision
from inline_attention.tasks.detection.coco import AnnotatedImage, CocoData, Instance, Rle, to_rle

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


def random_data(seed: int) -> tuple[CocoData, list[ImageResult]]:
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
    return CocoData(Path("random.json"), ["a", "b", "c", "d"], [1, 5, 6, 9], images), results


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
    data: CocoData, results: list[ImageResult], label: int, threshold: float, area: tuple[float, float], kind: str
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
                truth = [decode(to_rle(o.segmentation, image.size)) for o in objects]
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
    for kind, figures in (("box", measured.box), ("mask", measured.mask)):
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
                of_classes = [classes[kind == "mask"] for classes in measured.per_class.values()]
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
        masks = [to_rle(o.segmentation, image.size) for o in objects]
        labels = np.array([o.label for o in objects], dtype=int)
        perfect.append(ImageResult(image.id, boxes, np.linspace(0.5, 1, len(objects)), labels, masks))
    best, worst = average_precision(data, perfect), average_precision(data, blind)
    assert best.box["AP"] == best.mask["AP"] == pytest.approx(100)
    assert worst.box["AP"] == worst.mask["AP"] == 0


def test_images_without_a_result_are_not_counted() -> None:
    data, results = random_data(4)
    part = [result for result in results if result.image_id % 2]
    reduced = CocoData(data.source, data.class_names, data.category_ids, [i for i in data.images if i.id % 2])
    assert average_precision(data, part) == average_precision(reduced, part)
    assert average_precision(data, part).images == 5
    with pytest.raises(ValueError, match="none of the 10 images"):
        average_precision(data, [])
