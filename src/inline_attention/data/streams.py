"""Data without random access: WebDataset shards ("wds/FOLDER") and, through timm's reader, "tfds/NAME".

The order of a stream depends on the number of ranks and workers. A stream cannot start in the middle, so a resumed
epoch begins again at its first shard. Evaluation still counts every image exactly once.
"""

import io
import json
import os
import random
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from timm.data.readers import create_reader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from inline_attention.data.collate import RawBatch, Sample, collate
from inline_attention.data.config import DataConfig
from inline_attention.data.dataset import MAX_REPLACEMENTS, Augment, transform_errors
from inline_attention.data.decode import UnreadableImage, decode_image, reason
from inline_attention.data.sampler import fit_batch_size
from inline_attention.data.seeding import derive_seed, restored_generators
from inline_attention.data.skipped import SkippedImage
from inline_attention.data.sources import label_map
from inline_attention.data.transforms import eval_transform
from inline_attention.data.workers import BatchLoader, identity, loader_arguments, raise_error, shut_down

_PACKAGES = {
    "wds": ("webdataset", "webdataset"),
    "tfds": ("tensorflow_datasets", "tensorflow tensorflow-datasets"),
}
_IMAGE_KEYS = "jpg;png;webp"
# Buffers in which shards and images are shuffled, as large as in timm's reader: (size, filled before the first draw)
_SHARD_BUFFER, _IMAGE_BUFFER = (500, 100), (8192, 2048)


def is_stream(path: str) -> bool:
    return path.partition("/")[0] in _PACKAGES and "/" in path


class Item(NamedTuple):
    """One image of a stream with its label, or the reason why it is unreadable."""

    name: str
    image: bytes | Image.Image
    label: Any
    damage: str = ""


class Reader(Protocol):
    """Reads its part of a split once, from the first image to the last."""

    def read(self, *, epoch: int, part: int, parts: int, rng: random.Random) -> Iterator[Item]: ...


class ShardReader:
    """WebDataset shards. The images stay encoded, for the package's own image reader."""

    def __init__(self, shards: list[str], *, config: DataConfig, alt_label: str, shuffle_seed: int | None) -> None:
        """shuffle_seed: None keeps the order of the shards and images."""
        self._shards, self._alt_label, self._shuffle_seed = shards, alt_label, shuffle_seed
        self._image_keys = (config.input_key or _IMAGE_KEYS).split(";")
        self._label_key = config.target_key or "cls"

    def read(self, *, epoch: int, part: int, parts: int, rng: random.Random) -> Iterator[Item]:
        import webdataset as wds

        damages: list[Item] = []

        def record_damage(error: Exception) -> bool:
            if isinstance(error, FileNotFoundError):
                raise ValueError(f"shard {error.filename!r} does not exist") from error
            where = next((text for text in reversed(error.args) if isinstance(text, str)), "a shard")
            damages.append(Item(where, b"", b"", reason(error)))
            return True

        shards: Iterable[dict[str, str]] = iter([{"url": shard} for shard in self._shards])
        if self._shuffle_seed is not None:
            shards = _shuffled(shards, _SHARD_BUFFER, random.Random(self._shuffle_seed + epoch))
        samples = wds.tarfile_to_samples(handler=record_damage)(islice(shards, part, None, parts))
        if self._shuffle_seed is not None:
            samples = _shuffled(samples, _IMAGE_BUFFER, rng)
        for item in map(self._item, samples):
            if not self._alt_label or item.damage or item.label >= 0:  # -1: the image has no such label
                yield item
        yield from damages

    def _item(self, sample: dict[str, Any]) -> Item:
        name = f"{sample['__url__']}:{sample['__key__']}"
        image = next((sample[key] for key in self._image_keys if key in sample), b"")
        label: Any = sample.get(self._label_key, b"")
        try:
            if self._alt_label:  # alternative labels are in the JSON part of a sample
                label = json.loads(sample["json"])[self._alt_label]
            return Item(name, image, int(label))
        except (ValueError, LookupError, TypeError) as error:
            return Item(name, b"", b"", f"its label is {label!r}, which is not a number ({error})")


def _shuffled(items: Iterable[Any], buffer: tuple[int, int], rng: random.Random) -> Iterator[Any]:
    import webdataset as wds

    size, initial = buffer
    return wds.shuffle(size, initial=initial, rng=rng)(items)


class TensorFlowReader:
    """A TensorFlow data set. timm's reader divides it among ranks and workers."""

    def __init__(self, reader: Any, *, name: str) -> None:
        self._reader, self._name = reader, name

    def read(self, *, epoch: int, part: int, parts: int, rng: random.Random) -> Iterator[Item]:
        self._reader.set_epoch(epoch)
        self._reader.ds = None  # build a new pipeline, whose shuffling starts over
        if get_worker_info() is None:
            self._reader.worker_seed = rng.getrandbits(62)
        for position, (image, label) in enumerate(self._reader):
            yield Item(f"{self._name}, part {part} of {parts}, {position}", image, label)


class Stream:
    """One split of a streamed data set."""

    def __init__(
        self,
        config: DataConfig,
        split: str,
        *,
        training: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.config, self.training, self.seed = config, training, seed
        self.rank, self.world_size = rank, world_size
        kind, _, place = config.path.partition("/")
        module, packages = _PACKAGES[kind]
        if find_spec(module) is None:
            raise ImportError(f"data path {config.path!r} needs other packages: pip install {packages}")
        if config.in_memory or config.repeats > 1:
            raise ValueError(f"data.in_memory and data.repeats need random access; {config.path!r} is a stream")
        self.max_workers: int | None = None
        self.stride = 1  # this rank takes one in `stride` images of its stream
        self.is_empty = False
        if kind == "wds" and "://" not in place and not os.path.isdir(os.path.abspath(place)):
            raise ValueError(f"data path {config.path!r}: there is no folder {place!r}")
        timm_reader = self._open(kind, place, split)
        self.reader: Reader
        if kind == "wds":
            self.reader = self._divide_shards(timm_reader.split_info, place)
        else:
            # Not the world size of torch.distributed: in evaluation, `stride` divides the images.
            timm_reader.dist_rank, timm_reader.dist_num_replicas = (rank, world_size) if training else (0, 1)
            self.reader = TensorFlowReader(timm_reader, name=config.path)
            self.stride = 1 if training else world_size
        self.num_samples = _whole_number(timm_reader.num_samples, split, config)
        self.batch_size = config.batch_size
        if training:
            self.batch_size = fit_batch_size(config.batch_size, num_samples=self.num_samples, world_size=world_size)
        names = timm_reader.class_to_idx
        self.named = bool(names)
        if not names and config.num_classes is None:
            raise ValueError(
                f"{config.path!r} does not say how many classes it has; set data.num_classes "
                "(inline eval: --num-classes)"
            )
        self.class_names = sorted(names, key=names.__getitem__) or [str(i) for i in range(config.num_classes or 0)]

    def _open(self, kind: str, place: str, split: str) -> Any:
        """timm's reader of the split, which knows how many images it has."""
        config = self.config
        try:
            return create_reader(
                f"{kind}/{'' if kind == 'wds' else place}",
                root=place if kind == "wds" else None,
                split=split,
                is_training=self.training,
                batch_size=config.batch_size,
                seed=self._shuffle_seed,
                input_key=config.input_key,
                target_key=config.target_key,
            )
        except (RuntimeError, LookupError, AssertionError, ValueError, TypeError, AttributeError) as error:
            described = str(error).partition("\n")[0]  # the following lines list all known data sets
            if kind == "wds":
                described += (
                    "; expected a split of FOLDER/_info.json, or a pattern such as 'train-{0000..0099}.tar|128000'"
                )
            raise ValueError(f"split {split!r} of {config.path!r} cannot be opened: {described}") from error

    @property
    def _shuffle_seed(self) -> int:
        return derive_seed("stream", self.seed) % 2**31

    def _divide_shards(self, split_info: Any, place: str) -> ShardReader:
        names = list(split_info.filenames)
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"the shards of {self.config.path!r} are {names[:3]}…; expected file names")
        is_local = "://" not in place
        # Absolute paths, since webdataset executes a name that begins with "pipe:".
        root = os.path.abspath(place) if is_local else place
        shards = [os.path.join(root, name) for name in names]
        if is_local:
            _check_shards(shards)
        if not self.training:
            # Each rank evaluates whole shards, so that every image counts once. A rank may have no shard.
            shards = shards[self.rank :: self.world_size]
            self.max_workers, self.is_empty = len(shards), not shards
        elif len(shards) < self.world_size:
            raise ValueError(
                f"{self.config.path!r} has {len(shards)} training shard(s) for {self.world_size} ranks; "
                "every rank needs one"
            )
        else:
            self.max_workers = len(shards) // self.world_size
        return ShardReader(
            shards,
            config=self.config,
            alt_label=split_info.alt_label,
            shuffle_seed=self._shuffle_seed if self.training else None,
        )


def _check_shards(shards: list[str]) -> None:
    missing = [shard for shard in shards if not os.path.isfile(shard)]
    if missing:
        raise ValueError(f"{len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}")
    for shard in shards:
        if shard.endswith(".tar"):
            _check_tar_end(shard)


def _check_tar_end(path: str) -> None:
    """Raise ValueError for a truncated tar file. webdataset would silently return only its first part."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - tarfile.BLOCKSIZE))
        is_whole = size % tarfile.BLOCKSIZE == 0 and file.read() == bytes(tarfile.BLOCKSIZE)
    if not is_whole:
        raise ValueError(
            f"{path!r} has no end-of-archive mark after its {size:,} bytes: it was cut off, or is not a tar file. "
            "Copy it again, or pack it again"
        )


def _whole_number(value: object, split: str, config: DataConfig) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"split {split!r} of {config.path!r} has {value!r} images; expected a whole number")
    return value


class StreamDataset(IterableDataset[RawBatch | ValueError]):
    """Yields whole batches, with the unreadable images among them.

    An error in the data is yielded as a value, because an exception in a worker process prints a traceback.
    """

    def __init__(self, stream: Stream, *, model_classes: list[str] | None = None) -> None:
        self._stream, config = stream, stream.config
        self.epoch = 0
        self._augment = Augment(config) if stream.training else None
        self._transform = eval_transform(config)
        classes = stream.class_names
        self._labels = label_map(classes, named=stream.named, model_classes=model_classes or classes)

    def __iter__(self) -> Iterator[RawBatch | ValueError]:
        try:
            yield from self._batches()
        except ValueError as error:
            yield error

    def _batches(self) -> Iterator[RawBatch]:
        stream, config = self._stream, self._stream.config
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        part, parts = stream.rank * workers + number, stream.world_size * workers
        shape = (config.in_chans, *config.size)
        samples: list[Sample] = []
        skipped: list[SkippedImage] = []
        broken_in_a_row = 0
        # The number of training batches is fixed. After its last image a stream starts again.
        batches_left = -(-stream.num_samples // (parts * stream.batch_size)) if stream.training else None
        # In training the reader has the shards of all ranks; in evaluation it has only those of this rank.
        items = self._items(part, parts) if stream.training else self._items(number, workers)
        items = islice(items, stream.rank % stream.stride, None, stream.stride)
        for position, item in enumerate(items):
            if batches_left == 0:
                return
            try:
                with restored_generators() if worker is None else nullcontext():
                    samples.append(self._sample(item, position * parts + part))
                broken_in_a_row = 0
            except UnreadableImage as error:
                skipped.append(SkippedImage(item.name, str(error)))
                broken_in_a_row += 1
            if len(samples) == stream.batch_size or (stream.training and broken_in_a_row == MAX_REPLACEMENTS):
                yield collate(samples, shape=shape, skipped=skipped)
                samples, skipped, broken_in_a_row = [], [], 0
                batches_left = None if batches_left is None else batches_left - 1
        if samples or skipped:
            yield collate(samples, shape=shape, skipped=skipped)

    def _items(self, part: int, parts: int) -> Iterator[Item]:
        """The images of this worker: once in evaluation, in an endless loop in training."""
        stream, worker = self._stream, get_worker_info()
        rng = random.Random(derive_seed("stream", stream.seed, self.epoch) if worker is None else worker.seed)
        while True:
            is_empty = True
            for item in stream.reader.read(epoch=self.epoch, part=part, parts=parts, rng=rng):
                yield item
                is_empty = False
            if not stream.training:
                return
            if is_empty:
                raise ValueError(f"no images in {stream.config.path!r}, split {stream.config.train_split!r}")

    def _sample(self, item: Item, sample_id: int) -> Sample:
        if item.damage:
            raise UnreadableImage(item.damage)
        label = int(item.label)
        if not 0 <= label < len(self._labels):
            raise ValueError(
                f"label {label} of {item.name} is out of range; expected 0 to {len(self._labels) - 1} "
                "(data.num_classes)"
            )
        file = io.BytesIO(item.image) if isinstance(item.image, bytes) else item.image
        image = decode_image(file, in_chans=self._stream.config.in_chans)
        target = int(self._labels[label])
        with transform_errors():
            if self._augment is None:
                return Sample(self._transform(image), target, sample_id)
            seed = derive_seed("augment", self._stream.seed, self.epoch, sample_id)
            pixels, erased = self._augment(image, seed=seed)
            return Sample(pixels, target, sample_id, erased)


class StreamLoader(BatchLoader[RawBatch]):
    """Loads batches of a stream. `start_step` shortens the epoch, but does not skip the images seen before."""

    def __init__(self, dataset: StreamDataset, stream: Stream, *, steps: int | None, workers: int) -> None:
        self._dataset, self._stream, self._steps = dataset, stream, steps
        self._workers = workers if stream.max_workers is None else min(workers, stream.max_workers)
        self._iterator: Iterator[Any] | None = None

    def batches(self, epoch: int, start_step: int) -> Iterator[RawBatch]:
        self.close()
        if self._stream.is_empty:
            return iter(())
        self._dataset.epoch = epoch
        loader = DataLoader(
            self._dataset,
            batch_size=None,
            collate_fn=identity,
            generator=torch.Generator().manual_seed(derive_seed("stream", self._stream.seed, epoch)),
            **loader_arguments(self._stream.config, workers=self._workers),
        )
        self._iterator = iter(loader)  # starts the workers
        return self._closing(islice(self._iterator, None if self._steps is None else self._steps - start_step))

    def _closing(self, batches: Iterator[Any]) -> Iterator[RawBatch]:
        try:
            yield from map(raise_error, batches)
        finally:
            self.close()

    def close(self) -> None:
        shut_down(self._iterator)
        self._iterator = None
