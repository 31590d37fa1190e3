"""Images with what was found drawn on them."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from inline_attention.dense.colours import class_colour, ink_on
from inline_attention.dense.detection.average_precision import ImageResult
from inline_attention.dense.detection.coco import load_pycocotools


def draw(image: Image.Image, result: ImageResult, *, class_names: Sequence[str], min_score: float = 0.5) -> Image.Image:
    """Masks as colour, boxes as frames, class and score as text, of the detections from `min_score` on"""
    pixels = np.asarray(image.convert("RGB")).astype(np.float32)
    shown = [n for n in range(len(result.scores)) if result.scores[n] >= min_score]
    for n in shown:
        mask = load_pycocotools("mask").decode(result.masks[n]).astype(bool)
        pixels[mask] = 0.5 * pixels[mask] + 0.5 * np.array(class_colour(int(result.labels[n])), np.float32)
    picture = Image.fromarray(pixels.round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    height = max(10, min(picture.size) // 40)
    font = ImageFont.load_default(height)
    for n in reversed(shown):  # the surest on top
        colour = class_colour(int(result.labels[n]))
        x0, y0, x1, y1 = (float(side) for side in result.boxes[n])
        pen.rectangle((x0, y0, x1, y1), outline=colour, width=max(1, height // 8))
        text = f"{class_names[int(result.labels[n]) - 1]} {result.scores[n]:.2f}"
        place = pen.textbbox((x0, max(0.0, y0 - 1.3 * height)), text, font=font)
        pen.rectangle(place, fill=colour)
        pen.text((x0, max(0.0, y0 - 1.3 * height)), text, fill=ink_on(colour), font=font)
    return picture
