"""Batches from worker processes: uint8 images before normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from inline_attention.data.skipped import SkippedImage
from inline_attention.data.sources import Label
from inline_attention.data.transforms import ErasedBox


class Collated(Protocol):
    """A batch from a worker process, for any task."""

    skipped: Sequence[SkippedImage]  # unreadable images among the requested ones
    replaced: int  # images that replace an unreadable one

    def __len__(self) -> int: ...

    @property
    def on_device(self) -> bool:
        """True if the pixels are on the training device already."""


CollatedT = TypeVar("CollatedT", bound=Collated)
CollatedT_co = TypeVar("CollatedT_co", bound=Collated, covariant=True)


class Sample(NamedTuple):
    pixels: Tensor  # (C, H, W) uint8
    target: Label
    sample_id: int
    erased: ErasedBox | None = None


BatchT = TypeVar("BatchT", bound="UnnormalisedBatch")


@dataclass(kw_only=True)
class UnnormalisedBatch:
    """A batch as a worker process returns it. Tasks add their targets."""

    images: Tensor  # (B, …) uint8
    sample_ids: Tensor  # (B,) int64
    skipped: Sequence[SkippedImage] = ()
    replaced: int = 0

    def __len__(self) -> int:
        return len(self.images)

    @property
    def on_device(self) -> bool:
        return self.images.is_cuda

    def pin_memory(self: BatchT) -> BatchT:  # called by DataLoader
        return replace(self, **{name: _pinned(value) for name, value in vars(self).items()})


def _pinned(value: Any) -> Any:
    """Pin all tensors, also in lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        return {name: _pinned(part) for name, part in value.items()}
    return [_pinned(part) for part in value] if isinstance(value, list) else value


@dataclass(kw_only=True)
class RawBatch(UnnormalisedBatch):
    """Images (B, C, H, W), float32 after an augmentation on the device, and the boxes that random erasing will fill."""

    targets: Tensor  # (B,) int64, or (B, classes) float32 of zeros and ones
    boxes: Tensor | None = None  # (B, 4) int64: top, left, height, width; None if nothing is erased
    noise: Tensor | None = None  # float32, the values of all boxes one after the other


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
        targets=as_targets(np.array([s.target for s in samples])),
        sample_ids=torch.tensor([s.sample_id for s in samples], dtype=torch.int64),
        skipped=skipped,
        replaced=replaced,
    )
    erased = [s.erased for s in samples]
    if any(erased):
        batch.boxes = torch.tensor([(0, 0, 0, 0) if e is None else e.box for e in erased])
        batch.noise = torch.cat([e.noise.flatten() for e in erased if e is not None])
    return batch


def as_targets(labels: np.ndarray) -> Tensor:
    """The labels of a source as targets of a loss: (B,) int64, or (B, classes) float32 of zeros and ones"""
    return torch.from_numpy(labels).to(torch.int64 if labels.ndim == 1 else torch.float32)
