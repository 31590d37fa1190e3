"""Loaders of normalised batches on the training device."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

import torch

from inline_attention.data.collate import CollatedT, RawBatch
from inline_attention.data.prefetcher import Batch, BatchT, Prefetcher
from inline_attention.data.skipped import SkippedImages
from inline_attention.data.tables import ImageTable
from inline_attention.data.workers import BatchLoader


class TrainLoader(Generic[CollatedT, BatchT]):
    """Training batches of any task: `epoch(e, start_step=k)` yields the batches of epoch e from step k on.

    `steps_per_epoch` is the same on every rank: the incomplete batch at the end is dropped. `waiting_seconds` is the
    time spent waiting for workers since the loader was opened. If `exact_resume` is False (streams), a resumed epoch
    starts again at its first image and is `start_step` batches shorter.
    """

    def __init__(
        self,
        loader: BatchLoader[CollatedT],
        *,
        prefetcher: Prefetcher[CollatedT, BatchT],
        batch_size: int,
        steps_per_epoch: int,
        skipped: SkippedImages,
        exact_resume: bool,
    ) -> None:
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.skipped = skipped
        self.exact_resume = exact_resume
        self.waiting_seconds = 0.0
        self._loader = loader
        self._prefetcher = prefetcher

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[BatchT]:
        """The batches of an epoch from `start_step` on. Images and augmentations are a function of the seed."""
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step is {start_step}; an epoch has {self.steps_per_epoch} steps")
        batches = self._loader.batches(epoch, start_step)
        return self._prefetcher(self._timed(batches, steps=self.steps_per_epoch - start_step))

    def _timed(self, batches: Iterator[CollatedT], *, steps: int) -> Iterator[CollatedT]:
        for step in range(steps):
            start = time.perf_counter()
            raw = next(batches, None)
            self.waiting_seconds += time.perf_counter() - start
            if raw is None:
                raise ValueError(f"the training data ended {steps - step} batches before the end of the epoch")
            self.skipped.extend(raw.skipped)
            self.skipped.replaced += raw.replaced
            if len(raw) != self.batch_size:
                raise ValueError(f"no readable image found to replace {raw.skipped[-1].path}")
            yield raw

    def to(self, device: torch.device) -> None:
        self._prefetcher.to(device)
        self._loader.to(device)

    def close(self) -> None:
        """End the worker processes, after the last epoch."""
        self._loader.close()


class EvalLoader(Generic[CollatedT, BatchT]):
    """Evaluation batches of any task: every readable image exactly once over all ranks.

    Ranks may have different numbers of batches. `max_batches` is the largest number; it is None for streams, whose
    length is unknown. Unreadable images are left out and listed in `skipped`, which every iteration refills.
    `input_shape` is (C, H, W), or empty if images differ in size. `path` returns the name of the image with a given
    sample id. Streams have no names. If `multi_label`, targets are zeros and ones (B, classes).
    """

    def __init__(
        self,
        loader: BatchLoader[CollatedT],
        *,
        prefetcher: Prefetcher[CollatedT, BatchT],
        class_names: list[str],
        num_images: int,
        skipped: SkippedImages,
        batch_size: int,
        input_shape: tuple[int, ...] = (),
        max_batches: int | None = None,
        path: Callable[[int], str] | None = None,
        multi_label: bool = False,
    ) -> None:
        self.path = path
        self.multi_label = multi_label
        self.class_names, self.num_images = class_names, num_images
        self.batch_size, self.input_shape, self.max_batches = batch_size, input_shape, max_batches
        self.skipped = skipped
        self._skipped_before = list(skipped)  # images in memory are read once, before the first iteration
        self._loader = loader
        self._prefetcher = prefetcher

    def __iter__(self) -> Iterator[BatchT]:
        self.skipped.clear()
        self.skipped.extend(self._skipped_before)
        return self._prefetcher(self._readable(self._loader.batches(0, 0)))

    def check_one_label(self, what: str) -> None:
        """ValueError if an image may have several labels."""
        if self.multi_label:
            raise ValueError(f"{what} needs one label for each image; the table of these data gives several (labels)")

    def _readable(self, batches: Iterator[CollatedT]) -> Iterator[CollatedT]:
        for raw in batches:
            self.skipped.extend(raw.skipped)
            if len(raw):
                yield raw

    def to(self, device: torch.device) -> None:
        self._prefetcher.to(device)
        self._loader.to(device)


@dataclass
class Data:
    """A training and a validation split. After `to(device)`, batches arrive on that device."""

    train: TrainLoader[RawBatch, Batch]
    val: EvalLoader[RawBatch, Batch]
    class_names: list[str]
    in_chans: int
    table: ImageTable | None = None  # labels and splits of a folder without split folders
    class_counts: list[int] | None = None  # number of training images per class; None for streams
    train_images: int | None = None  # None for streams

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def multi_label(self) -> bool:
        """True if an image may have several labels, or none."""
        return self.val.multi_label

    def to(self, device: torch.device | str) -> "Data":
        self.train.to(torch.device(device))
        self.val.to(torch.device(device))
        return self
