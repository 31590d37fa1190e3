"""What is drawn: the mask in its colour, the box around it, nothing of what is not sure."""

import numpy as np
import pytest
from PIL import Image

from inline_attention.dense.colours import class_colour, ink_on
from inline_attention.dense.detection.average_precision import ImageResult, as_records
from inline_attention.dense.detection.pictures import draw

mask_utils = pytest.importorskip("pycocotools.mask")


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


@pytest.mark.parametrize("corner", [(40.0, 50.0), (100.0, 0.0)], ids=["above", "in the corner"])
def test_text_stands_on_a_plate_inside_the_picture(corner: tuple[float, float]) -> None:
    """Whole letters, with a margin of the class's colour around them, also for a box at the border."""
    x, y = corner
    found = result()
    found.boxes[0] = [x, y, x + 20, y + 20]
    picture = draw(Image.new("RGB", (120, 120), (90, 90, 90)), found, class_names=["cat", "dog"], min_score=0.5)
    pixels = np.asarray(picture)
    ink = (pixels == ink_on(class_colour(2))).all(2)
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    assert columns[-1] - columns[0] > 35  # "dog 0.90", nothing of it cut off
    ring = pixels[rows[0] - 2 : rows[-1] + 3, columns[0] - 2 : columns[-1] + 3].copy()
    assert ring.shape[:2] == (rows[-1] - rows[0] + 5, columns[-1] - columns[0] + 5)
    ring[2:-2, 2:-2] = class_colour(2)
    assert (ring == class_colour(2)).all()


def test_records_for_json() -> None:
    (record,) = as_records(result(), ["cat", "dog"], min_score=0.5)
    assert record["class"] == "dog"
    assert record["score"] == pytest.approx(0.9)
    assert record["box"] == [40, 50, 40, 40]
    mask = mask_utils.decode([{"size": record["mask"]["size"], "counts": record["mask"]["counts"].encode()}])
    assert mask.sum() == 1600
