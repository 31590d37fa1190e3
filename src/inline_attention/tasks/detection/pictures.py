"""Draws detections on images."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from inline_attention.tasks.dense.colours import Colour, class_colour, ink_on
from inline_attention.tasks.detection.average_precision import ImageResult
from inline_attention.tasks.detection.coco import load_pycocotools


def draw(image: Image.Image, result: ImageResult, *, class_names: Sequence[str], min_score: float = 0.5) -> Image.Image:
    """Draw the masks (if any), boxes, classes and scores of detections with at least `min_score`"""
    pixels = np.asarray(image.convert("RGB")).astype(np.float32)
    shown = [n for n in range(len(result.scores)) if result.scores[n] >= min_score]
    for n, runs in enumerate(result.masks or ()):
        if n not in shown:
            continue
        mask = load_pycocotools("mask").decode(runs).astype(bool)
        pixels[mask] = 0.5 * pixels[mask] + 0.5 * np.array(class_colour(int(result.labels[n])), np.float32)
    picture = Image.fromarray(pixels.round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    height = max(10, min(picture.size) // 40)
    font = ImageFont.load_default(height)
    line = max(1, height // 8) if result.masks is not None else max(2, height // 4)  # thicker without masks
    for n in reversed(shown):  # the highest score on top
        colour = class_colour(int(result.labels[n]))
        x0, y0, x1, y1 = (float(side) for side in result.boxes[n])
        pen.rectangle((x0, y0, x1, y1), outline=colour, width=line)
        text = f"{class_names[int(result.labels[n]) - 1]} {result.scores[n]:.2f}"
        _write(pen, text, corner=(x0, y0), colour=colour, font=font, size=picture.size, margin=max(2, height // 4))
    return picture


def _write(
    pen: ImageDraw.ImageDraw,
    text: str,
    *,
    corner: tuple[float, float],
    colour: Colour,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    size: tuple[int, int],
    margin: int,
) -> None:
    """Write text on a coloured plate above the corner of a box, moved so that it stays inside the picture."""
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 2 * margin, bottom - top + 2 * margin
    x = max(0.0, min(corner[0], size[0] - width))
    y = max(0.0, corner[1] - height)
    pen.rectangle((x, y, x + width, y + height), fill=colour)
    pen.text((x + margin - left, y + margin - top), text, fill=ink_on(colour), font=font)
