"""Augmentation of an image and its mask. The caller seeds Python's generator for each sample."""

import random

import numpy as np
from PIL import Image

from inline_attention.tasks.segmentation.config import SegmentDataConfig
from inline_attention.tasks.segmentation.sources import IGNORED

_MAX_DRAWS = 10


class TrainTransform:
    """Random scale, crop, mirroring and colours: (H, W, 3) and (H, W) uint8 → the same, at most as large as the crop"""

    def __init__(self, config: SegmentDataConfig) -> None:
        self._config = config

    def __call__(self, pixels: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        config = self._config
        height, width = target_size(mask.shape, config, scale=random.uniform(*config.scale))
        box = self._choose_box(mask, (height, width))
        image = _cut(Image.fromarray(pixels), box, (height, width), Image.Resampling.BILINEAR)
        cut = _cut(Image.fromarray(mask), box, (height, width), Image.Resampling.NEAREST)
        if random.random() < config.hflip:
            image, cut = (x.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for x in (image, cut))
        if config.photometric:
            image = distort(image)
        return np.array(image), np.array(cut)

    def _choose_box(self, mask: np.ndarray, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of a crop of the image at `size` that is not dominated by one class"""
        config = self._config
        rows, columns = (min(crop, side) for crop, side in zip(config.crop_size, size, strict=True))
        for _ in range(_MAX_DRAWS):
            top, left = random.randint(0, size[0] - rows), random.randint(0, size[1] - columns)
            box = (left, top, left + columns, top + rows)
            if config.max_class_share >= 1:
                break
            cut = np.asarray(_cut(Image.fromarray(mask), box, size, Image.Resampling.NEAREST))
            counts = np.bincount(cut[cut != IGNORED])
            if np.count_nonzero(counts) > 1 and counts.max() < config.max_class_share * counts.sum():
                break
        return box


def target_size(shape: tuple[int, ...], config: SegmentDataConfig, *, scale: float = 1.0) -> tuple[int, int]:
    """(height, width) of an image after resizing, which keeps the aspect ratio"""
    height, width = shape[:2]
    factor = scale
    if config.short_side is not None:
        factor *= min(config.short_side / min(height, width), config.max_side / max(height, width))
    return max(1, round(height * factor)), max(1, round(width * factor))


def _cut(
    image: Image.Image, box: tuple[int, int, int, int], size: tuple[int, int], resampling: Image.Resampling
) -> Image.Image:
    """The crop `box` of the image resized to `size`, without resizing the rest"""
    down, across = image.height / size[0], image.width / size[1]
    left, top, right, bottom = box
    # Rounding must not move the box out of the image.
    source = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
    return image.resize((right - left, bottom - top), resampling, box=source)


def distort(image: Image.Image) -> Image.Image:
    """Change brightness by ±32, contrast and saturation by 0.5 to 1.5, and hue by ±36°, each with probability 1/2.

    Contrast comes before or after saturation and hue.
    """
    values = np.arange(256)
    if random.random() < 0.5:
        image = _mapped(image, values + random.uniform(-32, 32))
    contrast_first = random.random() < 0.5
    if contrast_first and random.random() < 0.5:
        image = _mapped(image, values * random.uniform(0.5, 1.5))
    saturation = random.uniform(0.5, 1.5) if random.random() < 0.5 else 1.0
    hue = random.uniform(-36, 36) / 360 * 256 if random.random() < 0.5 else 0.0
    if saturation != 1.0 or hue != 0.0:
        tables = [(values + hue) % 256, np.clip(values * saturation, 0, 255), values]
        image = image.convert("HSV").point(_table(np.concatenate(tables))).convert("RGB")
    if not contrast_first and random.random() < 0.5:
        image = _mapped(image, values * random.uniform(0.5, 1.5))
    return image


def _mapped(image: Image.Image, values: np.ndarray) -> Image.Image:
    return image.point(_table(np.tile(np.clip(values, 0, 255), 3)))


def _table(values: np.ndarray) -> list[int]:
    return values.astype(np.uint8).tolist()
