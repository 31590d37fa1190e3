"""Small data sets in memory: decoded once and kept as uint8."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from inline_attention.data.batch_augment import BatchAugment
from inline_attention.data.batch_policy import to_device_of
from inline_attention.data.collate import RawBatch, as_targets
from inline_attention.data.config import DataConfig
from inline_attention.data.dataset import EvalDataset, load_image
from inline_attention.data.decode import UnreadableImage
from inline_attention.data.sampler import EvalBatchSampler, SampleKey, TrainBatchSampler, replacement
from inline_attention.data.skipped import SkippedImage
from inline_attention.data.sources import Label, Source, label_at
from inline_attention.data.workers import BatchLoader, WorkerLoader, identity

_READ_BATCH = 64  # batch size of the workers that fill the memory


class DecodedSource:
    """A source whose images are decoded once, at their own sizes. Augmentation sees the same pixels as from files."""

    def __init__(self, source: Source, *, config: DataConfig, workers: int) -> None:
        self._source = source
        self.class_names, self.named = source.class_names, source.named
        loader = DataLoader(
            _DecodeDataset(source, config), batch_size=_READ_BATCH, collate_fn=identity, num_workers=workers,
            generator=torch.Generator(),
        )  # fmt: skip
        decoded = [item for batch in loader for item in batch]
        arrays = [item for item in decoded if not isinstance(item, str)]
        self._shapes = np.array([(0, 0, 0) if isinstance(item, str) else item.shape for item in decoded])
        self.labels = source.labels
        self._reasons = {index: item for index, item in enumerate(decoded) if isinstance(item, str)}
        self.skipped = [SkippedImage(source.path(index), reason) for index, reason in self._reasons.items()]
        self._starts = np.concatenate([[0], np.cumsum(self._shapes.prod(axis=1))])
        self._pixels = np.concatenate([array.ravel() for array in arrays]) if arrays else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, Label]:
        if index in self._reasons:
            raise UnreadableImage(self._reasons[index])
        pixels = self._pixels[self._starts[index] : self._starts[index + 1]].reshape(self._shapes[index])
        return Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels), label_at(self.labels, index)

    def path(self, index: int) -> str:
        return self._source.path(index)


class _DecodeDataset(Dataset[object]):
    """Yields the pixels (H, W, C) uint8 of each image, or the reason why it is unreadable."""

    def __init__(self, source: Source, config: DataConfig) -> None:
        self._source, self._config = source, config

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> np.ndarray | str:
        try:
            image, _ = load_image(self._source, index, config=self._config)
        except UnreadableImage as error:
            return str(error)
        pixels = np.asarray(image)
        return pixels.reshape(*pixels.shape[:2], -1)


class PixelStore:
    """Images of a source after the evaluation transform, as one tensor (N, C, H, W) uint8, on any device."""

    def __init__(self, source: Source, samples: Sequence[int], *, config: DataConfig, workers: int) -> None:
        loader = WorkerLoader(
            EvalDataset(source, config=config),
            EvalBatchSampler(samples, batch_size=_READ_BATCH),
            config=replace(config, pin_memory=False),
            workers=workers,
            persistent_workers=False,
        )
        self.samples = np.asarray(samples, dtype=np.int64)  # ascending; a rank may have none
        self.readable = np.zeros(len(samples), dtype=bool)
        self.skipped: list[SkippedImage] = []
        shape = (len(samples), config.in_chans, *config.size)
        try:
            self._images = torch.zeros(shape, dtype=torch.uint8)
        except RuntimeError as error:  # out of memory
            size = math.prod(shape) / 2**30
            raise ValueError(
                f"{len(samples)} images need {size:,.0f} GiB of memory; set data.in_memory=false"
            ) from error
        self._targets = as_targets(source.labels[self.samples])
        for batch in loader.batches(0, 0):
            rows = np.searchsorted(self.samples, batch.sample_ids.numpy())
            self._images[rows] = batch.images
            self.readable[rows] = True
            self.skipped.extend(batch.skipped)

    def __getitem__(self, rows: np.ndarray) -> RawBatch:
        indices, ids = (to_device_of(self._images, torch.from_numpy(a)) for a in (rows, self.samples[rows]))
        return RawBatch(images=self._images[indices], targets=self._targets[indices], sample_ids=ids)

    def to(self, device: torch.device) -> None:
        self._images, self._targets = self._images.to(device), self._targets.to(device)


class TrainMemoryLoader(BatchLoader[RawBatch]):
    """Training batches from memory, either augmented on the device of the pixels or not augmented."""

    def __init__(
        self,
        store: PixelStore,
        sampler: TrainBatchSampler,
        *,
        seed: int,
        augment: BatchAugment | None = None,
    ) -> None:
        self._store, self._sampler, self._seed, self._augment = store, sampler, seed, augment

    def batches(self, epoch: int, start_step: int) -> Iterator[RawBatch]:
        if not self._store.readable.any():
            raise ValueError("none of the training images can be read")
        for keys in self._sampler.batches(epoch, start_step):
            rows = np.array([self._readable_row(key) for key in keys])
            samples = np.array([key.sample for key in keys])
            batch = self._store[rows]
            batch.replaced = int((rows != samples).sum())
            if self._augment is not None:
                draws = self._augment.draws(epoch, samples, np.array([key.copy for key in keys]))
                batch.images, batch.boxes, batch.noise = self._augment(batch.images, draws)
            yield batch

    def _readable_row(self, key: SampleKey) -> int:
        row, attempt = key.sample, 0
        while not self._store.readable[row]:
            row = replacement(
                key.sample,
                seed=self._seed,
                epoch=key.epoch,
                attempt=attempt,
                num_samples=len(self._store.samples),
            )
            attempt += 1
        return row

    def to(self, device: torch.device) -> None:
        self._store.to(device)


class EvalMemoryLoader(BatchLoader[RawBatch]):
    """Evaluation batches from memory."""

    def __init__(self, store: PixelStore, *, batch_size: int) -> None:
        self._store, self._batch_size = store, batch_size

    def batches(self, epoch: int, start_step: int) -> Iterator[RawBatch]:
        rows = np.flatnonzero(self._store.readable)
        for start in range(start_step * self._batch_size, len(rows), self._batch_size):
            yield self._store[rows[start : start + self._batch_size]]

    def to(self, device: torch.device) -> None:
        self._store.to(device)
