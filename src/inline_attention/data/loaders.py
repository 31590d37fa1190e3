"""Loaders of normalised batches, on the device that trains, and the one call that opens a data set."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from inline_attention.data.batch_augment import BatchAugment
from inline_attention.data.batches import (
    EvalPlan,
    EvalSamples,
    Feed,
    LoadedT,
    RawBatch,
    TrainPlan,
    TrainSamples,
    WorkerFeed,
)
from inline_attention.data.config import DataConfig
from inline_attention.data.memory import DecodedSource, EvalMemoryFeed, PixelStore, TrainMemoryFeed
from inline_attention.data.skipped import SkippedImages
from inline_attention.data.sources import (
    FilesSource,
    RelabelledSource,
    Source,
    SpreadSource,
    check_same_classes,
    open_source,
)
from inline_attention.data.streams import Stream, StreamFeed, StreamSamples, is_stream
from inline_attention.data.transforms import erase_


@dataclass
class Batch:
    """What a model sees, on the loader's device."""

    images: Tensor  # (B, C, H, W) float32, normalised
    targets: Tensor  # (B,) int64
    sample_ids: Tensor  # (B,) int64, the images' numbers in the data set


Ready = TypeVar("Ready")  # a batch as a model sees it


class DeviceStage(ABC, Generic[LoadedT, Ready]):
    """From what workers hand over to what a model sees, the next batch while this one trains."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None

    @abstractmethod
    def finish(self, raw: LoadedT) -> Ready:
        """Transfer (without waiting) and compute the rest, on `self.device`."""

    def to(self, device: torch.device) -> None:
        if device == self.device:  # memory is pooled by stream: one for the loader's lifetime
            return
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Iterator[LoadedT]) -> Iterator[Ready]:
        if self._stream is None:
            yield from map(self.finish, batches)
            return
        stream = self._stream
        ready: tuple[Ready, torch.cuda.Event] | None = None
        for raw in batches:
            consumer = torch.cuda.current_stream(self.device)
            if raw.on_device:
                yield self.finish(raw)
                continue
            # Memory that the consumer has given back may be used again here, once its queued work is done.
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


class ImageStage(DeviceStage[RawBatch, Batch]):
    """Transfer, normalise, erase. Bytes cross the bus, not floats."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self._mean, self._std = (torch.tensor(values).view(1, -1, 1, 1) * 255 for values in config.statistics)

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    def finish(self, raw: RawBatch) -> Batch:
        images = raw.images.to(self.device, non_blocking=True).sub(self._mean).div_(self._std)  # float32 from here on
        if raw.boxes is not None and raw.noise is not None:
            boxes, noise = (t.to(self.device, non_blocking=True) for t in (raw.boxes, raw.noise))
            images = erase_(images, boxes, noise)
        targets, ids = (t.to(self.device, non_blocking=True) for t in (raw.targets, raw.sample_ids))
        return Batch(images, targets, ids)


class TrainLoader(Generic[LoadedT, Ready]):
    """Training batches: `epoch(e, start_step=k)` gives what an uninterrupted epoch e gives from step k on.

    `steps_per_epoch` is the same on every rank (the last, incomplete batch is dropped). `waiting_seconds` is
    the time spent in waiting for workers since the loader was opened. Where `exact_resume` is False
    (streams), a resumed epoch starts again at its first image and is `start_step` batches shorter.
    """

    def __init__(
        self,
        feed: Feed[LoadedT],
        *,
        stage: DeviceStage[LoadedT, Ready],
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
        self._feed = feed
        self._stage = stage

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[Ready]:
        """The batches of an epoch, from `start_step` on; the seed settles which images and augmentations they hold."""
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step is {start_step}; an epoch has {self.steps_per_epoch} steps")
        return self._stage(self._timed(self._feed.batches(epoch, start_step), steps=self.steps_per_epoch - start_step))

    def _timed(self, batches: Iterator[LoadedT], *, steps: int) -> Iterator[LoadedT]:
        for step in range(steps):
            start = time.perf_counter()
            raw = next(batches, None)
            self.waiting_seconds += time.perf_counter() - start
            if raw is None:
                raise ValueError(f"the training data ended {steps - step} batches before the end of the epoch")
            self.skipped.extend(raw.skipped)
            self.skipped.replaced += raw.replaced
            if len(raw) != self.batch_size:
                raise ValueError(f"no readable image found to stand in for {raw.skipped[-1].path}")
            yield raw

    def to(self, device: torch.device) -> None:
        self._stage.to(device)
        self._feed.to(device)

    def close(self) -> None:
        """After the last epoch: ends the worker processes."""
        self._feed.close()


class EvalLoader:
    """Evaluation batches: every readable image exactly once over all ranks, whatever their number.

    Ranks may have different numbers of batches; `max_batches` is the largest (None for streams, which do not
    know). Unreadable images are left out and listed in `skipped`, anew in every iteration.
    """

    def __init__(
        self,
        feed: Feed[RawBatch],
        *,
        config: DataConfig,
        class_names: list[str],
        num_images: int,
        max_batches: int | None,
        skipped: SkippedImages,
    ) -> None:
        self.batch_size = config.batch_size
        self.input_shape = (config.in_chans, *config.size)
        self.class_names = class_names
        self.num_images = num_images
        self.max_batches = max_batches
        self.skipped = skipped
        self._feed = feed
        self._known_skipped = list(skipped)  # of images in memory, which are read only once
        self._stage = ImageStage(config)

    def __iter__(self) -> Iterator[Batch]:
        self.skipped.clear()
        self.skipped.extend(self._known_skipped)
        return self._stage(self._noted(self._feed.batches(0, 0)))

    def _noted(self, batches: Iterator[RawBatch]) -> Iterator[RawBatch]:
        for raw in batches:
            self.skipped.extend(raw.skipped)
            yield raw

    def to(self, device: torch.device) -> None:
        self._stage.to(device)
        self._feed.to(device)


@dataclass
class Data:
    """A training and a validation split. Call `to(device)` once: batches then arrive on that device."""

    train: TrainLoader[RawBatch, Batch]
    val: EvalLoader
    class_names: list[str]
    in_chans: int

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def to(self, device: torch.device | str) -> "Data":
        self.train.to(torch.device(device))
        self.val.to(torch.device(device))
        return self


def open_data(config: DataConfig, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> Data:
    """Open both splits. What is wrong with the configuration or the data is a ValueError here and now."""
    config.validate()
    if is_stream(config.path):
        train, class_names = _open_train_stream(config, seed=seed, rank=rank, world_size=world_size)
        val = open_eval_data(config, rank=rank, world_size=world_size)
        if val.class_names != class_names:
            raise ValueError(f"splits {config.train_split!r} and {config.val_split!r} have different classes")
    else:
        train_source, val_source = (open_source(config, split) for split in (config.train_split, config.val_split))
        check_same_classes(train_source, val_source, train_split=config.train_split, val_split=config.val_split)
        class_names = train_source.class_names
        if val_source.class_names != class_names:  # numbers without names: the split may lack the last ones
            val_source = RelabelledSource(val_source, class_names)
        train = _train_loader(train_source, config=config, seed=seed, rank=rank, world_size=world_size)
        val = _eval_loader(val_source, config=config, rank=rank, world_size=world_size)
    return Data(train, val, class_names, in_chans=config.in_chans)


def open_eval_data(
    config: DataConfig,
    *,
    class_names: list[str] | None = None,
    max_images: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> EvalLoader:
    """Open `config.val_split` alone. With a model's `class_names`, labels follow them, by name.

    `max_images` takes that many, evenly spaced, so that all classes have their share; streams give all they have.
    """
    config.validate()
    if not is_stream(config.path):
        source = open_source(config, config.val_split)
        if class_names is not None:
            source = RelabelledSource(source, class_names)
        if max_images is not None and max_images < len(source):
            source = SpreadSource(source, max_images)
        return _eval_loader(source, config=config, rank=rank, world_size=world_size)
    stream = Stream(config, config.val_split, training=False, rank=rank, world_size=world_size)
    samples = StreamSamples(stream, model_classes=class_names)
    return EvalLoader(
        StreamFeed(samples, stream, steps=None, workers=config.resolved_workers(world_size)),
        config=config,
        class_names=class_names or stream.class_names,
        num_images=stream.num_samples,
        max_batches=None,
        skipped=_skip_list(config, stream.num_samples),
    )


def open_files(paths: Sequence[Path], *, config: DataConfig) -> EvalLoader:
    """Image files without labels, in order: `sample_ids` are positions in `paths`."""
    config.validate()
    return _eval_loader(FilesSource(paths), config=config, rank=0, world_size=1)


def _train_loader(
    source: Source, *, config: DataConfig, seed: int, rank: int, world_size: int
) -> TrainLoader[RawBatch, Batch]:
    workers = _workers(config, source, world_size=world_size)
    plan = _train_plan(source, config=config, seed=seed, rank=rank, world_size=world_size)
    skipped = _skip_list(config, len(source))
    feed: Feed[RawBatch]
    if config.in_memory and (config.augment_on_device or not config.augment):
        augment = None
        if config.augment:
            augment = BatchAugment(config, num_samples=len(source), seed=seed)
            config = replace(config, eval_transform="resize")  # crops are cut from the whole image
        store = PixelStore(source, range(len(source)), config=config, workers=workers)
        skipped.extend(store.skipped)
        feed = TrainMemoryFeed(store, plan, seed=seed, augment=augment)
    else:
        if config.in_memory:
            source = decoded = DecodedSource(source, config=config, workers=workers)
            skipped.extend(decoded.skipped)
        samples = TrainSamples(source, config=config, seed=seed)
        feed = WorkerFeed(samples, plan, config=config, workers=workers, keep_workers=True)
    return TrainLoader(
        feed,
        stage=ImageStage(config),
        batch_size=plan.batch_size,
        steps_per_epoch=plan.steps,
        skipped=skipped,
        exact_resume=True,
    )


def _train_plan(source: Source, *, config: DataConfig, seed: int, rank: int, world_size: int) -> TrainPlan:
    plan = TrainPlan(
        len(source),
        batch_size=config.batch_size,
        seed=seed,
        rank=rank,
        world_size=world_size,
        repeats=config.repeats,
    )
    _check_even(plan.batch_size, config)
    return plan


def _check_even(batch_size: int, config: DataConfig) -> None:
    if config.mixes and batch_size % 2:
        raise ValueError(
            f"data.batch_size is {batch_size}; mixup mixes pairs and needs an even number "
            "(or set data.mixup and data.cutmix to 0)"
        )


def _open_train_stream(
    config: DataConfig, *, seed: int, rank: int, world_size: int
) -> tuple[TrainLoader[RawBatch, Batch], list[str]]:
    stream = Stream(config, config.train_split, training=True, seed=seed, rank=rank, world_size=world_size)
    _check_even(stream.batch_size, config)
    steps = stream.num_samples // (stream.batch_size * world_size)
    feed = StreamFeed(StreamSamples(stream), stream, steps=steps, workers=config.resolved_workers(world_size))
    skipped = _skip_list(config, stream.num_samples)
    loader = TrainLoader(
        feed,
        stage=ImageStage(config),
        batch_size=stream.batch_size,
        steps_per_epoch=steps,
        skipped=skipped,
        exact_resume=False,
    )
    return loader, stream.class_names


def _eval_loader(source: Source, *, config: DataConfig, rank: int, world_size: int) -> EvalLoader:
    workers = _workers(config, source, world_size=world_size)
    plan = EvalPlan(len(source), batch_size=config.batch_size, rank=rank, world_size=world_size)
    skipped = _skip_list(config, len(source))
    feed: Feed[RawBatch]
    if config.in_memory:
        store = PixelStore(source, plan.indices, config=config, workers=workers)
        skipped.extend(store.skipped)
        feed = EvalMemoryFeed(store, batch_size=config.batch_size)
    else:
        samples = EvalSamples(source, config=config)
        feed = WorkerFeed(samples, plan, config=config, workers=workers, keep_workers=False)
    return EvalLoader(
        feed,
        config=config,
        class_names=source.class_names,
        num_images=len(source),
        max_batches=plan.max_batches,
        skipped=skipped,
    )


def _skip_list(config: DataConfig, total: int) -> SkippedImages:
    return SkippedImages(limit=config.max_broken_count(total))


def _workers(config: DataConfig, source: Source, *, world_size: int) -> int:
    return min(config.resolved_workers(world_size), len(source))
