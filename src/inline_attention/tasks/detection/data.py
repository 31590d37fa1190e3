"""Batches of images with boxes and masks.

The size and the flip of an image are a function of (seed, epoch, sample). The images of a batch are padded to one size.
The batch carries their true sizes, from which the model computes the same result as for each image alone.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

from inline_attention.data.collate import UnnormalisedBatch
from inline_attention.data.dataset import read_each, read_or_replace
from inline_attention.data.decode import read_image
from inline_attention.data.loaders import EvalLoader, TrainLoader
from inline_attention.data.prefetcher import Normalise, Prefetcher
from inline_attention.data.sampler import EqualBatchSampler, SampleKey, epoch_order, fit_batch_size
from inline_attention.data.seeding import derive_seed
from inline_attention.data.skipped import SkippedImage, SkippedImages
from inline_attention.tasks.dense.data import eval_batches, open_train_loader
from inline_attention.tasks.detection.annotations import (
    AnnotatedData,
    AnnotatedImage,
    check_objects,
    check_same_categories,
)
from inline_attention.tasks.detection.boxes import Size
from inline_attention.tasks.detection.coco import decode_masks
from inline_attention.tasks.detection.config import DetectionDataConfig
from inline_attention.tasks.detection.layouts import read_split

Target = dict[str, Tensor]


class Sample(NamedTuple):
    pixels: Tensor  # (3, h, w) uint8
    target: Target
    sample_id: int
    key: int


@dataclass(kw_only=True)
class RawDetectionBatch(UnnormalisedBatch):
    """Images (B, 3, H, W), padded below and on the right"""

    sizes: list[Size]
    targets: list[Target]
    keys: Tensor  # (B,) int64


@dataclass
class DetectionBatch:
    """A batch on the loader's device, as a detector takes it"""

    images: Tensor  # (B, 3, H, W) float32, normalised; padding is undefined
    sizes: list[Size]  # of the images without padding
    targets: list[Target]  # boxes (n, 4), labels (n,) from 1 on; masks (n, height, width) uint8 for mask heads
    sample_ids: Tensor  # (B,) int64
    keys: Tensor  # (B,) int64, seeds of the choice of regions


def fitted_size(size: Size, *, short_side: int, max_side: int) -> Size:
    """(height, width) with the given short side, or smaller if the long side would exceed `max_side`"""
    scale = min(short_side / min(size), max_side / max(size))
    height, width = (max(1, int(side * scale + 0.5)) for side in size)
    return height, width


def resized(image: Image.Image, size: Size) -> Tensor:
    """(3, h, w) uint8"""
    return pil_to_tensor(image.resize(size[::-1], Image.Resampling.BILINEAR))


def show(
    image: Image.Image, annotated: AnnotatedImage, size: Size, *, flipped: bool, masks: bool
) -> tuple[Tensor, Target]:
    """Resize an image and its objects to `size`, and flip them: pixels (3, h, w) uint8, and the objects"""
    height, width = size
    objects = annotated.objects
    pixels = resized(image, size)
    scale = torch.tensor([width / annotated.size[1], height / annotated.size[0]]).repeat(2)
    boxes = torch.tensor([instance.box for instance in objects], dtype=torch.float32).view(-1, 4) * scale
    if flipped:
        pixels = pixels.flip(2)
        boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)
    target = {"boxes": boxes, "labels": torch.tensor([instance.label for instance in objects], dtype=torch.int64)}
    if masks:
        shown = torch.from_numpy(decode_masks(annotated, objects))
        # F.interpolate refuses a batch of 0.
        shown = (
            F.interpolate(shown[:, None], size, mode="nearest-exact")[:, 0] if objects else shown.new_zeros(0, *size)
        )
        target["masks"] = shown.flip(2) if flipped else shown
    return pixels, target


def load(annotated: AnnotatedImage) -> Image.Image:
    """Decode an image. UnreadableImage if that fails, ValueError if its size is not that of its annotations."""
    image = read_image(annotated.path)
    if (image.height, image.width) != annotated.size:
        raise ValueError(
            f"{annotated.path} is {image.height}×{image.width} (height × width), "
            f"but its annotations are for {annotated.size[0]}×{annotated.size[1]}; correct its height and width there"
        )
    return image


def collate(samples: Sequence[Sample], *, skipped: Sequence[SkippedImage] = (), replaced: int = 0) -> RawDetectionBatch:
    """Pad the samples to the largest height and width among them"""
    sizes: list[Size] = [(s.pixels.shape[1], s.pixels.shape[2]) for s in samples]
    height, width = (max(sides) for sides in zip((0, 0), *sizes, strict=True))
    images = torch.zeros((len(samples), 3, height, width), dtype=torch.uint8)
    for image, sample, (h, w) in zip(images, samples, sizes, strict=True):
        image[:, :h, :w] = sample.pixels
    return RawDetectionBatch(
        images=images,
        sizes=sizes,
        targets=[sample.target for sample in samples],
        sample_ids=torch.tensor([s.sample_id for s in samples], dtype=torch.int64),
        keys=torch.tensor([s.key for s in samples], dtype=torch.int64),
        skipped=skipped,
        replaced=replaced,
    )


class TrainDataset(Dataset[RawDetectionBatch]):
    """Images with their objects. An unreadable image is replaced by another."""

    def __init__(
        self, images: Sequence[AnnotatedImage], *, config: DetectionDataConfig, seed: int, masks: bool
    ) -> None:
        self._images, self._config, self._seed, self._masks = images, config, seed, masks

    def __getitems__(self, keys: Sequence[SampleKey]) -> RawDetectionBatch:
        samples, skipped, replaced = read_or_replace(
            keys, self._read, path=self._path, seed=self._seed, num_samples=len(self._images)
        )
        return collate(samples, skipped=skipped, replaced=replaced)

    def _path(self, index: int) -> str:
        return str(self._images[index].path)

    def _read(self, key: SampleKey, index: int) -> Sample:
        annotated, config = self._images[index], self._config
        image = load(annotated)
        draw = random.Random(derive_seed("view", self._seed, key.epoch, key.sample))
        size = fitted_size(annotated.size, short_side=draw.choice(config.train_short_sides), max_side=config.max_side)
        pixels, target = show(image, annotated, size, flipped=draw.random() < config.hflip, masks=self._masks)
        return Sample(pixels, target, index, derive_seed("regions", self._seed, key.epoch, key.sample))


class EvalDataset(Dataset[RawDetectionBatch]):
    """Images without objects. An unreadable image is left out."""

    def __init__(self, images: Sequence[AnnotatedImage], *, config: DetectionDataConfig) -> None:
        self._images, self._config = images, config

    def __getitems__(self, indices: Sequence[int]) -> RawDetectionBatch:
        samples, skipped = read_each(indices, self._read, path=lambda index: str(self._images[index].path))
        return collate(samples, skipped=skipped)

    def _read(self, index: int) -> Sample:
        annotated, config = self._images[index], self._config
        image = load(annotated)
        size = fitted_size(annotated.size, short_side=config.short_side, max_side=config.max_side)
        return Sample(resized(image, size), {}, index, 0)


class GroupedBatchSampler(EqualBatchSampler[SampleKey]):
    """The keys of this rank's batches: a permutation by (seed, epoch), with landscape and portrait images apart.

    Images that are left over at the end of an epoch form a mixed batch, so that no batch is lost.
    """

    def __init__(
        self, images: Sequence[AnnotatedImage], *, config: DetectionDataConfig, seed: int, rank: int, world_size: int
    ) -> None:
        super().__init__()
        self._images, self._seed = images, seed
        self.batch_size = fit_batch_size(config.batch_size, num_samples=len(images), world_size=world_size)
        self._mine = slice(rank * self.batch_size, (rank + 1) * self.batch_size)
        self._global_batch = self.batch_size * world_size
        self.steps = len(images) // self._global_batch

    def batches(self, epoch: int, start_step: int) -> Iterator[list[SampleKey]]:
        for samples in list(self._global_batches(epoch))[start_step:]:
            yield [SampleKey(epoch, sample, 0) for sample in samples[self._mine]]

    def _global_batches(self, epoch: int) -> Iterator[list[int]]:
        waiting: dict[bool, list[int]] = {True: [], False: []}
        for sample in epoch_order(len(self._images), seed=self._seed, epoch=epoch)[:, 0].tolist():
            height, width = self._images[sample].size
            group = waiting[width >= height]
            group.append(sample)
            if len(group) == self._global_batch:
                yield group.copy()
                group.clear()
        rest = waiting[True] + waiting[False]
        if len(rest) >= self._global_batch:
            yield rest[: self._global_batch]


class DetectionPrefetcher(Prefetcher[RawDetectionBatch, DetectionBatch]):
    """Transfers images as bytes and normalises them on the device."""

    def __init__(self) -> None:
        super().__init__()
        self._normalise = Normalise()

    def finish(self, raw: RawDetectionBatch) -> DetectionBatch:
        images = self._normalise(raw.images.to(self.device, non_blocking=True))
        targets = [{n: v.to(self.device, non_blocking=True) for n, v in target.items()} for target in raw.targets]
        ids, keys = (t.to(self.device, non_blocking=True) for t in (raw.sample_ids, raw.keys))
        return DetectionBatch(images, raw.sizes, targets, ids, keys)


class DetectionEvalLoader(EvalLoader[RawDetectionBatch, DetectionBatch]):
    """The images of a split. They come one at a time, so none is padded."""

    def __init__(self, data: AnnotatedData, *, config: DetectionDataConfig, rank: int = 0, world_size: int = 1) -> None:
        self.data = data
        dataset, num_images = EvalDataset(data.images, config=config), len(data.images)
        super().__init__(
            eval_batches(dataset, num_images=num_images, batch_size=1, config=config, rank=rank, world_size=world_size),
            prefetcher=DetectionPrefetcher(),
            class_names=data.class_names,
            num_images=num_images,
            skipped=SkippedImages(limit=config.max_broken_count(num_images)),
            batch_size=1,
        )


@dataclass
class DetectionData:
    train: TrainLoader[RawDetectionBatch, DetectionBatch]
    val: DetectionEvalLoader
    class_names: list[str]

    def to(self, device: torch.device | str) -> "DetectionData":
        self.train.to(torch.device(device))
        self.val.to(torch.device(device))
        return self


def training_images(data: AnnotatedData, config: DetectionDataConfig) -> list[AnnotatedImage]:
    """The images to train on. ValueError if none has an object."""
    check_objects(data)
    return [image for image in data.images if image.objects or not config.skip_empty]


def open_detection_data(
    config: DetectionDataConfig, *, masks: bool = True, seed: int = 0, rank: int = 0, world_size: int = 1
) -> DetectionData:
    """Open both splits, with masks or only boxes. ValueError if something is wrong with the settings or the data."""
    config.validate()
    train, val = (read_split(config, split, masks=masks) for split in (config.train_split, config.val_split))
    check_same_categories(train, val)
    images = training_images(train, config)
    check_objects(val)
    sampler = GroupedBatchSampler(images, config=config, seed=seed, rank=rank, world_size=world_size)
    dataset = TrainDataset(images, config=config, seed=seed, masks=masks)
    loader = open_train_loader(
        dataset, sampler, DetectionPrefetcher(), config=config, num_images=len(images), world_size=world_size
    )
    return DetectionData(
        loader, DetectionEvalLoader(val, config=config, rank=rank, world_size=world_size), train.class_names
    )
