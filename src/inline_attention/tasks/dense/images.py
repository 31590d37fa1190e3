"""Normalisation of pixels."""

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

MEAN, STD = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD  # for pixels in 0 … 1


class Normalise:
    """(B, 3, H, W) uint8 → float32, contiguous, on the device of the pixels"""

    def __init__(self) -> None:
        self._mean, self._std = (torch.tensor(values).view(1, -1, 1, 1) * 255 for values in (MEAN, STD))

    def __call__(self, pixels: Tensor) -> Tensor:
        if self._mean.device != pixels.device:
            self._mean, self._std = self._mean.to(pixels.device), self._std.to(pixels.device)
        return pixels.float().contiguous().sub_(self._mean).div_(self._std)
