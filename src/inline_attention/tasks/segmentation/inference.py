"""Segments images of any size, as a whole or in windows, averaged over scales and mirror images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.tasks.segmentation.config import SegmentDataConfig
from inline_attention.tasks.segmentation.heads import resize

_ENLARGED = 2**26  # logits that are enlarged at a time

Segment = Callable[[Tensor], Tensor]  # (B, 3, h, w) → logits (B, classes, h, w) float32


@dataclass(frozen=True)
class Inference:
    """How an image is segmented. Probabilities are averaged over scales and mirror images."""

    window: tuple[int, int] | None = None  # (height, width); None: the whole image
    window_stride: float = 2 / 3  # of the window's side
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    @classmethod
    def of(cls, config: SegmentDataConfig) -> "Inference":
        return cls(config.window_size, config.window_stride, tuple(config.eval_scales), config.eval_flip)

    def __call__(self, segment: Segment, images: Tensor, size: Sequence[int]) -> Tensor:
        """Classes (B, *size) of images (B, 3, h, w)."""
        if len(self.scales) == 1 and not self.flip:  # no softmax: the largest logit has the largest probability
            return _largest(self._logits(segment, images, self.scales[0]), size)
        total: Tensor | None = None
        for scale in self.scales:
            for flipped in (False, True) if self.flip else (False,):
                logits = self._logits(segment, images.flip(3) if flipped else images, scale)
                probabilities = _fitted(logits.flip(3) if flipped else logits, size).softmax(1)
                total = probabilities if total is None else total.add_(probabilities)
        assert total is not None
        return total.argmax(1)

    def _logits(self, segment: Segment, images: Tensor, scale: float) -> Tensor:
        if scale != 1:
            images = resize(images, [max(1, round(side * scale)) for side in images.shape[2:]])
        if self.window is None:
            return segment(images)
        rows, columns = (
            places(side, window, stride=self.window_stride)
            for side, window in zip(images.shape[2:], self.window, strict=True)
        )
        height, width = (min(s, w) for s, w in zip(images.shape[2:], self.window, strict=True))
        total: Tensor | None = None
        covered = images.new_zeros(1, 1, *images.shape[2:])
        for top in rows:
            for left in columns:
                window = (..., slice(top, top + height), slice(left, left + width))
                logits = segment(images[window])
                if total is None:
                    total = logits.new_zeros(*logits.shape[:2], *images.shape[2:])
                total[window] += logits
                covered[window] += 1
        assert total is not None
        return total / covered


def _fitted(logits: Tensor, size: Sequence[int]) -> Tensor:
    return logits if tuple(logits.shape[2:]) == tuple(size) else resize(logits, size)


def _largest(logits: Tensor, size: Sequence[int]) -> Tensor:
    """The class of the largest logit (B, *size). Few classes are enlarged at a time: all take gigabytes."""
    few = max(1, _ENLARGED // (len(logits) * math.prod(size)))
    best, classes = _fitted(logits[:, :few], size).max(1)
    for first in range(few, logits.shape[1], few):
        largest, index = _fitted(logits[:, first : first + few], size).max(1)
        classes = torch.where(largest > best, index + first, classes)
        best = torch.maximum(best, largest)
    return classes


def places(side: int, window: int, *, stride: float) -> list[int]:
    """Where windows start along a side: every `stride` of a window. The last window ends with the side."""
    step = max(1, int(window * stride))
    last = max(0, side - window)
    return [*range(0, last, step), last]


@torch.no_grad()
def segment_images(
    segment: Segment, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]], *, inference: Inference
) -> list[Tensor]:
    """Classes (*size) of each image (3, h, w). Images of one shape and size go through the model together."""
    classes: dict[int, Tensor] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, (image, size) in enumerate(zip(images, sizes, strict=True)):
        groups.setdefault((tuple(image.shape), size), []).append(index)
    for members in groups.values():
        found = inference(segment, torch.stack([images[i] for i in members]), sizes[members[0]])
        classes |= dict(zip(members, found, strict=True))
    return [classes[index] for index in range(len(images))]
