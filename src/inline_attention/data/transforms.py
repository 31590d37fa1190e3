"""Transforms of a decoded image to a uint8 tensor (C, H, W). The device normalises and erases."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import Compose

from inline_attention.data.config import AUGMENTING, DataConfig
from inline_attention.data.decode import check_pixels

Transform = Callable[[Image.Image], Tensor]  # PIL image -> (C, H, W) uint8

# The published evaluation resizes both sides to int(size·256/224) and crops the centre: timm's "squash".
_PUBLISHED_CROP = 224 / 256


def train_transform(config: DataConfig) -> Transform:
    """Random crop, flip, and RandAugment or colour jitter. The random numbers come from the global generators."""
    if not config.augment:
        return eval_transform(config)
    if config.auto_augment is not None and config.interpolation not in AUGMENTING:
        raise ValueError(
            f"data.interpolation is {config.interpolation!r}; expected one of {', '.join(AUGMENTING)} with "
            "data.auto_augment, whose rotations know no other"
        )
    try:
        transform = create_transform(
            config.size,
            is_training=True,
            use_prefetcher=True,  # leaves the result uint8
            scale=(config.scale[0], config.scale[1]),
            ratio=(config.ratio[0], config.ratio[1]),
            hflip=config.hflip,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment,
            interpolation=config.interpolation,
            mean=config.statistics[0],  # RandAugment fills new pixels with this colour
        )
    except (AssertionError, KeyError) as error:
        raise ValueError(
            f"data.auto_augment is {config.auto_augment!r}, which timm does not understand ({error}); "
            "expected a policy such as rand-m9-mstd0.5-inc1, or null"
        ) from error
    for operation in _augment_operations(transform):
        use_our_posterize(operation)
    return transform


def _augment_operations(transform: Compose) -> Iterator[auto_augment.AugmentOp]:
    for step in transform.transforms:
        if isinstance(step, auto_augment.AutoAugment):
            yield from chain.from_iterable(step.policy)
        elif isinstance(step, auto_augment.RandAugment | auto_augment.AugMixAugment):
            yield from step.ops


def use_our_posterize(operation: auto_augment.AugmentOp) -> None:
    if operation.aug_fn is auto_augment.posterize:
        operation.aug_fn = _posterize


def _posterize(image: Image.Image, bits_to_keep: int, **arguments: object) -> Image.Image:
    """timm's posterize. At 0 bits, the strongest magnitude, the image is black; newer Pillow releases refuse 0 bits."""
    if bits_to_keep == 0:
        return Image.new(image.mode, image.size)
    return auto_augment.posterize(image, bits_to_keep, **arguments)


def eval_transform(config: DataConfig) -> Transform:
    """The transform that `config.eval_transform` names.

    "published": both sides to int(size·256/224), centre crop.
    "timm": short side to size/crop_pct, centre crop.
    "resize": both sides to size.
    """
    crop_mode, crop_pct = eval_crop(config)
    transform = create_transform(
        config.size,
        is_training=False,
        use_prefetcher=True,
        interpolation=eval_interpolation(config),
        crop_mode=crop_mode,
        crop_pct=crop_pct,
    )
    return _BoundedResize(config, transform) if config.eval_transform == "timm" else transform


def eval_crop(config: DataConfig) -> tuple[str, float]:
    """timm's crop_mode and crop_pct of an evaluation transform"""
    crop_pct = {"published": _PUBLISHED_CROP, "timm": config.crop_pct, "resize": 1.0}[config.eval_transform]
    return "center" if config.eval_transform == "timm" else "squash", crop_pct


def eval_interpolation(config: DataConfig) -> str:
    return "bilinear" if config.interpolation == "random" else config.interpolation


class _BoundedResize:
    """Refuses an image that "timm" would enlarge beyond the pixel limit before it crops the centre.

    An image of 1 × 65,000 pixels would become 256 × 16.6 million.
    """

    def __init__(self, config: DataConfig, transform: Transform) -> None:
        self._transform = transform
        self._size = [side / config.crop_pct for side in config.size]  # (height, width) that the resized image covers

    def __call__(self, image: Image.Image) -> Tensor:
        scale = max(self._size[0] / image.height, self._size[1] / image.width)
        check_pixels(round(scale * image.width), round(scale * image.height))
        return self._transform(image)


class ErasedBox(NamedTuple):
    """A rectangle that random erasing fills with noise."""

    box: tuple[int, int, int, int]  # top, left, height, width
    noise: Tensor  # (C, height, width)


class ErasedBounds(NamedTuple):
    area: tuple[float, float]  # as a share of the image
    log_ratio: tuple[float, float]  # of height to width


class BoxErasing:
    """timm's random erasing in "pixel" mode, which returns the rectangle instead of applying it.

    Erasing comes after normalisation, on the device, but its random numbers belong to the sample. So a worker draws the
    rectangle and the noise, and the batch carries them to the device.
    """

    def __init__(self, probability: float) -> None:
        self._probability = probability
        self._erasing = RandomErasing(1.0, mode="pixel", device="cpu")

    @staticmethod
    def bounds() -> ErasedBounds:
        """timm's bounds of a box"""
        erasing = RandomErasing()
        return ErasedBounds((erasing.min_area, erasing.max_area), erasing.log_aspect_ratio)

    def __call__(self, image: Tensor) -> ErasedBox | None:
        if random.random() >= self._probability:
            return None
        canvas = torch.full(image.shape, torch.nan)  # (C, H, W)
        self._erasing(canvas)
        erased = ~canvas[0].isnan()
        rows, columns = erased.any(1).nonzero(), erased.any(0).nonzero()
        if len(rows) == 0:  # no rectangle fits
            return None
        top, left = int(rows[0]), int(columns[0])
        height, width = len(rows), len(columns)
        return ErasedBox((top, left, height, width), canvas[:, top : top + height, left : left + width])


def erase_(images: Tensor, boxes: Tensor, noise: Tensor) -> Tensor:
    """Fill boxes of `images` (B, C, H, W) in place. `boxes` (B, 4) int64: top, left, height (0: no box), width.

    `noise` holds the values of all boxes, flattened in the order of images, channels, rows, columns.
    """
    _, channels, rows, columns = images.shape
    image, number = position_in_boxes(boxes, channels=channels, total=len(noise))
    top, left, height, width = boxes[image].unbind(1)
    channel, row, column = number // (height * width), number // width % height, number % width
    places = ((image * channels + channel) * rows + top + row) * columns + left + column
    images.view(-1).index_copy_(0, places, noise)
    return images


def position_in_boxes(boxes: Tensor, *, channels: int, total: int) -> tuple[Tensor, Tensor]:
    """The image of each erased value, and its number among those of that image: (total,) each"""
    sizes = channels * boxes[:, 2] * boxes[:, 3]
    # `output_size` saves the host from waiting for the sum of the sizes.
    image = torch.arange(len(boxes), device=boxes.device).repeat_interleave(sizes, output_size=total)
    return image, torch.arange(total, device=boxes.device) - (sizes.cumsum(0) - sizes)[image]
