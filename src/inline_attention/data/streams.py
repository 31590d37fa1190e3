"""Data without random access, through timm's readers: WebDataset shards ("wds/FOLDER") and "tfds/NAME".

The order of a stream depends on the number of ranks and workers, and a stream cannot be entered in the
middle: a resumed epoch starts again at its first shard. Evaluation still counts every image exactly once.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import count, islice
from typing import Any

import torch
from PIL import Image
from timm.data.readers import create_reader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from inline_attention.data.batches import Augment, RawBatch, Sample, as_it_is, collate, loader_arguments
from inline_attention.data.config import DataConfig
from inline_attention.data.decode import UnreadableImage, decode_image
from inline_attention.data.seeding import derive_seed, restored_generators
from inline_attention.data.skipped import SkippedImage
from inline_attention.data.sources import label_map
from inline_attention.data.transforms import eval_transform

_PACKAGES = {
    "wds": ("webdataset", "webdataset"),
    "tfds": ("tensorflow_datasets", "tensorflow tensorflow-datasets"),
}


def is_stream(path: str) -> bool:
    return path.partition("/")[0] in _PACKAGES and "/" in path


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
        self.config, self.training, self.seed, self.rank, self.world_size = (
            config,
            training,
            seed,
            rank,
            world_size,
        )
        self.kind, _, place = config.path.partition("/")
        module, packages = _PACKAGES[self.kind]
        if find_spec(module) is None:
            raise ImportError(f"data path {config.path!r} needs other packages: pip install {packages}")
        if config.in_memory or config.repeats > 1:
            raise ValueError(f"data.in_memory and data.repeats need random access; {config.path!r} is a stream")
        self._place = place
        self.reader = self._open(split)
        # The reader would ask torch.distributed; evaluation divides the data itself.
        self.reader.dist_rank, self.reader.dist_num_replicas = (rank, world_size) if training else (0, 1)
        self.num_samples = int(self.reader.num_samples)
        self.is_empty = False
        self.max_workers: int | None = None
        self.keeps_every = 1  # this rank keeps every so many images of its stream
        if self.kind == "wds":
            self._divide_shards()
        elif not training:
            self.keeps_every = world_size
        names = self.reader.class_to_idx
        self.named = bool(names)
        if not names and config.num_classes is None:
            raise ValueError(f"{config.path!r} does not say how many classes it has; set data.num_classes")
        self.class_names = sorted(names, key=names.__getitem__) or [str(i) for i in range(config.num_classes or 0)]

    def _open(self, split: str) -> Any:
        config = self.config
        try:
            return create_reader(
                f"{self.kind}/{'' if self.kind == 'wds' else self._place}",
                root=self._place if self.kind == "wds" else None,
                split=split,
                is_training=self.training,
                batch_size=config.batch_size,
                seed=derive_seed("stream", self.seed) % 2**31,
                input_img_mode="RGB" if self.kind == "tfds" else "",  # "": our own conversion, right for 16 bits
                input_key=config.input_key,
                target_key=config.target_key,
            )
        except (RuntimeError, LookupError, AssertionError, ValueError) as error:
            reason = str(error).partition("\n")[0]  # TensorFlow's go on to list every data set there is
            if self.kind == "wds":
                reason += (
                    "; expected a split of FOLDER/_info.json, or a pattern such as 'train-{0000..0099}.tar|128000'"
                )
            raise ValueError(f"split {split!r} of {config.path!r} cannot be opened: {reason}") from error

    def _divide_shards(self) -> None:
        shards = list(self.reader.split_info.filenames)
        if self.training:
            if len(shards) < self.world_size:
                raise ValueError(
                    f"{self.config.path!r} has {len(shards)} training shard(s) for {self.world_size} ranks; "
                    "every rank needs one"
                )
            self.max_workers = len(shards) // self.world_size
        else:
            # timm's reader pads or cuts the ranks to equal length; whole shards for each rank count exactly.
            mine = shards[self.rank :: self.world_size]
            self.max_workers = len(mine)
            self.is_empty = not mine  # more ranks than shards
            if mine and mine != shards:
                self.reader = self._open("::".join(mine))
                self.reader.dist_rank, self.reader.dist_num_replicas = 0, 1


class StreamSamples(IterableDataset[RawBatch]):
    """Whole batches of a stream, so that a worker's unreadable images travel with them."""

    def __init__(self, stream: Stream, *, model_classes: list[str] | None = None) -> None:
        self._stream, config = stream, stream.config
        self.epoch = 0
        self._augment = Augment(config) if stream.training else None
        self._transform = eval_transform(config)
        classes = stream.class_names
        self._labels = label_map(classes, named=stream.named, model_classes=model_classes or classes)

    def __iter__(self) -> Iterator[RawBatch]:
        stream, config = self._stream, self._stream.config
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stream_number = stream.rank * workers + number
        lost = _LostSamples(f"{config.path}, stream {stream_number}")
        shape = (config.in_chans, *config.size)
        samples: list[Sample] = []
        skipped: list[SkippedImage] = []
        with lost:
            mine = islice(enumerate(stream.reader), stream.rank % stream.keeps_every, None, stream.keeps_every)
            for position, (image, label) in mine:
                sample_id = position * workers * stream.world_size + stream_number
                try:
                    with restored_generators() if worker is None else nullcontext():
                        samples.append(self._sample(image, int(label), sample_id))
                except UnreadableImage as error:
                    skipped.append(SkippedImage(f"{config.path}, stream {stream_number}, {position}", str(error)))
                if len(samples) == config.batch_size:
                    yield collate(samples, shape=shape, skipped=[*skipped, *lost.take()])
                    samples, skipped = [], []
            skipped.extend(lost.take())
        if not stream.training and (samples or skipped):
            yield collate(samples, shape=shape, skipped=skipped)

    def _sample(self, image: Image.Image, label: int, sample_id: int) -> Sample:
        if not 0 <= label < len(self._labels):
            raise ValueError(f"label {label} out of range; expected 0 to {len(self._labels) - 1} (data.num_classes)")
        config = self._stream.config
        image = decode_image(image, in_chans=config.in_chans, exif_rotation=config.exif_rotation)
        target = int(self._labels[label])
        if self._augment is None:
            return Sample(self._transform(image), target, sample_id)
        seed = derive_seed("augment", self._stream.seed, self.epoch, sample_id)
        pixels, erased = self._augment(image, seed=seed)
        return Sample(pixels, target, sample_id, erased)


class _LostSamples(logging.Handler):
    """Images that the WebDataset reader could not decode: it drops them with a line in its log, no more."""

    _logger = logging.getLogger("timm.data.readers.reader_wds")

    def __init__(self, where: str) -> None:
        super().__init__(level=logging.WARNING)
        self._where, self._numbers = where, count()
        self._lost: list[SkippedImage] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Handling webdataset error"):
            reason = text.removeprefix("Handling webdataset error ").removesuffix(" Ignoring.")
            self._lost.append(SkippedImage(f"{self._where}, unreadable image {next(self._numbers)}", reason))

    def take(self) -> list[SkippedImage]:
        lost, self._lost = self._lost, []
        return lost

    def __enter__(self) -> "_LostSamples":
        self._propagated, self._logger.propagate = self._logger.propagate, False  # we report them ourselves
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated


class StreamFeed:
    """Batches of a stream; `start_step` shortens the epoch but does not skip what was seen."""

    def __init__(self, samples: StreamSamples, stream: Stream, *, steps: int | None, workers: int) -> None:
        self._samples, self._stream, self._steps = samples, stream, steps
        self._workers = workers if stream.max_workers is None else min(workers, stream.max_workers)

    def batches(self, epoch: int, start_step: int) -> Iterator[RawBatch]:
        if self._stream.is_empty:
            return iter(())
        self._samples.epoch = epoch
        self._stream.reader.set_epoch(epoch)
        self._stream.reader.ds = None  # a fresh pipeline: its shuffling starts over
        self._stream.reader.worker_seed = derive_seed("stream", self._stream.seed, epoch)  # without workers
        loader = DataLoader(
            self._samples,
            batch_size=None,
            collate_fn=as_it_is,
            generator=torch.Generator().manual_seed(derive_seed("stream", self._stream.seed, epoch)),
            **loader_arguments(self._stream.config, workers=self._workers),
        )
        return islice(loader, None if self._steps is None else self._steps - start_step)

    def to(self, device: torch.device) -> None:
        pass

    def close(self) -> None:
        pass
