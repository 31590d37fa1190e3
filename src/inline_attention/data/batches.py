"""Batches of uint8 images as the workers make them, and the feeds they come from."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from inline_attention.data.config import DataConfig, LoaderConfig
from inline_attention.data.decode import UnreadableImage, decode_image, reason
from inline_attention.data.order import epoch_order, rank_positions, replacement
from inline_attention.data.seeding import derive_seed, restored_generators, seed_generators
from inline_attention.data.skipped import SkippedImage
from inline_attention.data.sources import Source
from inline_attention.data.transforms import BoxErasing, ErasedBox, Transform, eval_transform, train_transform

T = TypeVar("T")
MAX_REPLACEMENTS = 100  # in a row; the limit on unreadable images stops the run long before


class SampleKey(NamedTuple):
    epoch: int
    sample: int
    copy: int  # which of the copies of repeated augmentation


class Sample(NamedTuple):
    pixels: Tensor  # (C, H, W) uint8
    target: int
    sample_id: int
    erased: ErasedBox | None = None


@dataclass
class RawBatch:
    """What a worker hands over: pixels before normalisation, and what random erasing will do to them."""

    images: Tensor  # (B, C, H, W) uint8; float32 in 0 … 255 where augmented on the device
    targets: Tensor  # (B,) int64
    sample_ids: Tensor  # (B,) int64
    boxes: Tensor | None = None  # (B, 4) int64: top, left, height, width; None where nothing is erased
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
    """`shape` (C, H, W) is that of one image: there may be none."""
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


class Augment:
    """The training transform of one image, with randomness from the seed it is given and nothing else."""

    def __init__(self, config: DataConfig) -> None:
        self._transform = train_transform(config)
        self._erasing = BoxErasing(config.random_erase) if config.augment and config.random_erase else None

    def __call__(self, image: Image.Image, *, seed: int) -> tuple[Tensor, ErasedBox | None]:
        seed_generators(seed)
        pixels = self._transform(image)
        return pixels, None if self._erasing is None else self._erasing(pixels)


def load_image(source: Source, index: int, *, config: DataConfig) -> tuple[Image.Image, int]:
    """The decoded image and its label; UnreadableImage says why not."""
    try:
        file, label = source.read(index)
    except UnreadableImage:
        raise
    except Exception as error:  # the file has gone, or the archive around it is damaged: zip, tar and zlib errors
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error
    with file:
        return decode_image(file, in_chans=config.in_chans), label


@contextmanager
def transforming() -> Iterator[None]:
    """An image that the transform inside cannot handle counts as unreadable."""
    try:
        yield
    except UnreadableImage:
        raise
    except Exception as error:
        raise UnreadableImage(f"it cannot be transformed ({reason(error)})") from error


def read_or_replace(
    read: Callable[[int], T],
    sample: int,
    *,
    path: Callable[[int], str],
    seed: int,
    epoch: int,
    num_samples: int,
    skipped: list[SkippedImage],
) -> tuple[T, int] | None:
    """What `read` makes of a sample, or of another where it is unreadable, and of which; None: there is none."""
    shown = sample
    for attempt in range(MAX_REPLACEMENTS):
        try:
            return read(shown), shown
        except UnreadableImage as error:
            skipped.append(SkippedImage(path(shown), str(error)))
            shown = replacement(sample, seed=seed, epoch=epoch, attempt=attempt, num_samples=num_samples)
    return None


class TrainSamples(Dataset[RawBatch]):
    """Augmented samples; an unreadable one is replaced, so that the batch keeps its shape."""

    def __init__(self, source: Source, *, config: DataConfig, seed: int) -> None:
        self._source, self._config, self._seed = source, config, seed
        self._augment = Augment(config)

    def __getitems__(self, keys: Sequence[SampleKey]) -> RawBatch:
        skipped: list[SkippedImage] = []
        with restored_generators():
            found = [self._sample(key, skipped) for key in keys]
        samples = [sample for sample in found if sample is not None]
        replaced = sum(s is not None and s.sample_id != key.sample for s, key in zip(found, keys, strict=True))
        return collate(samples, shape=(self._config.in_chans, *self._config.size), skipped=skipped, replaced=replaced)

    def _sample(self, key: SampleKey, skipped: list[SkippedImage]) -> Sample | None:
        found = read_or_replace(
            partial(self._read, key),
            key.sample,
            path=self._source.path,
            seed=self._seed,
            epoch=key.epoch,
            num_samples=len(self._source),
            skipped=skipped,
        )
        return None if found is None else found[0]

    def _read(self, key: SampleKey, sample: int) -> Sample:
        """`sample` takes the place of `key.sample` where that is unreadable; the randomness is the key's."""
        image, label = load_image(self._source, sample, config=self._config)
        with transforming():
            pixels, erased = self._augment(image, seed=derive_seed("augment", self._seed, *key))
        return Sample(pixels, label, sample, erased)


class EvalSamples(Dataset[RawBatch]):
    """Samples with the evaluation transform; an unreadable one is left out of its batch."""

    def __init__(self, source: Source, *, config: DataConfig) -> None:
        self._source, self._config = source, config
        self._transform: Transform = eval_transform(config)

    def __getitems__(self, indices: Sequence[int]) -> RawBatch:
        samples: list[Sample] = []
        skipped: list[SkippedImage] = []
        for index in indices:
            try:
                image, label = load_image(self._source, index, config=self._config)
                with transforming():
                    pixels = self._transform(image)
            except UnreadableImage as error:
                skipped.append(SkippedImage(self._source.path(index), str(error)))
            else:
                samples.append(Sample(pixels, label, index))
        return collate(samples, shape=(self._config.in_chans, *self._config.size), skipped=skipped)


def fitting_batch(batch_size: int, *, num_samples: int, world_size: int) -> int:
    """The batch of a rank: `batch_size`, or less where the training split has fewer images than ranks × batch.

    An even batch stays even, since mixup mixes pairs.
    """
    if batch_size * world_size <= num_samples:
        return batch_size
    fitting = num_samples // world_size
    if batch_size % 2 == 0 and fitting > 1:
        fitting -= fitting % 2
    if fitting == 0:
        raise ValueError(f"the training split has {num_samples} image(s) for {world_size} ranks; use fewer ranks")
    return fitting


class TrainPlan:
    """The keys of this rank's batches of an epoch: a function of (seed, epoch), cut into ranks afterwards."""

    def __init__(
        self, num_samples: int, *, batch_size: int, seed: int, rank: int, world_size: int, repeats: int = 0
    ) -> None:
        self._num_samples, self._seed, self._repeats = num_samples, seed, repeats
        self.batch_size = fitting_batch(batch_size, num_samples=num_samples, world_size=world_size)
        self._positions = rank_positions(self.batch_size, rank=rank, world_size=world_size)
        self._global_batch = self.batch_size * world_size
        self.steps = num_samples // self._global_batch

    def __call__(self, epoch: int, start_step: int) -> Iterator[list[SampleKey]]:
        order = epoch_order(self._num_samples, seed=self._seed, epoch=epoch, repeats=self._repeats)
        for step in range(start_step, self.steps):
            rows = order[step * self._global_batch + self._positions]
            yield [SampleKey(epoch, int(sample), int(copy)) for sample, copy in rows]


class EvalPlan:
    """Every image once over all ranks: rank r has r, r + R, …; the last batch is short."""

    def __init__(self, num_samples: int, *, batch_size: int, rank: int, world_size: int) -> None:
        self.indices = range(rank, num_samples, world_size)
        self._batch_size = batch_size
        self.max_batches = -(-len(range(0, num_samples, world_size)) // batch_size)  # of rank 0, which has the most

    def __call__(self, epoch: int, start_step: int) -> Iterator[list[int]]:
        for start in range(start_step * self._batch_size, len(self.indices), self._batch_size):
            yield list(self.indices[start : start + self._batch_size])


class Loaded(Protocol):
    """What every loader asks of the batches that workers hand over, whatever is in them."""

    skipped: Sequence[SkippedImage]  # unreadable images that were met
    replaced: int  # images that stand in for one of them

    def __len__(self) -> int: ...

    @property
    def on_device(self) -> bool:
        """There is nothing to transfer."""


LoadedT = TypeVar("LoadedT", bound=Loaded)
LoadedT_co = TypeVar("LoadedT_co", bound=Loaded, covariant=True)


class Feed(Protocol[LoadedT_co]):
    """Where a loader gets its batches."""

    def batches(self, epoch: int, start_step: int) -> Iterator[LoadedT_co]: ...

    def to(self, device: torch.device) -> None:
        """Pixels kept in memory move to the device; a feed without any has nothing to do."""

    def close(self) -> None:
        """No batch will be asked for any more: end the workers that wait for the next epoch, where there are any."""


class _PlannedKeys:
    """A batch sampler whose epoch and first step are set before each iteration."""

    def __init__(self, plan: Callable[[int, int], Iterable[Sequence[object]]]) -> None:
        self._plan = plan
        self.position = (0, 0)

    def __iter__(self) -> Iterator[Sequence[object]]:
        return iter(self._plan(*self.position))


class _ErrorsAsValues(Dataset[Any]):
    """What is wrong with the data reaches the user as it was said, not as the traceback of a worker process."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __getitems__(self, keys: Sequence[Any]) -> Any:
        try:
            return self._samples.__getitems__(keys)
        except ValueError as error:
            return error


def raise_error(batch: Any) -> Any:
    if isinstance(batch, ValueError):
        raise ValueError(str(batch))  # not itself: its traceback would hold what holds it, and so the workers
    return batch


class WorkerFeed(Generic[LoadedT]):
    """Batches decoded and transformed as they are needed, in worker processes."""

    def __init__(
        self,
        samples: Dataset[LoadedT],
        plan: Callable[[int, int], Iterable[Sequence[object]]],
        *,
        config: LoaderConfig,
        workers: int,
        keep_workers: bool,
    ) -> None:
        self._keys = _PlannedKeys(plan)
        self._loader = DataLoader(
            _ErrorsAsValues(samples),
            batch_sampler=self._keys,  # type: ignore[arg-type]  # anything that iterates over batches of keys will do
            collate_fn=as_it_is,
            persistent_workers=keep_workers and workers > 0,
            generator=torch.Generator(),  # otherwise starting an epoch would draw from the global generator
            **loader_arguments(config, workers=workers),
        )

    def batches(self, epoch: int, start_step: int) -> Iterator[LoadedT]:
        self._keys.position = (epoch, start_step)
        return map(raise_error, iter(self._loader))  # the workers start here and now

    def to(self, device: torch.device) -> None:
        pass

    def close(self) -> None:
        shut_down(self._loader._iterator)
        self._loader._iterator = None


def shut_down(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator. Otherwise they live as long as Python, which waits for them."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def loader_arguments(config: LoaderConfig, *, workers: int) -> dict[str, Any]:
    return {
        "num_workers": workers,
        "prefetch_factor": config.prefetch if workers else None,
        "pin_memory": torch.cuda.is_available() if config.pin_memory is None else config.pin_memory,
    }


def as_it_is(batch: Any) -> Any:
    return batch
