"""timm's RandAugment for a batch: every image has its own operations, on the device of the pixels."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.data.auto_augment import RandAugment, rand_augment_transform
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

DRAWS = 4  # random numbers of a layer: which operation, whether, how much, in which direction


class Level(NamedTuple):
    """How much is done to each of n images, and in which direction."""

    share: Tensor  # (n,) timm's levels, divided by 10
    sign: Tensor  # (n,) −1 or 1

    def signed(self, most: float) -> Tensor:
        return self.sign * self.share * most

    def whole(self, most: int) -> Tensor:
        return (self.share * most).floor()


# Operations on single pixels, and blends. All give the same bytes as Pillow.


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    return images & (256 - 2.0 ** (8 - bits)).to(torch.uint8).view(-1, 1, 1, 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images < threshold.view(-1, 1, 1, 1), images, 255 - images)


def solarize_add(images: Tensor, amount: Tensor) -> Tensor:
    brighter = (images + amount.view(-1, 1, 1, 1)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(torch.zeros_like(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(_grey(images).double().mean((1, 2, 3), keepdim=True).add(0.5).floor(), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(_grey(images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blends with the mean of 3×3 pixels, of which the middle one counts five times. The border stays."""
    channels = images.shape[1]
    kernel = torch.ones(channels, 1, 3, 3, device=images.device)
    kernel[:, :, 1, 1] = 5
    smooth = images.float()
    inside = F.conv2d(smooth, kernel, groups=channels)
    smooth[:, :, 1:-1, 1:-1] = (inside / 13 + 0.5).floor()
    return _blend(smooth, images, factor)


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    base = base.float()
    return (base + factor.view(-1, 1, 1, 1) * (images - base)).clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """(n, C, H, W) uint8 → (n, 1, H, W), in the whole numbers that Pillow computes with"""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


# How much, by the names of timm.

_Amount = Callable[[Level], Tensor]


def _factor(level: Level) -> Tensor:
    """Of a blend; 1 changes nothing."""
    return 0.1 + 1.8 * level.share


def _growing_factor(level: Level) -> Tensor:
    """The same, for policies whose changes grow with the level."""
    return (1 + level.signed(0.9)).clamp(min=0.1)


PIXELS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], _Amount]] = {
    "AutoContrast": (lambda images, _: TF.autocontrast(images), lambda level: level.share),
    "Equalize": (lambda images, _: TF.equalize(images), lambda level: level.share),
    "Invert": (lambda images, _: 255 - images, lambda level: level.share),
    "Posterize": (posterize, lambda level: level.whole(4)),
    "PosterizeIncreasing": (posterize, lambda level: 4 - level.whole(4)),
    "Solarize": (solarize, lambda level: level.whole(256).clamp(max=256)),
    "SolarizeIncreasing": (solarize, lambda level: 256 - level.whole(256).clamp(max=256)),
    "SolarizeAdd": (solarize_add, lambda level: level.whole(110).clamp(max=128)),
    "Color": (saturation, _factor),
    "ColorIncreasing": (saturation, _growing_factor),
    "Contrast": (contrast, _factor),
    "ContrastIncreasing": (contrast, _growing_factor),
    "Brightness": (brightness, _factor),
    "BrightnessIncreasing": (brightness, _growing_factor),
    "Sharpness": (sharpness, _factor),
    "SharpnessIncreasing": (sharpness, _growing_factor),
}


def _rotation(angle: Tensor, height: int, width: int) -> Tensor:
    sine, cosine, zero = angle.sin(), angle.cos(), torch.zeros_like(angle)
    turn = torch.stack([cosine, -sine, zero, sine, cosine, zero], 1).view(-1, 2, 3)
    centre = torch.tensor([width / 2, height / 2])
    turn[:, :, 2] = centre - turn[:, :, :2] @ centre
    return turn


def _changed(row: int, column: int, values: Tensor) -> Tensor:
    maps = torch.eye(2, 3).repeat(len(values), 1, 1)
    maps[:, row, column] += values
    return maps


# (amount, height, width) → (n, 2, 3): from a place in the new image to one in the old, in pixels from the top left
MAPS: dict[str, tuple[Callable[[Tensor, int, int], Tensor], _Amount]] = {
    "Rotate": (_rotation, lambda level: level.signed(math.radians(30))),
    "ShearX": (lambda amount, *_: _changed(0, 1, amount), lambda level: level.signed(0.3)),
    "ShearY": (lambda amount, *_: _changed(1, 0, amount), lambda level: level.signed(0.3)),
    "TranslateXRel": (lambda amount, _, width: _changed(0, 2, width * amount), lambda level: level.signed(0.45)),
    "TranslateYRel": (lambda amount, height, _: _changed(1, 2, height * amount), lambda level: level.signed(0.45)),
}


def warp(images: Tensor, maps: Tensor, *, mode: str, fill: Tensor) -> Tensor:
    """Images (n, C, H, W) uint8 through maps (n, 2, 3); places outside get the colour `fill` (C,)"""
    height, width = images.shape[2:]
    y, x = (torch.arange(size, device=images.device) + 0.5 for size in (height, width))
    places = torch.stack(torch.broadcast_tensors(x, y[:, None], torch.ones_like(x)), -1)  # (H, W, 3)
    places = torch.einsum("nij,hwj->nhwi", maps, places)
    size = torch.tensor([width, height], device=images.device)
    inside = ((places >= 0) & (places < size)).all(-1).unsqueeze(1)
    grid = 2 * places / size - 1
    out = F.grid_sample(images.float(), grid, mode=mode, padding_mode="border", align_corners=False)
    # Pillow drops what is behind the point, too. A thousandth keeps whole numbers whole.
    out = (out + 1e-3).clamp(0, 255)
    return torch.where(inside, out, fill.view(-1, 1, 1)).to(torch.uint8)


class BatchPolicy:
    """What a policy such as rand-m9-mstd0.5-inc1 does to a batch.

    Operations, probabilities and levels are those of timm's transform of single images. Bicubic interpolation is
    PyTorch's, which is a little sharper than Pillow's.

    Args:
        policy: a string that timm's RandAugment understands, without weights or sets of operations ("-t…").
        mean: the colour of new pixels, in 0 … 1.
        mode: interpolation, "bilinear" or "bicubic".
    """

    def __init__(self, policy: str, *, mean: Sequence[float], mode: str) -> None:
        timms = parse(policy)
        first = timms.ops[0]
        self.layers, self._names = timms.num_layers, [operation.name for operation in timms.ops]
        self._probability, self._magnitude, self._spread = first.prob, first.magnitude, first.magnitude_std
        self._most = first.magnitude_max or 10.0
        self._fill = torch.tensor([float(min(255, round(255 * value))) for value in mean])
        self._mode = mode

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """(B, C, H, W) uint8 on any device, which is changed, and (B, layers, DRAWS) in 0 … 1 on the CPU"""
        for layer in draws.unbind(1):
            chosen = (layer[:, 0] * len(self._names)).long().clamp(max=len(self._names) - 1)
            chosen[layer[:, 1] >= self._probability] = -1
            for number in chosen.unique().tolist():
                if number >= 0:
                    rows = (chosen == number).nonzero()[:, 0]
                    name, level = self._names[number], self._level(layer[rows])
                    rows = to_device_of(images, rows)
                    images[rows] = self.apply(name, images[rows], level)
        return images

    def _level(self, draws: Tensor) -> Level:
        if math.isinf(self._spread):
            levels = draws[:, 2] * self._magnitude
        else:
            # Not the ends of 0 … 1, whose normal numbers are infinite.
            levels = self._magnitude + self._spread * torch.special.ndtri(draws[:, 2].double().clamp(1e-9, 1 - 1e-9))
        return Level(levels.clamp(0, self._most).float() / 10, torch.where(draws[:, 3] < 0.5, 1.0, -1.0))

    def apply(self, name: str, images: Tensor, level: Level) -> Tensor:
        if name in PIXELS:
            apply, amount = PIXELS[name]
            return apply(images, to_device_of(images, amount(level)))
        to_maps, amount = MAPS[name]
        maps = to_maps(amount(level), *images.shape[2:])
        fill, maps = (to_device_of(images, tensor) for tensor in (self._fill, maps))
        return warp(images, maps, mode=self._mode, fill=fill)


def parse(policy: str) -> RandAugment:
    """timm's transform for a policy. ValueError if a batch cannot do the same."""
    try:
        found = rand_augment_transform(policy, {})
        names = {operation.name for operation in found.ops}
        reason = "" if names <= {*PIXELS, *MAPS} and found.choice_weights is None else "a set of operations of its own"
    except (AssertionError, KeyError, ValueError) as error:
        reason = f"not a RandAugment that timm understands ({error})" if str(error) else "not a RandAugment"
    if reason:
        raise ValueError(
            f"data.auto_augment is {policy!r}, {reason}; expected a policy such as rand-m9-mstd0.5-inc1, or null, with "
            "data.augment_on_device"
        )
    return found


def to_device_of(images: Tensor, tensor: Tensor) -> Tensor:
    """A CPU tensor on the device of the images."""
    if images.is_cuda:  # a copy from unpinned memory would wait for the device
        return tensor.pin_memory().to(images.device, non_blocking=True)
    return tensor.to(images.device)
