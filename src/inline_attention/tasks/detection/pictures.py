"""Draws detections on images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from inline_attention.data.decode import read_image
from inline_attention.tasks.dense.colours import Colour, class_colour, ink_on
from inline_attention.tasks.dense.pictures import in_rows
from inline_attention.tasks.detection.annotations import AnnotatedImage
from inline_attention.tasks.detection.average_precision import ImageResult
from inline_attention.tasks.detection.coco import load_pycocotools, mask_of

_HEADINGS = ("found", "annotated")


def draw_examples(
    examples: Sequence[tuple[AnnotatedImage, ImageResult]], class_names: Sequence[str], path: Path
) -> None:
    """One row for each image, with the objects that were found and those of the annotations."""
    rows = []
    for annotated, found in examples:
        image = read_image(annotated.path)
        truth = draw(image, _truth(annotated, masks=found.masks is not None), class_names=class_names, scores=False)
        rows.append([draw(image, found, class_names=class_names), truth])
    in_rows(rows, _HEADINGS).save(path)


def _truth(image: AnnotatedImage, *, masks: bool) -> ImageResult:
    objects = image.objects
    return ImageResult(
        image.id,
        boxes=np.array([instance.box for instance in objects]),
        scores=np.ones(len(objects)),
        labels=np.array([instance.label for instance in objects]),
        masks=[mask_of(instance, image.size) for instance in objects] if masks else None,
    )


def draw(
    image: Image.Image,
    result: ImageResult,
    *,
    class_names: Sequence[str],
    min_score: float = 0.5,
    scores: bool = True,
) -> Image.Image:
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
        text = class_names[int(result.labels[n]) - 1] + (f" {result.scores[n]:.2f}" if scores else "")
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
