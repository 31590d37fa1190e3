"""Draws masks in colours, over images and beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from inline_attention.tasks.dense.colours import class_colour
from inline_attention.tasks.dense.pictures import in_rows
from inline_attention.tasks.segmentation.sources import IGNORED

_OPACITY = 0.55  # of colours over an image
_SWATCH = 14  # pixels a side, of the legend
_BACKGROUND = ("background", "void")  # names of classes that are not drawn
_HEADINGS = ("image", "prediction", "mask")


@dataclass(frozen=True)
class Example:
    """An image with its prediction and its mask"""

    image: np.ndarray  # (h, w, 3) uint8
    predicted: np.ndarray  # (H, W) uint8
    mask: np.ndarray  # (H, W) uint8


def palette(class_names: Sequence[str]) -> np.ndarray:
    """The colour of each class (256, 3) uint8. Black for ignored pixels and for a class called background or void."""
    colours = np.array([class_colour(number) for number in range(256)], dtype=np.uint8)
    background = [n for n, name in enumerate(class_names) if name.strip("_ ").lower() in _BACKGROUND]
    colours[[IGNORED, *background]] = 0
    return colours


def save_mask(classes: np.ndarray, path: Path, colours: np.ndarray) -> None:
    """classes (H, W) uint8 as a PNG whose pixels are the class numbers, shown in the colours of `palette`"""
    image = Image.fromarray(classes)  # 8-bit greyscale; a palette makes it a palette image of the same numbers
    image.putpalette(colours.ravel().tolist())
    image.save(path)


def overlay(image: np.ndarray, classes: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """image (h, w, 3), classes (H, W) → (h, w, 3); pixels whose colour in the palette is black stay as they are"""
    height, width = image.shape[:2]
    resized = np.asarray(Image.fromarray(classes).resize((width, height), Image.Resampling.NEAREST))
    tint = colours[resized]
    mixed = (1 - _OPACITY) * image + _OPACITY * tint
    return np.where(tint.any(-1, keepdims=True), mixed, image).astype(np.uint8)


def draw_examples(examples: Sequence[Example], class_names: Sequence[str], path: Path, *, width: int = 480) -> None:
    """One row for each example, with image, prediction and mask, and a legend of the classes below."""
    colours = palette(class_names)
    rows = []
    for example in examples:
        drawn = (overlay(example.image, classes, colours) for classes in (example.predicted, example.mask))
        rows.append([Image.fromarray(cell) for cell in (example.image, *drawn)])
    masks = [mask for example in examples for mask in (example.predicted, example.mask)]
    occurring = {number for mask in masks for number in np.unique(mask).tolist()}
    entries = [(name, colours[n]) for n, name in enumerate(class_names) if n in occurring and colours[n].any()]
    legend = _legend(entries, width=len(_HEADINGS) * width)
    picture = in_rows(rows, _HEADINGS, width=width, below=legend.height)
    picture.paste(legend, (0, picture.height - legend.height))
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
