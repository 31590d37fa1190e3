"""Augmentation of whole batches on the device of the pixels, without worker processes or transfers."""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inline_attention.data.batch_policy import DRAWS as POLICY_DRAWS
from inline_attention.data.batch_policy import BatchPolicy, to_device_of
from inline_attention.data.config import DataConfig
from inline_attention.data.seeding import derive_seed
from inline_attention.data.transforms import BoxErasing, position_in_boxes

CROP_DRAWS = 8  # random numbers per image: area, ratio, top, left, flip, brightness, contrast, saturation
ERASE_DRAWS = 6  # whether, area, ratio, top, left, noise
NOISE = 2**20  # normal numbers of an epoch. The noise of a box is a stretch of them
_LUMA = (0.299, 0.587, 0.114)


class Augmented(NamedTuple):
    """Images, and what random erasing does after they are normalised; `RawBatch` has the fields."""

    images: Tensor  # (B, C, H, W) in 0 … 255
    boxes: Tensor | None = None
    noise: Tensor | None = None


class BatchAugment:
    """Random crop, horizontal flip, RandAugment or colour jitter, and random erasing of a batch.

    The random numbers of an image are a function of (seed, epoch, sample, copy). They come from one table per epoch,
    drawn on the CPU, so that batches are the same on every device and rank. Two things differ from the transforms of
    single images: a box that does not fit is clipped instead of drawn again, and the borders of a crop may lie between
    pixels.
    """

    def __init__(self, config: DataConfig, *, num_samples: int, seed: int) -> None:
        self._config, self._seed = config, seed
        self._policy = None
        if config.auto_augment is not None:
            mean = config.statistics[0]
            self._policy = BatchPolicy(config.auto_augment, mean=mean, mode=config.interpolation)
        self._sizes = [
            CROP_DRAWS,
            0 if self._policy is None else self._policy.layers * POLICY_DRAWS,
            ERASE_DRAWS if config.random_erase else 0,
        ]
        self._shape = (num_samples, max(1, config.repeats), sum(self._sizes))
        self._epoch, self._table, self._noise = -1, torch.empty(0), torch.empty(0)

    def draws(self, epoch: int, samples: np.ndarray, copies: np.ndarray) -> Tensor:
        """The random numbers of a batch, uniform in 0 … 1: (B, n) on the CPU"""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed("batch augment", self._seed, epoch))
            self._epoch, self._table = epoch, torch.rand(self._shape, generator=generator)
            if self._config.random_erase:
                self._noise = torch.randn(NOISE, generator=generator)
        return self._table[torch.from_numpy(samples), torch.from_numpy(copies)]

    def __call__(self, images: Tensor, draws: Tensor) -> Augmented:
        """Images (B, C, H, W) uint8 on any device, and what `draws` returned"""
        config, size = self._config, (images.shape[2], images.shape[3])
        crop, policy, erase = draws.split(self._sizes, dim=1)
        crop = to_device_of(images, crop)
        boxes = crop_boxes(crop[:, :4], size=size, scale=config.scale, ratio=config.ratio)
        out = crop_and_flip(images.float(), boxes, crop[:, 4] < config.hflip, mode=config.interpolation)
        if self._policy is not None:
            out = self._policy(out.round_().to(torch.uint8), policy.unflatten(1, (-1, POLICY_DRAWS)))
        elif config.color_jitter:
            out = jitter_colours(out, 1 + config.color_jitter * (2 * crop[:, 5:] - 1))
        return Augmented(out, *self._erased(out, erase)) if config.random_erase else Augmented(out)

    def _erased(self, images: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes and noise of a `RawBatch`"""
        boxes = erased_boxes(draws, size=(images.shape[2], images.shape[3]), probability=self._config.random_erase)
        starts = (draws[:, 5] * NOISE).long()
        total = images.shape[1] * int(boxes[:, 2:].prod(1).sum())
        self._noise = self._noise.to(images.device)
        boxes, starts = (to_device_of(images, tensor) for tensor in (boxes, starts))
        image, number = position_in_boxes(boxes, channels=images.shape[1], total=total)
        return boxes, self._noise[(starts[image] + number) % NOISE]


def crop_boxes(draws: Tensor, *, size: tuple[int, int], scale: list[float], ratio: list[float]) -> Tensor:
    """(B, 4) uniform numbers → (B, 4): top, left, height, width as fractions of the image"""
    rows, columns = size
    area = scale[0] + (scale[1] - scale[0]) * draws[:, 0]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    shape = torch.exp(low + (high - low) * draws[:, 1]) * (rows / columns)  # width to height, as fractions
    height, width = (area / shape).sqrt().clamp(max=1), (area * shape).sqrt().clamp(max=1)
    return torch.stack([draws[:, 2] * (1 - height), draws[:, 3] * (1 - width), height, width], dim=1)


def erased_boxes(draws: Tensor, *, size: tuple[int, int], probability: float) -> Tensor:
    """(B, ERASE_DRAWS) uniform numbers → (B, 4) int64: top, left, height, width, of areas and ratios as in timm.

    Zeros where nothing is erased.
    """
    bounds = BoxErasing.bounds()
    sides = torch.tensor(size)
    area = (bounds.area[0] + (bounds.area[1] - bounds.area[0]) * draws[:, 1:2]) * sides.prod()
    low, high = bounds.log_ratio
    ratio = torch.exp((low + (high - low) * draws[:, 2:3]) * torch.tensor([1.0, -1.0]))  # of height, of width
    extent = (area * ratio).sqrt().round().long().clamp(max=sides - 1)
    start = (draws[:, 3:5] * (sides - extent + 1)).long()
    return torch.cat([start, extent], 1) * (draws[:, :1] < probability)


def crop_and_flip(images: Tensor, boxes: Tensor, flipped: Tensor, *, mode: str) -> Tensor:
    """Crop `boxes` (B, 4), fractions of images (B, C, H, W), and enlarge them to H×W; mirrored if `flipped` (B,)"""
    top, left, height, width = boxes.unbind(1)
    zero = torch.zeros_like(top)
    mirrored = torch.where(flipped, -width, width)
    across = torch.stack([mirrored, zero, 2 * left + width - 1], dim=1)
    down = torch.stack([zero, height, 2 * top + height - 1], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode=mode, padding_mode="border", align_corners=False).clamp_(0, 255)


def jitter_colours(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply brightness, contrast and saturation of (B, C, H, W) in 0 … 255 by the factors (B, 3), in this order."""
    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(1)
    images = (brightness * images).clamp_(0, 255)
    images = _blend(_luma(images.mean((2, 3), keepdim=True)), images, contrast)
    return _blend(_luma(images), images, saturation) if images.shape[1] == 3 else images


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(base, images, factor).clamp_(0, 255)


def _luma(images: Tensor) -> Tensor:
    """(B, C, H, W) → (B, 1, H, W)"""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue
