"""Open a data set: find its layout, check it, and build its loaders."""

import logging
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from PIL import Image

from inline_attention.data.archives import TarSource, ZipSource
from inline_attention.data.batch_augment import BatchAugment
from inline_attention.data.collate import RawBatch
from inline_attention.data.config import DataConfig
from inline_attention.data.dataset import EvalDataset, TrainDataset, read_sample
from inline_attention.data.decode import UnreadableImage, open_image
from inline_attention.data.loaders import Data, EvalLoader, TrainLoader
from inline_attention.data.memory import DecodedSource, EvalMemoryLoader, PixelStore, TrainMemoryLoader
from inline_attention.data.prefetcher import Batch, ImagePrefetcher
from inline_attention.data.sampler import EvalBatchSampler, TrainBatchSampler, rank_indices
from inline_attention.data.skipped import SkippedImages
from inline_attention.data.sources import (
    DigitsSource,
    FilesSource,
    FolderSource,
    HuggingFaceSource,
    RelabelledSource,
    Source,
    SpreadSource,
    check_every_class_has_images,
    class_order,
    count_images,
    find_images,
    is_hidden,
    list_some,
)
from inline_attention.data.streams import Stream, StreamDataset, StreamLoader, is_stream
from inline_attention.data.tables import WHOLE, TableSource, divide, open_table
from inline_attention.data.workers import BatchLoader, WorkerLoader

_HELD_OUT = 10  # in a folder without splits and labels, one image in this many is for validation

_logger = logging.getLogger(__name__)


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
        class_names: the classes of a model. Labels are matched to them by name. None: those of the data. Without
            effect on data without labels.
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
        if table.multi_label:
            _check_unseen(tables[1], warn=rank == 0)
    else:
        train_source, val_source = (open_source(config, split) for split in splits)
        check_same_classes(train_source, val_source, train_split=config.train_split, val_split=config.val_split)
    names = train_source.class_names if class_names is None or not config.labels else class_names
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
    split: str | None = None,
    seed: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> EvalLoader[RawBatch, Batch]:
    """Open one split only.

    Args:
        class_names: the classes of a model. Labels are matched to them by name.
        max_images: take this many images, evenly spaced over the split. Streams ignore it.
        split: None for `config.val_split`.
        seed: divides a folder without splits as `open_data` does. None: such a folder is an error.
    """
    config.validate()
    split = split or config.val_split
    if not is_stream(config.path):
        source = _open_split(config, split, of_table=split, seed=seed)
        if class_names is not None and config.labels:
            source = RelabelledSource(source, class_names)
        if max_images is not None and max_images < len(source):
            source = SpreadSource(source, max_images)
        return _eval_loader(source, config=config, rank=rank, world_size=world_size)
    stream = Stream(config, split, training=False, rank=rank, world_size=world_size)
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
    source = _open_split(config, config.train_split, of_table=WHOLE)
    sides = []
    for index in range(0, len(source), -(-len(source) // images)):
        with suppress(UnreadableImage), read_sample(source, index)[0] as file:
            sides.append(min((file if isinstance(file, Image.Image) else open_image(file)).size))
    return statistics.median(sides) if sides else None


def open_files(paths: Sequence[Path], *, config: DataConfig) -> EvalLoader[RawBatch, Batch]:
    """Open image files without labels, in order: `sample_ids` are positions in `paths`."""
    config.validate()
    return _eval_loader(FilesSource(paths), config=config, rank=0, world_size=1)


def _open_split(config: DataConfig, split: str, *, of_table: str, seed: int | None = None) -> Source:
    """Open `split`, or the split `of_table` if the labels are in a table."""
    table = open_table(config)
    if table is not None and not table.is_divided and seed is not None:
        table = divide(table, config=config, seed=seed)
    return open_source(config, split) if table is None else TableSource(Path(config.path), table, of_table)


def open_source(config: DataConfig, split: str) -> Source:
    """Open one split of a data set with random access. Raises ValueError if something is wrong with it."""
    if config.path == "digits":
        return DigitsSource(split)
    if config.path.startswith("hfds/"):
        return HuggingFaceSource(config.path.removeprefix("hfds/"), split, config=config)
    root = Path(config.path)
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise ValueError(
            f"data path {config.path!r} {what}; expected a folder with the splits "
            f"{config.train_split!r} and {config.val_split!r}, or digits, hfds/NAME, wds/FOLDER, tfds/NAME"
        )
    folder, archive, tar = root / split, root / f"{split}.zip", root / f"{split}.tar"
    if not config.labels and (paths := _unlabelled(config, split)):
        return FilesSource(paths)
    if archive.is_file():
        return ZipSource(archive, root / f"{split}_map.txt", names_from=root / f"{config.train_split}_map.txt")
    if tar.is_file() or any(folder.glob("*.tar")):
        return TarSource(tar if tar.is_file() else folder)
    if folder.is_dir():
        return FolderSource(folder)
    there = sorted({p.stem if p.suffix in (".zip", ".tar") else p.name for p in root.iterdir() if _is_split(p)})
    alone = root / config.train_split
    is_alone = there == [alone.name] and alone.is_dir()
    divided = f" Or train with --data {alone}, which is then divided." if is_alone else ""
    raise ValueError(
        f"no split {split!r} in {config.path!r}; there is {', '.join(there) or 'nothing'}. "
        f"Name the splits (training: data.train_split, data.val_split; inline eval: --split).{divided}"
    )


def _unlabelled(config: DataConfig, split: str) -> list[Path]:
    """The images of a split at any depth, without labels. Empty if the split is an archive or missing.

    A folder without splits is divided: every tenth image is for validation.
    """
    root = Path(config.path)
    if (root / split).is_dir():
        return find_images([root / split])
    names = (config.train_split, config.val_split)
    if any((root / f"{name}{ending}").exists() for name in names for ending in ("", ".zip", ".tar")):
        return []
    paths = find_images([root])
    if len(paths) == 1:
        raise ValueError(f"{config.path!r} has one image: expected two or more, one of them for validation")
    is_val = split == config.val_split
    return [path for number, path in enumerate(paths) if (number % _HELD_OUT == 0) == is_val]


def _is_split(path: Path) -> bool:
    return (path.is_dir() or path.suffix in (".zip", ".tar")) and not is_hidden(path.name)


def check_same_classes(train: Source, val: Source, *, train_split: str, val_split: str) -> None:
    if train.class_names == val.class_names or not (train.named and val.named):
        return
    only_train = sorted(set(train.class_names) - set(val.class_names), key=class_order)
    only_val = sorted(set(val.class_names) - set(train.class_names), key=class_order)
    raise ValueError(
        f"splits {train_split!r} and {val_split!r} have different classes: "
        f"only in {train_split!r}: {list_some(only_train)}; only in {val_split!r}: {list_some(only_val)}. "
        "Both need the same classes"
    )


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


def _check_unseen(val: Source, *, warn: bool) -> None:
    counts = count_images(val.labels, len(val.class_names))
    unseen = [name for name, count in zip(val.class_names, counts, strict=True) if not count]
    if len(unseen) == len(counts):
        raise ValueError(f"nothing to evaluate: none of the {len(val)} validation images has a label")
    if unseen and warn:
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
