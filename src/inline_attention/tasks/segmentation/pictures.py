"""Draws masks in colours, over images and beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from inline_attention.tasks.dense.colours import class_colour
from inline_attention.tasks.segmentation.sources import IGNORED

_OPACITY = 0.55  # of colours over an image
_SWATCH = 14  # pixels a side, of the legend


@dataclass(frozen=True)
class Example:
    """An image with its prediction and its mask"""

    image: np.ndarray  # (h, w, 3) uint8
    predicted: np.ndarray  # (H, W) uint8
    mask: np.ndarray  # (H, W) uint8


@cache
def palette() -> np.ndarray:
    """(256, 3) uint8; black for ignored pixels"""
    colours = np.array([class_colour(number) for number in range(256)], dtype=np.uint8)
    colours[IGNORED] = 0
    return colours


def save_mask(classes: np.ndarray, path: Path) -> None:
    """classes (H, W) uint8 as a PNG whose pixels are the class numbers, shown in colours"""
    image = Image.fromarray(classes)  # 8-bit greyscale; a palette makes it a palette image of the same numbers
    image.putpalette(palette().ravel().tolist())
    image.save(path)


def overlay(image: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """image (h, w, 3), classes (H, W) → (h, w, 3); ignored pixels stay as they are"""
    height, width = image.shape[:2]
    resized = np.asarray(Image.fromarray(classes).resize((width, height), Image.Resampling.NEAREST))
    mixed = (1 - _OPACITY) * image + _OPACITY * palette()[resized]
    return np.where((resized == IGNORED)[..., None], image, mixed).astype(np.uint8)


def draw_examples(examples: Sequence[Example], class_names: Sequence[str], path: Path, *, width: int = 480) -> None:
    """One row for each example, with image, prediction and mask, and a legend of the classes below."""
    rows = []
    for example in examples:
        cells = (example.image, overlay(example.image, example.predicted), overlay(example.image, example.mask))
        height = max(1, round(width * example.image.shape[0] / example.image.shape[1]))
        rows.append([Image.fromarray(cell).resize((width, height), Image.Resampling.BILINEAR) for cell in cells])
    masks = [mask.ravel() for example in examples for mask in (example.predicted, example.mask)]
    occurring = sorted(set(np.unique(np.concatenate(masks)).tolist()) - {IGNORED})
    legend = _legend([(class_names[number], palette()[number]) for number in occurring], width=3 * width)
    picture = Image.new("RGB", (3 * width, sum(row[0].height for row in rows) + legend.height), "white")
    top = 0
    for row in rows:
        for column, cell in enumerate(row):
            picture.paste(cell, (column * width, top))
        top += row[0].height
    picture.paste(legend, (0, top))
    picture.save(path)


def _legend(entries: Sequence[tuple[str, np.ndarray]], *, width: int) -> Image.Image:
    column = 180
    columns = max(1, width // column)
    rows = -(-len(entries) // columns)
    legend = Image.new("RGB", (width, rows * (_SWATCH + 6) + 6), "white")
    draw = ImageDraw.Draw(legend)
    for number, (name, colour) in enumerate(entries):
        left, top = number % columns * column + 6, number // columns * (_SWATCH + 6) + 6
        draw.rectangle((left, top, left + _SWATCH, top + _SWATCH), fill=tuple(int(c) for c in colour))
        draw.text((left + _SWATCH + 6, top), name, fill="black")
    return legend
