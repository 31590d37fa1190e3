"""Map-style datasets: decode and transform the samples of a source, a batch at a time, in worker processes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, TypeVar

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from inline_attention.data.collate import RawBatch, Sample, collate
from inline_attention.data.config import DataConfig
from inline_attention.data.decode import UnreadableImage, decode_image, reason
from inline_attention.data.sampler import SampleKey, replacement
from inline_attention.data.seeding import derive_seed, restored_generators, seed_generators
from inline_attention.data.skipped import SkippedImage
from inline_attention.data.sources import Label, Source
from inline_attention.data.transforms import BoxErasing, ErasedBox, Transform, eval_transform, train_transform

T = TypeVar("T")
MAX_REPLACEMENTS = 100  # attempts in a row; data.max_broken usually stops a run earlier


class Augment:
    """The training transform of one image. Its randomness depends on the seed of the call alone."""

    def __init__(self, config: DataConfig) -> None:
        self._transform = train_transform(config)
        self._erasing = BoxErasing(config.random_erase) if config.augment and config.random_erase else None

    def __call__(self, image: Image.Image, *, seed: int) -> tuple[Tensor, ErasedBox | None]:
        seed_generators(seed)
        pixels = self._transform(image)
        return pixels, None if self._erasing is None else self._erasing(pixels)


def read_sample(source: Source, index: int) -> tuple[BinaryIO | Image.Image, Label]:
    """`source.read`. Raises UnreadableImage with the reason on failure."""
    try:
        return source.read(index)
    except UnreadableImage:
        raise
    except Exception as error:  # a file was removed, or an archive is damaged: OSError, struct and zlib errors
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error


def load_image(source: Source, index: int, *, config: DataConfig) -> tuple[Image.Image, Label]:
    """The decoded image and its label. Raises UnreadableImage with the reason on failure."""
    file, label = read_sample(source, index)
    with file:
        return decode_image(file, in_chans=config.in_chans), label


@contextmanager
def transform_errors() -> Iterator[None]:
    """Treat an image that cannot be transformed as unreadable."""
    try:
        yield
    except UnreadableImage:
        raise
    except Exception as error:
        raise UnreadableImage(f"it cannot be transformed ({reason(error)})") from error


def read_or_replace(
    keys: Iterable[SampleKey],
    read: Callable[[SampleKey, int], T],
    *,
    path: Callable[[int], str],
    seed: int,
    num_samples: int,
) -> tuple[list[T], list[SkippedImage], int]:
    """Make the sample of each key. An unreadable image is replaced by another, so that the batch keeps its size.

    Args:
        read: makes a sample from a key and the index of an image, which is another one for a replacement. It raises
            UnreadableImage.

    Returns:
        The samples, the unreadable images, and the number of samples from another image. A key for which no
        replacement was readable has no sample.
    """
    samples: list[T] = []
    skipped: list[SkippedImage] = []
    replaced = 0
    for key in keys:
        candidate = key.sample
        for attempt in range(MAX_REPLACEMENTS):
            try:
                samples.append(read(key, candidate))
            except UnreadableImage as error:
                skipped.append(SkippedImage(path(candidate), str(error)))
                candidate = replacement(
                    key.sample, seed=seed, epoch=key.epoch, attempt=attempt, num_samples=num_samples
                )
            else:
                replaced += candidate != key.sample
                break
    return samples, skipped, replaced


def read_each(
    indices: Iterable[int], read: Callable[[int], T], *, path: Callable[[int], str]
) -> tuple[list[T], list[SkippedImage]]:
    """Read the samples one by one. Returns what was read, and which ones are unreadable."""
    found: list[T] = []
    skipped: list[SkippedImage] = []
    for index in indices:
        try:
            found.append(read(index))
        except UnreadableImage as error:
            skipped.append(SkippedImage(path(index), str(error)))
    return found, skipped


class TrainDataset(Dataset[RawBatch]):
    """Augmented samples. An unreadable sample is replaced by another."""

    def __init__(self, source: Source, *, config: DataConfig, seed: int) -> None:
        self._source, self._config, self._seed = source, config, seed
        self._augment = Augment(config)

    def __getitems__(self, keys: Sequence[SampleKey]) -> RawBatch:
        source = self._source
        with restored_generators():
            samples, skipped, replaced = read_or_replace(
                keys, self._read, path=source.path, seed=self._seed, num_samples=len(source)
            )
        return collate(samples, shape=(self._config.in_chans, *self._config.size), skipped=skipped, replaced=replaced)

    def _read(self, key: SampleKey, sample: int) -> Sample:
        """Read `sample`, which may replace `key.sample`. The augmentation is seeded by the key."""
        image, label = load_image(self._source, sample, config=self._config)
        with transform_errors():
            pixels, erased = self._augment(image, seed=derive_seed("augment", self._seed, *key))
        return Sample(pixels, label, sample, erased)


class EvalDataset(Dataset[RawBatch]):
    """Samples with the evaluation transform. An unreadable sample is left out of its batch."""

    def __init__(self, source: Source, *, config: DataConfig) -> None:
        self._source, self._config = source, config
        self._transform: Transform = eval_transform(config)

    def __getitems__(self, indices: Sequence[int]) -> RawBatch:
        samples, skipped = read_each(indices, self._read, path=self._source.path)
        return collate(samples, shape=(self._config.in_chans, *self._config.size), skipped=skipped)

    def _read(self, index: int) -> Sample:
        image, label = load_image(self._source, index, config=self._config)
        with transform_errors():
            return Sample(self._transform(image), label, index)
