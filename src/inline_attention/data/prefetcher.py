"""Prefetchers transfer the next batch to the device, and finish it there, while the model trains on the current one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from inline_attention.data.collate import CollatedT, RawBatch
from inline_attention.data.config import DataConfig
from inline_attention.data.transforms import erase_

BatchT = TypeVar("BatchT")  # a batch for the model


@dataclass
class Batch:
    """A batch for the model, on the loader's device."""

    images: Tensor  # (B, C, H, W) float32, normalised
    targets: Tensor  # (B,) int64, or (B, classes) float32 of zeros and ones
    sample_ids: Tensor  # (B,) int64, indices of the images in the data set


class Prefetcher(ABC, Generic[CollatedT, BatchT]):
    """Turns batches of the workers into batches of the model, one batch ahead on a CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None

    @abstractmethod
    def finish(self, raw: CollatedT) -> BatchT:
        """Transfer without waiting, and do the remaining computation on `self.device`."""

    def to(self, device: torch.device) -> None:
        if device == self.device:  # memory is pooled by stream: keep one stream for the loader's lifetime
            return
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Iterator[CollatedT]) -> Iterator[BatchT]:
        if self._stream is None:
            yield from map(self.finish, batches)
            return
        stream = self._stream
        ready: tuple[BatchT, torch.cuda.Event] | None = None
        for raw in batches:
            consumer = torch.cuda.current_stream(self.device)
            if raw.on_device:
                yield self.finish(raw)
                continue
            # Memory that the consumer has freed may be reused here as soon as its queued work is done.
            stream.wait_stream(consumer)
            with torch.cuda.stream(stream):
                following = (self.finish(raw), stream.record_event())
            if ready is not None:
                consumer.wait_event(ready[1])
                yield ready[0]
            ready = following
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready[1])
            yield ready[0]


class Normalise:
    """Pixels (B, C, H, W) in 0 … 255 → float32, contiguous, on their device. Mean and std are of pixels in 0 … 1."""

    def __init__(
        self, mean: Sequence[float] = IMAGENET_DEFAULT_MEAN, std: Sequence[float] = IMAGENET_DEFAULT_STD
    ) -> None:
        self._mean, self._std = (torch.tensor(values).view(1, -1, 1, 1) * 255 for values in (mean, std))

    def to(self, device: torch.device) -> None:
        """In advance, this keeps the first batch from waiting for the device."""
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        self.to(pixels.device)
        return pixels.contiguous().sub(self._mean).div_(self._std)


class ImagePrefetcher(Prefetcher[RawBatch, Batch]):
    """Transfers bytes rather than floats, then normalises and erases."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self._normalise = Normalise(*config.statistics)

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._normalise.to(device)

    def finish(self, raw: RawBatch) -> Batch:
        images = self._normalise(raw.images.to(self.device, non_blocking=True))
        if raw.boxes is not None and raw.noise is not None:
            boxes, noise = (t.to(self.device, non_blocking=True) for t in (raw.boxes, raw.noise))
            images = erase_(images, boxes, noise)
        targets, ids = (t.to(self.device, non_blocking=True) for t in (raw.targets, raw.sample_ids))
        return Batch(images, targets, ids)
