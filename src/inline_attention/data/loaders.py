"""Loaders of normalised batches on the training device, and the functions that open a data set."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic

import torch
from PIL import Image

from inline_attention.data.batch_augment import BatchAugment
from inline_attention.data.collate import CollatedT, RawBatch
from inline_attention.data.config import DataConfig
from inline_attention.data.dataset import EvalDataset, TrainDataset
from inline_attention.data.decode import UnreadableImage, open_image
from inline_attention.data.memory import DecodedSource, EvalMemoryLoader, PixelStore, TrainMemoryLoader
from inline_attention.data.prefetcher import Batch, BatchT, ImagePrefetcher, Prefetcher
from inline_attention.data.sampler import EvalBatchSampler, TrainBatchSampler, rank_indices
from inline_attention.data.skipped import SkippedImages
from inline_attention.data.sources import (
    FilesSource,
    RelabelledSource,
    Source,
    SpreadSource,
    check_every_class_has_images,
    check_same_classes,
    count_images,
    list_some,
    open_source,
)
from inline_attention.data.streams import Stream, StreamDataset, StreamLoader, is_stream
from inline_attention.data.tables import WHOLE, ImageTable, TableSource, divide, open_table
from inline_attention.data.workers import BatchLoader, WorkerLoader

_logger = logging.getLogger(__name__)


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
    table: ImageTable | None = None  # splits made for a folder without any; None: the data have their own
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


def open_data(
    config: DataConfig,
    *,
    class_names: list[str] | None = None,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Data:
    """Open both splits. Raises ValueError if something is wrong with the configuration or the data.

    Args:
        class_names: the classes of a model. Labels are matched to them by name. None: those of the data.
    """
    config.validate()
    if is_stream(config.path):
        if config.train_share < 1:
            raise ValueError(f"data.train_share is {config.train_share:g}; expected 1 for the stream {config.path!r}")
        train, names = _open_train_stream(config, class_names=class_names, seed=seed, rank=rank, world_size=world_size)
        val = open_eval_data(config, class_names=class_names, rank=rank, world_size=world_size)
        if val.class_names != names:
            raise ValueError(f"splits {config.train_split!r} and {config.val_split!r} have different classes")
        return Data(train, val, names, in_chans=config.in_chans)
    splits = (config.train_split, config.val_split)
    train_source: Source
    val_source: Source
    table = open_table(config)
    if table is not None:
        if not table.is_divided:
            table = divide(table, config=config, seed=seed)
            if rank == 0:
                held_out = sum(split == config.val_split for split in table.splits)
                total = len(table.splits)
                _logger.warning("%s has no splits: %d of %d images are for validation", table.origin, held_out, total)
        train_source, val_source = tables = [TableSource(Path(config.path), table, split) for split in splits]
        where = f"split {config.train_split!r} of {table.origin}"
        check_every_class_has_images(tables[0].labels, tables[0].class_names, where=where)
        if table.multi_label and rank == 0:
            _warn_of_unseen(tables[1])
    else:
        train_source, val_source = (open_source(config, split) for split in splits)
        check_same_classes(train_source, val_source, train_split=config.train_split, val_split=config.val_split)
    names = class_names or train_source.class_names
    if train_source.class_names != names:
        train_source = RelabelledSource(train_source, names)
    if val_source.class_names != names:  # also unnamed ones: the split may lack the last labels
        val_source = RelabelledSource(val_source, names)
    if config.train_share < 1:
        train_source = SpreadSource(train_source, max(1, round(config.train_share * len(train_source))))
    return Data(
        _train_loader(train_source, config=config, seed=seed, rank=rank, world_size=world_size),
        _eval_loader(val_source, config=config, rank=rank, world_size=world_size),
        names,
        in_chans=config.in_chans,
        table=table,
        class_counts=count_images(train_source.labels, len(names)).tolist(),
        train_images=len(train_source),
    )


def open_eval_data(
    config: DataConfig,
    *,
    class_names: list[str] | None = None,
    max_images: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> EvalLoader[RawBatch, Batch]:
    """Open `config.val_split` only.

    Args:
        class_names: the classes of a model. Labels are matched to them by name.
        max_images: take this many images, evenly spaced over the split. Streams ignore it.
    """
    config.validate()
    if not is_stream(config.path):
        table = open_table(config)
        source: Source
        if table is not None:
            source = TableSource(Path(config.path), table, config.val_split)
        else:
            source = open_source(config, config.val_split)
        if class_names is not None:
            source = RelabelledSource(source, class_names)
        if max_images is not None and max_images < len(source):
            source = SpreadSource(source, max_images)
        return _eval_loader(source, config=config, rank=rank, world_size=world_size)
    stream = Stream(config, config.val_split, training=False, rank=rank, world_size=world_size)
    dataset = StreamDataset(stream, model_classes=class_names)
    return EvalLoader(
        StreamLoader(dataset, stream, steps=None, workers=config.resolved_workers(world_size)),
        prefetcher=ImagePrefetcher(config),
        class_names=class_names or stream.class_names,
        num_images=stream.num_samples,
        skipped=_skipped_images(config, stream.num_samples),
        batch_size=config.batch_size,
        input_shape=(config.in_chans, *config.size),
    )


def typical_side(config: DataConfig, *, images: int = 100) -> float | None:
    """The median short side of some training images, from their headers. None for a stream.

    A folder without splits is not divided yet: images of both splits are looked at.
    """
    if is_stream(config.path):
        return None
    config.validate()
    table = open_table(config)
    source: Source
    if table is not None:
        source = TableSource(Path(config.path), table, WHOLE)
    else:
        source = open_source(config, config.train_split)
    sides = []
    for index in range(0, len(source), -(-len(source) // images)):
        with suppress(UnreadableImage), source.read(index)[0] as file:
            sides.append(min((file if isinstance(file, Image.Image) else open_image(file)).size))
    return statistics.median(sides) if sides else None


def open_files(paths: Sequence[Path], *, config: DataConfig) -> EvalLoader[RawBatch, Batch]:
    """Open image files without labels, in order: `sample_ids` are positions in `paths`."""
    config.validate()
    return _eval_loader(FilesSource(paths), config=config, rank=0, world_size=1)


def _train_loader(
    source: Source, *, config: DataConfig, seed: int, rank: int, world_size: int
) -> TrainLoader[RawBatch, Batch]:
    workers = _workers(config, source, world_size=world_size)
    sampler = TrainBatchSampler(
        len(source),
        batch_size=config.batch_size,
        seed=seed,
        rank=rank,
        world_size=world_size,
        repeats=config.repeats,
    )
    _check_even(sampler.batch_size, config)
    skipped = _skipped_images(config, len(source))
    loader: BatchLoader[RawBatch]
    if config.in_memory and (config.augment_on_device or not config.augment):
        augment = None
        if config.augment:
            augment = BatchAugment(config, num_samples=len(source), seed=seed)
            config = replace(config, eval_transform="resize")  # crops are taken from the whole image
        store = PixelStore(source, range(len(source)), config=config, workers=workers)
        skipped.extend(store.skipped)
        loader = TrainMemoryLoader(store, sampler, seed=seed, augment=augment)
    else:
        if config.in_memory:
            source = decoded = DecodedSource(source, config=config, workers=workers)
            skipped.extend(decoded.skipped)
        dataset = TrainDataset(source, config=config, seed=seed)
        loader = WorkerLoader(dataset, sampler, config=config, workers=workers, persistent_workers=True)
    return TrainLoader(
        loader,
        prefetcher=ImagePrefetcher(config),
        batch_size=sampler.batch_size,
        steps_per_epoch=sampler.steps,
        skipped=skipped,
        exact_resume=True,
    )


def _open_train_stream(
    config: DataConfig, *, class_names: list[str] | None, seed: int, rank: int, world_size: int
) -> tuple[TrainLoader[RawBatch, Batch], list[str]]:
    stream = Stream(config, config.train_split, training=True, seed=seed, rank=rank, world_size=world_size)
    _check_even(stream.batch_size, config)
    steps = stream.num_samples // (stream.batch_size * world_size)
    loader = TrainLoader(
        StreamLoader(
            StreamDataset(stream, model_classes=class_names),
            stream,
            steps=steps,
            workers=config.resolved_workers(world_size),
        ),
        prefetcher=ImagePrefetcher(config),
        batch_size=stream.batch_size,
        steps_per_epoch=steps,
        skipped=_skipped_images(config, stream.num_samples),
        exact_resume=False,
    )
    return loader, class_names or stream.class_names


def _warn_of_unseen(val: Source) -> None:
    counts = count_images(val.labels, len(val.class_names))
    unseen = [name for name, count in zip(val.class_names, counts, strict=True) if not count]
    if unseen:
        _logger.warning("%d labels have no validation image and are not measured: %s", len(unseen), list_some(unseen))


def _check_even(batch_size: int, config: DataConfig) -> None:
    if config.mixes and batch_size % 2:
        raise ValueError(
            f"a batch has {batch_size} image(s), and mixup mixes pairs; choose an even data.batch_size, not above the "
            "number of training images, or set data.mixup=0 data.cutmix=0"
        )


def _eval_loader(source: Source, *, config: DataConfig, rank: int, world_size: int) -> EvalLoader[RawBatch, Batch]:
    workers = _workers(config, source, world_size=world_size)
    indices = rank_indices(len(source), rank=rank, world_size=world_size)
    most = len(rank_indices(len(source), rank=0, world_size=world_size))
    skipped = _skipped_images(config, len(source))
    loader: BatchLoader[RawBatch]
    if config.in_memory:
        store = PixelStore(source, indices, config=config, workers=workers)
        skipped.extend(store.skipped)
        loader = EvalMemoryLoader(store, batch_size=config.batch_size)
    else:
        sampler = EvalBatchSampler(indices, batch_size=config.batch_size)
        dataset = EvalDataset(source, config=config)
        loader = WorkerLoader(dataset, sampler, config=config, workers=workers, persistent_workers=False)
    return EvalLoader(
        loader,
        prefetcher=ImagePrefetcher(config),
        class_names=source.class_names,
        num_images=len(source),
        skipped=skipped,
        batch_size=config.batch_size,
        input_shape=(config.in_chans, *config.size),
        max_batches=-(-most // config.batch_size),
        path=source.path,
        multi_label=source.labels.ndim == 2,
    )


def _skipped_images(config: DataConfig, total: int) -> SkippedImages:
    return SkippedImages(limit=config.max_broken_count(total))


def _workers(config: DataConfig, source: Source, *, world_size: int) -> int:
    return min(config.resolved_workers(world_size), len(source))
