"""What the loaders of segmentation and detection share."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import Dataset

from inline_attention.data import LoaderConfig
from inline_attention.data.batches import EvalPlan, WorkerFeed
from inline_attention.data.decode import UnreadableImage
from inline_attention.data.loaders import DeviceStage, TrainLoader
from inline_attention.data.skipped import SkippedImage, SkippedImages

T = TypeVar("T")
RawT = TypeVar("RawT", bound="RawEvalBatch")


class RawEvalBatch(Protocol):
    """A batch as a worker process returns it"""

    @property
    def skipped(self) -> Iterable[SkippedImage]: ...

    def __len__(self) -> int: ...


class TrainPlan(Protocol):
    """The keys of the samples of this rank's batches"""

    batch_size: int
    steps: int

    def __call__(self, epoch: int, start_step: int) -> Iterator[list[Any]]: ...


def open_train_loader(
    samples: Dataset[Any],
    plan: TrainPlan,
    stage: DeviceStage[Any, Any],
    *,
    config: LoaderConfig,
    num_images: int,
    world_size: int,
) -> TrainLoader[Any, Any]:
    """Batches of `samples` in the order of `plan`; `stage` moves them to the device"""
    workers = min(config.resolved_workers(world_size), num_images)
    return TrainLoader(
        WorkerFeed(samples, plan, config=config, workers=workers, keep_workers=True),
        stage=stage,
        batch_size=plan.batch_size,
        steps_per_epoch=plan.steps,
        skipped=SkippedImages(limit=config.max_broken_count(num_images)),
        exact_resume=True,
    )


class EvalFeed(Generic[RawT]):
    """Every image of a split, once over all ranks. Each iteration lists the unreadable ones in `skipped`."""

    def __init__(
        self,
        samples: Dataset[RawT],
        *,
        num_images: int,
        batch_size: int,
        config: LoaderConfig,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.num_images = num_images
        self.skipped = SkippedImages(limit=config.max_broken_count(num_images))
        plan = EvalPlan(num_images, batch_size=batch_size, rank=rank, world_size=world_size)
        workers = min(config.resolved_workers(world_size), num_images)
        self._feed = WorkerFeed(samples, plan, config=config, workers=workers, keep_workers=False)

    def batches(self) -> Iterator[RawT]:
        """The batches that have at least one readable image"""
        self.skipped.clear()
        for raw in self._feed.batches(0, 0):
            self.skipped.extend(raw.skipped)
            if len(raw):
                yield raw


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
