"""Batches of uint8 images as worker processes make them, before normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from inline_attention.data.skipped import SkippedImage
from inline_attention.data.transforms import ErasedBox


class Collated(Protocol):
    """A batch as workers make it, for any task."""

    skipped: Sequence[SkippedImage]  # unreadable images among those asked for
    replaced: int  # images that replace an unreadable one

    def __len__(self) -> int: ...

    @property
    def on_device(self) -> bool:
        """True if the pixels are on the training device already."""


CollatedT = TypeVar("CollatedT", bound=Collated)
CollatedT_co = TypeVar("CollatedT_co", bound=Collated, covariant=True)


class Sample(NamedTuple):
    pixels: Tensor  # (C, H, W) uint8
    target: int
    sample_id: int
    erased: ErasedBox | None = None


@dataclass
class RawBatch:
    """Pixels before normalisation, and the boxes that random erasing will fill."""

    images: Tensor  # (B, C, H, W) uint8; float32 in 0 … 255 if augmented on the device
    targets: Tensor  # (B,) int64
    sample_ids: Tensor  # (B,) int64
    boxes: Tensor | None = None  # (B, 4) int64: top, left, height, width; None if nothing is erased
    noise: Tensor | None = None  # float32, the values of all boxes one after the other
    skipped: Sequence[SkippedImage] = ()
    replaced: int = 0

    def __len__(self) -> int:
        return len(self.images)

    @property
    def on_device(self) -> bool:
        return self.images.is_cuda

    def pin_memory(self) -> "RawBatch":  # called by DataLoader
        return replace(
            self,
            images=self.images.pin_memory(),
            targets=self.targets.pin_memory(),
            sample_ids=self.sample_ids.pin_memory(),
            boxes=None if self.boxes is None else self.boxes.pin_memory(),
            noise=None if self.noise is None else self.noise.pin_memory(),
        )


def collate(
    samples: Sequence[Sample],
    *,
    shape: tuple[int, int, int],
    skipped: Sequence[SkippedImage] = (),
    replaced: int = 0,
) -> RawBatch:
    """Stack the samples. `shape` (C, H, W) is the shape of one image, for a batch without any."""
    batch = RawBatch(
        images=torch.stack([s.pixels for s in samples]) if samples else torch.empty((0, *shape), dtype=torch.uint8),
        targets=torch.tensor([s.target for s in samples], dtype=torch.int64),
        sample_ids=torch.tensor([s.sample_id for s in samples], dtype=torch.int64),
        skipped=skipped,
        replaced=replaced,
    )
    erased = [s.erased for s in samples]
    if any(erased):
        batch.boxes = torch.tensor([(0, 0, 0, 0) if e is None else e.box for e in erased])
        batch.noise = torch.cat([e.noise.flatten() for e in erased if e is not None])
    return batch
