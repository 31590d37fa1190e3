"""Pictures show the mask in its colour and the box around it, and no object below the smallest score."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensor_sizes import Largest

from inline_attention.tasks.dense.colours import class_colour
from inline_attention.tasks.detection.annotations import AnnotatedImage, Instance
from inline_attention.tasks.detection.average_precision import ImageResult, as_records
from inline_attention.tasks.detection.evaluation import to_image
from inline_attention.tasks.detection.pictures import draw, draw_examples
from inline_attention.tasks.detection.roi_heads import Detections

mask_utils = pytest.importorskip("pycocotools.mask")


def test_masks_of_a_large_image_are_pasted_a_few_at_a_time() -> None:
    size, count = (2000, 1500), 40
    boxes = torch.tensor([[3.0 * n, 2.0 * n, 10.0 + 3 * n, 20.0 + 2 * n] for n in range(count)])
    ones = torch.ones(count)
    found = Detections(boxes, ones, ones.long(), torch.ones(count, 28, 28))
    with Largest() as made:
        masks = to_image(found, image_id=1, shown=size, original=size).masks
    assert made.numel <= 2 * 2**24
    pasted = mask_utils.decode(masks)
    assert pasted.sum((0, 1)).tolist() == [200] * count
    assert pasted[2 * 7 : 20 + 2 * 7, 3 * 7 : 10 + 3 * 7, 7].all()


def result() -> ImageResult:
    """A sure square in the middle, and an unsure one in the corner"""
    boxes = np.array([[40.0, 50.0, 80.0, 90.0], [100.0, 100.0, 118.0, 118.0]])
    masks = np.zeros((120, 120, 2), np.uint8, order="F")
    masks[50:90, 40:80, 0] = masks[100:118, 100:118, 1] = 1
    return ImageResult(7, boxes, np.array([0.9, 0.3]), np.array([2, 1]), mask_utils.encode(masks))


def test_the_sure_object_is_drawn() -> None:
    picture = np.asarray(draw(Image.new("RGB", (120, 120)), result(), class_names=["cat", "dog"], min_score=0.5))
    colour = np.array(class_colour(2))
    assert np.abs(picture[70, 60] - colour / 2).max() <= 1  # half of it over black
    assert np.array_equal(picture[50, 60], colour)  # the frame
    assert (picture[36:50, 40:60] == colour).all(2).any()  # the ground of the text
    assert (picture[100:] == 0).all()
    everything = np.asarray(draw(Image.new("RGB", (120, 120)), result(), class_names=["cat", "dog"], min_score=0.2))
    assert (everything[109, 109] > 0).any()


def test_boxes_alone_are_drawn_without_masks_and_thicker() -> None:
    found = replace(result(), masks=None)
    picture = np.asarray(draw(Image.new("RGB", (120, 120)), found, class_names=["cat", "dog"], min_score=0.5))
    colour = np.array(class_colour(2))
    assert (picture[70, 60] == 0).all()  # nothing inside the box
    assert (picture[50:52, 60] == colour).all()
    assert (picture[52, 60] == 0).all()


def plate(box: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns that the text of a box stands on, outside of the box, and the pixels there"""
    found = result()
    found.boxes[0] = box
    picture = np.asarray(draw(Image.new("RGB", (120, 120)), found, class_names=["cat", "dog"], min_score=0.5))
    painted = (picture == class_colour(2)).all(2)
    painted[int(box[1]) : int(box[3]) + 1, int(box[0]) : int(box[2]) + 1] = False
    rows, columns = np.flatnonzero(painted.any(1)), np.flatnonzero(painted.any(0))
    return np.array([columns[0], rows[0], columns[-1], rows[-1]]), picture


def test_text_stands_on_a_plate_with_a_margin() -> None:
    (left, top, right, bottom), picture = plate([40, 50, 80, 90])
    assert right - left > 35  # "dog 0.90"
    text = picture[top : bottom + 1, left : right + 1].copy()
    assert (text != class_colour(2)).any()
    text[2:-2, 2:-2] = class_colour(2)
    assert (text == class_colour(2)).all()


def test_text_at_the_border_stays_inside_the_picture() -> None:
    (left, top, _, _), _ = plate([100, 0, 119, 20])
    assert left < 80  # of the 120 columns the text takes 40 or more
    assert top == 0


def test_records_for_json() -> None:
    (record,) = as_records(result(), ["cat", "dog"], min_score=0.5)
    assert record["class"] == "dog"
    assert record["score"] == pytest.approx(0.9)
    assert record["box"] == [40, 50, 40, 40]
    mask = mask_utils.decode([{"size": record["mask"]["size"], "counts": record["mask"]["counts"].encode()}])
    assert mask.sum() == 1600


@pytest.mark.parametrize("masks", [True, False])
def test_examples_show_what_was_found_beside_the_annotations(tmp_path: Path, masks: bool) -> None:
    Image.new("RGB", (120, 120)).save(tmp_path / "image.png")
    outline = [np.array([10, 20, 30, 20, 30, 50, 10, 50], np.float32)]
    sought = Instance(1, (10, 20, 30, 50), outline if masks else None, area=None, crowd=False)
    found = result() if masks else replace(result(), masks=None)
    images = [(AnnotatedImage(7, tmp_path / "image.png", (120, 120), shown), found) for shown in ([sought], [])]
    draw_examples(images, ["cat", "dog"], tmp_path / "examples.png")
    picture = np.asarray(Image.open(tmp_path / "examples.png"))
    assert picture.shape == (20 + 2 * 480, 2 * 480, 3)
    first, second = (picture[top : top + 480] for top in (20, 500))
    dog, cat = np.array(class_colour(2)), np.array(class_colour(1))
    assert np.array_equal(first[201, 240], dog)  # the frame that was found
    assert np.array_equal(first[81, 480 + 80], cat)  # that of the annotation
    assert (first[140, 480 + 80] > 0).any() == masks
    assert (second[:, :480] > 0).any()
    assert (second[:, 480:] == 0).all()  # nothing is annotated
