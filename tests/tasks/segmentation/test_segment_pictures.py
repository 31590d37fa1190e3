"""Masks in colours: over an image, as a PNG file, and in the picture of examples."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inline_attention.tasks.segmentation.pictures import Example, draw_examples, overlay, palette, save_mask
from inline_attention.tasks.segmentation.sources import IGNORED

IMAGE = np.full((2, 4, 3), 100, np.uint8)
CLASSES = np.array([[0, 1, 2, IGNORED]] * 2, np.uint8)


@pytest.mark.parametrize("name", ["background", "Void", "_background_"])
def test_the_background_and_ignored_pixels_are_not_tinted(name: str, tmp_path: Path) -> None:
    colours = palette(["tree", name, "backgrounds"])
    tinted = (overlay(IMAGE, CLASSES, colours) != IMAGE).any(2)
    assert tinted.tolist() == [[True, False, True, False]] * 2
    save_mask(CLASSES, tmp_path / "mask.png", colours)
    with Image.open(tmp_path / "mask.png") as mask:
        assert np.array_equal(np.asarray(mask), CLASSES)
        assert mask.convert("RGB").getpixel((1, 0)) == (0, 0, 0)


def test_examples_have_headings_and_a_legend(tmp_path: Path) -> None:
    """On several ranks, the first may have no readable image and so no example."""
    heights = []
    for number, examples in enumerate(([], [Example(IMAGE, CLASSES, CLASSES)])):
        path = tmp_path / f"{number}.png"
        draw_examples(examples, ["tree", "background", "car"], path, width=80)
        picture = np.asarray(Image.open(path).convert("L"))
        heights.append(picture.shape[0])
        assert all((picture[:20, 80 * column : 80 * (column + 1)] < 100).any() for column in range(3))
    assert heights[1] == heights[0] + 40 + 20 * 2  # one row of images; two classes, one below the other
