"""Loaders of images and masks: crops in batches for training, whole images for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from inline_attention.data.collate import UnnormalisedBatch
from inline_attention.data.dataset import read_each, read_or_replace
from inline_attention.data.loaders import EvalLoader, TrainLoader
from inline_attention.data.prefetcher import Normalise, Prefetcher
from inline_attention.data.sampler import SampleKey, TrainBatchSampler
from inline_attention.data.seeding import derive_seed, restored_generators, seed_generators
from inline_attention.data.skipped import SkippedImage, SkippedImages
from inline_attention.tasks.dense.data import eval_batches, open_train_loader
from inline_attention.tasks.segmentation.config import SegmentDataConfig
from inline_attention.tasks.segmentation.sources import IGNORED, MaskSource, Pair, open_split
from inline_attention.tasks.segmentation.transforms import TrainTransform, target_size


@dataclass
class SegmentBatch:
    """A batch on the loader's device, as a segmenter takes it in training"""

    images: Tensor  # (B, 3, H, W) float32, normalised; padding is undefined
    masks: Tensor  # (B, H, W) int64, IGNORED for a pixel that is not counted
    sample_ids: Tensor  # (B,) int64
    sizes: Tensor | None = None  # (B, 2) int64, (height, width) without padding; None if no image is padded


@dataclass(kw_only=True)
class RawCrops(UnnormalisedBatch):
    """Images (B, H, W, 3)"""

    masks: Tensor  # (B, H, W) uint8
    sizes: Tensor  # (B, 2) int64, (height, width) without padding


class CropDataset(Dataset[RawCrops]):
    """Training crops. An unreadable image is replaced by another."""

    def __init__(self, source: MaskSource, *, config: SegmentDataConfig, seed: int) -> None:
        self._source, self._config, self._seed = source, config, seed
        self._transform = TrainTransform(config)

    def __getitems__(self, keys: Sequence[SampleKey]) -> RawCrops:
        source = self._source
        with restored_generators():
            samples, skipped, replaced = read_or_replace(
                keys, self._read, path=source.path, seed=self._seed, num_samples=len(source)
            )
        rows, columns = self._config.crop_size
        images = torch.zeros((len(samples), rows, columns, 3), dtype=torch.uint8)
        masks = torch.full((len(samples), rows, columns), IGNORED, dtype=torch.uint8)
        sizes = [mask.shape for _, mask, _ in samples]
        for n, ((pixels, mask, _), (height, width)) in enumerate(zip(samples, sizes, strict=True)):
            images[n, :height, :width] = torch.from_numpy(pixels)
            masks[n, :height, :width] = torch.from_numpy(mask)
        return RawCrops(
            images=images,
            masks=masks,
            sample_ids=torch.tensor([index for _, _, index in samples], dtype=torch.int64),
            sizes=torch.tensor(sizes, dtype=torch.int64).view(-1, 2),
            skipped=skipped,
            replaced=replaced,
        )

    def _read(self, key: SampleKey, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        pixels, mask = self._source.read(index)
        assert mask is not None
        seed_generators(derive_seed("augment", self._seed, *key))
        return *self._transform(pixels, mask), index


class CropPrefetcher(Prefetcher[RawCrops, SegmentBatch]):
    """Transfers crops as bytes and normalises them on the device."""

    def __init__(self) -> None:
        super().__init__()
        self._normalise = Normalise()

    def finish(self, raw: RawCrops) -> SegmentBatch:
        images, masks, ids = (t.to(self.device, non_blocking=True) for t in (raw.images, raw.masks, raw.sample_ids))
        padded = bool((raw.sizes < torch.tensor(raw.masks.shape[1:])).any())
        sizes = raw.sizes.to(self.device, non_blocking=True) if padded else None
        return SegmentBatch(self._normalise(images.permute(0, 3, 1, 2)), masks.long(), ids, sizes)


@dataclass
class EvalImage:
    """An image to evaluate, resized for the model. Its mask keeps the size of the file."""

    sample_id: int
    pixels: Tensor  # (3, h, w) uint8
    size: tuple[int, int]  # (height, width) of the file, and of the mask
    mask: Tensor | None  # (height, width) uint8; None if the image has none


@dataclass
class RawEval:
    """Images of an evaluation, each at its own size."""

    images: list[EvalImage] = field(default_factory=list)
    skipped: Sequence[SkippedImage] = ()
    replaced: int = 0
    on_device: bool = False

    def __len__(self) -> int:
        return len(self.images)


class EvalDataset(Dataset[RawEval]):
    """Resized images with their masks, or without if the source has none. Unreadable ones are left out."""

    def __init__(self, source: MaskSource, *, config: SegmentDataConfig) -> None:
        self._source, self._config = source, config

    def __getitems__(self, indices: Sequence[int]) -> RawEval:
        return RawEval(*read_each(indices, self._read, path=self._source.path))

    def _read(self, index: int) -> EvalImage:
        pixels, mask = self._source.read(index)
        height, width = target_size(pixels.shape, self._config)
        resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
        return EvalImage(
            index,
            torch.from_numpy(np.asarray(resized).transpose(2, 0, 1).copy()),
            size=(pixels.shape[0], pixels.shape[1]),
            mask=None if mask is None else torch.from_numpy(mask),
        )


class EvalPrefetcher(Prefetcher[RawEval, list[EvalImage]]):
    """Leaves images on the CPU. They differ in size, so the predictor transfers each one."""

    def finish(self, raw: RawEval) -> list[EvalImage]:
        return raw.images


EvalImages = EvalLoader[RawEval, list[EvalImage]]


@dataclass
class SegmentData:
    train: TrainLoader[RawCrops, SegmentBatch]
    val: EvalImages
    class_names: list[str]
    num_train_images: int


def open_segment_data(config: SegmentDataConfig, *, seed: int, rank: int = 0, world_size: int = 1) -> SegmentData:
    """Open both splits. ValueError if something is wrong with the configuration or the data."""
    config.validate()
    source = open_split(config, config.train_split)
    sampler = TrainBatchSampler(len(source), batch_size=config.batch_size, seed=seed, rank=rank, world_size=world_size)
    dataset = CropDataset(source, config=config, seed=seed)
    train = open_train_loader(
        dataset, sampler, CropPrefetcher(), config=config, num_images=len(source), world_size=world_size
    )
    val = open_eval_images(config, rank=rank, world_size=world_size)
    return SegmentData(train, val, source.class_names, len(source))


def open_eval_images(config: SegmentDataConfig, *, rank: int = 0, world_size: int = 1) -> EvalImages:
    """Open only the split `config.val_split`."""
    config.validate()
    return _eval_images(open_split(config, config.val_split), config=config, rank=rank, world_size=world_size)


def open_image_files(paths: Sequence[Path], *, config: SegmentDataConfig) -> EvalImages:
    """Open files without masks. `sample_id` is the position in `paths`."""
    source = MaskSource([Pair(path, None) for path in paths], class_names=[], labels=np.empty(0, np.int16))
    return _eval_images(source, config=config)


def _eval_images(source: MaskSource, *, config: SegmentDataConfig, rank: int = 0, world_size: int = 1) -> EvalImages:
    dataset, batch_size = EvalDataset(source, config=config), config.eval_batch_size
    return EvalLoader(
        eval_batches(
            dataset, num_images=len(source), batch_size=batch_size, config=config, rank=rank, world_size=world_size
        ),
        prefetcher=EvalPrefetcher(),
        class_names=source.class_names,
        num_images=len(source),
        skipped=SkippedImages(limit=config.max_broken_count(len(source))),
        batch_size=batch_size,
    )
