"""Augmentation of whole batches on the device of the pixels, without worker processes or transfers."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inline_attention.data.config import DataConfig
from inline_attention.data.seeding import derive_seed

DRAWS = 8  # random numbers per image: area, ratio, top, left, flip, brightness, contrast, saturation
_LUMA = (0.299, 0.587, 0.114)


class BatchAugment:
    """Random crop, horizontal flip and colour jitter of a batch.

    The random numbers of an image are a function of (seed, epoch, sample, copy). They come from one table per epoch,
    drawn on the CPU, so that batches are the same on every device and rank. Two things differ from the transforms of
    single images: a crop that does not fit is clipped instead of drawn again, and its borders may lie between pixels.
    """

    def __init__(self, config: DataConfig, *, num_samples: int, seed: int) -> None:
        self._config, self._seed = config, seed
        self._shape = (num_samples, max(1, config.repeats), DRAWS)
        self._epoch, self._table = -1, torch.empty(0)

    def draws(self, epoch: int, samples: np.ndarray, copies: np.ndarray) -> Tensor:
        """(B, DRAWS) uniform in 0 … 1, on the CPU"""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed("batch augment", self._seed, epoch))
            self._epoch, self._table = epoch, torch.rand(self._shape, generator=generator)
        return self._table[torch.from_numpy(samples), torch.from_numpy(copies)]

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """(B, C, H, W) uint8 and (B, DRAWS) on one device → (B, C, H, W) float32 in 0 … 255"""
        config = self._config
        boxes = crop_boxes(
            draws[:, :4], size=(images.shape[2], images.shape[3]), scale=config.scale, ratio=config.ratio
        )
        flipped = draws[:, 4] < config.hflip
        images = crop_and_flip(images.float(), boxes, flipped, mode=config.interpolation)
        if config.color_jitter:
            images = jitter_colours(images, 1 + config.color_jitter * (2 * draws[:, 5:] - 1))
        return images


def crop_boxes(draws: Tensor, *, size: tuple[int, int], scale: list[float], ratio: list[float]) -> Tensor:
    """(B, 4) uniform numbers → (B, 4): top, left, height, width as fractions of the image"""
    rows, columns = size
    area = scale[0] + (scale[1] - scale[0]) * draws[:, 0]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    shape = torch.exp(low + (high - low) * draws[:, 1]) * (rows / columns)  # width to height, as fractions
    height, width = (area / shape).sqrt().clamp(max=1), (area * shape).sqrt().clamp(max=1)
    return torch.stack([draws[:, 2] * (1 - height), draws[:, 3] * (1 - width), height, width], dim=1)


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
