"""Loaders of images and masks: training crops in batches, evaluation images at their own sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from inline_attention.data.dataset import read_or_replace
from inline_attention.data.decode import UnreadableImage
from inline_attention.data.loaders import EvalLoader, TrainLoader
from inline_attention.data.prefetcher import Prefetcher
from inline_attention.data.sampler import EvalBatchSampler, SampleKey, TrainBatchSampler, rank_indices
from inline_attention.data.seeding import derive_seed, restored_generators, seed_generators
from inline_attention.data.skipped import SkippedImage, SkippedImages
from inline_attention.data.workers import WorkerLoader
from inline_attention.dense.images import Normalise, read_image
from inline_attention.dense.segmentation.config import SegmentDataConfig
from inline_attention.dense.segmentation.sources import IGNORED, MaskSource, open_split
from inline_attention.dense.segmentation.transforms import TrainTransform, target_size


@dataclass
class SegmentBatch:
    """What a model sees in training, on the loader's device."""

    images: Tensor  # (B, 3, H, W) float32, normalised; what is beyond an image's size is no part of it
    masks: Tensor  # (B, H, W) int64, IGNORED where a pixel counts for nothing
    sample_ids: Tensor  # (B,) int64
    sizes: Tensor | None = None  # (B, 2) int64, the images' own (height, width); None where none is padded


@dataclass
class RawCrops:
    images: Tensor  # (B, H, W, 3) uint8
    masks: Tensor  # (B, H, W) uint8
    sample_ids: Tensor  # (B,) int64
    sizes: Tensor  # (B, 2) int64, (height, width) of what is no padding
    skipped: Sequence[SkippedImage] = ()
    replaced: int = 0
    on_device: bool = False

    def __len__(self) -> int:
        return len(self.sample_ids)

    def pin_memory(self) -> "RawCrops":  # called by DataLoader
        pinned = {name: getattr(self, name).pin_memory() for name in ("images", "masks", "sample_ids", "sizes")}
        return replace(self, **pinned)


class CropDataset(Dataset[RawCrops]):
    """Training crops; an unreadable image is replaced by another, so that the batch keeps its shape."""

    def __init__(self, source: "MaskSource | DecodedSource", *, config: SegmentDataConfig, seed: int) -> None:
        self._source, self._config, self._seed = source, config, seed
        self._transform = TrainTransform(config)

    def __getitems__(self, keys: Sequence[SampleKey]) -> RawCrops:
        skipped: list[SkippedImage] = []
        with restored_generators():
            of_keys = [self._sample(key, skipped) for key in keys]
        found = [sample for sample in of_keys if sample is not None]
        rows, columns = self._config.crop_size
        images = torch.zeros((len(found), rows, columns, 3), dtype=torch.uint8)
        masks = torch.full((len(found), rows, columns), IGNORED, dtype=torch.uint8)
        sizes = [mask.shape for _, mask, _ in found]
        for n, ((pixels, mask, _), (height, width)) in enumerate(zip(found, sizes, strict=True)):
            images[n, :height, :width] = torch.from_numpy(pixels)
            masks[n, :height, :width] = torch.from_numpy(mask)
        ids = torch.tensor([index for _, _, index in found], dtype=torch.int64)
        own = torch.tensor(sizes, dtype=torch.int64).view(-1, 2)
        replaced = sum(s is not None and s[2] != key.sample for s, key in zip(of_keys, keys, strict=True))
        return RawCrops(images, masks, ids, own, skipped, replaced)

    def _sample(self, key: SampleKey, skipped: list[SkippedImage]) -> tuple[np.ndarray, np.ndarray, int] | None:
        found = read_or_replace(
            self._source.read,
            key.sample,
            path=self._source.path,
            seed=self._seed,
            epoch=key.epoch,
            num_samples=len(self._source),
            skipped=skipped,
        )
        if found is None:
            return None
        (pixels, mask), sample = found
        seed_generators(derive_seed("augment", self._seed, *key))
        return *self._transform(pixels, mask), sample


class CropPrefetcher(Prefetcher[RawCrops, SegmentBatch]):
    """Transfer and normalise. Bytes cross the bus, not floats."""

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
    """One image of an evaluation, at the size at which the model sees it."""

    sample_id: int
    pixels: Tensor  # (3, h, w) uint8
    size: tuple[int, int]  # (height, width) of the file, and of the mask
    mask: Tensor | None  # (height, width) uint8; None: of an image without one


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
    """Images with their masks, or files without; an unreadable one is left out."""

    def __init__(self, source: "MaskSource | DecodedSource | PlainFiles", *, config: SegmentDataConfig) -> None:
        self._source, self._config = source, config

    def __getitems__(self, indices: Sequence[int]) -> RawEval:
        images: list[EvalImage] = []
        skipped: list[SkippedImage] = []
        for index in indices:
            try:
                pixels, mask = self._source.read(index)
            except UnreadableImage as error:
                skipped.append(SkippedImage(self._source.path(index), str(error)))
                continue
            images.append(prepare(pixels, mask, sample_id=index, config=self._config))
        return RawEval(images, skipped)


class PlainFiles:
    """Image files without masks."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.class_names: list[str] = []

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> str:
        return str(self._paths[index])

    def read(self, index: int) -> tuple[np.ndarray, None]:
        return np.asarray(read_image(self._paths[index])), None


def prepare(pixels: np.ndarray, mask: np.ndarray | None, *, sample_id: int, config: SegmentDataConfig) -> EvalImage:
    """pixels (H, W, 3), mask (H, W): the image resized as `config` says, the mask as it is."""
    height, width = target_size(pixels.shape, config)
    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
    return EvalImage(
        sample_id,
        torch.from_numpy(np.asarray(resized).transpose(2, 0, 1).copy()),
        size=(pixels.shape[0], pixels.shape[1]),
        mask=None if mask is None else torch.from_numpy(mask),
    )


class EvalPrefetcher(Prefetcher[RawEval, list[EvalImage]]):
    """Images differ in size: the predictor transfers them."""

    def finish(self, raw: RawEval) -> list[EvalImage]:
        return raw.images


EvalImages = EvalLoader[RawEval, list[EvalImage]]


@dataclass
class SegmentData:
    train: TrainLoader[RawCrops, SegmentBatch]
    val: EvalImages
    class_names: list[str]


class DecodedSource:
    """A source whose files are decoded once."""

    def __init__(self, source: MaskSource) -> None:
        self._source = source
        self.class_names = source.class_names
        self._decoded = [_read_or_reason(source, index) for index in range(len(source))]

    def __len__(self) -> int:
        return len(self._source)

    def path(self, index: int) -> str:
        return self._source.path(index)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        decoded = self._decoded[index]
        if isinstance(decoded, str):
            raise UnreadableImage(decoded)
        return decoded


def _read_or_reason(source: MaskSource, index: int) -> tuple[np.ndarray, np.ndarray] | str:
    try:
        return source.read(index)
    except UnreadableImage as error:
        return str(error)


def open_segment_data(config: SegmentDataConfig, *, seed: int, rank: int = 0, world_size: int = 1) -> SegmentData:
    """Open both splits. What is wrong with the configuration or the data is a ValueError here and now."""
    config.validate()
    source = _open(config, config.train_split)
    sampler = TrainBatchSampler(len(source), batch_size=config.batch_size, seed=seed, rank=rank, world_size=world_size)
    dataset = CropDataset(source, config=config, seed=seed)
    workers = min(config.resolved_workers(world_size), len(source))
    train = TrainLoader(
        WorkerLoader(dataset, sampler, config=config, workers=workers, persistent_workers=True),
        prefetcher=CropPrefetcher(),
        batch_size=sampler.batch_size,
        steps_per_epoch=sampler.steps,
        skipped=SkippedImages(limit=config.max_broken_count(len(source))),
        exact_resume=True,
    )
    val = open_eval_images(config, rank=rank, world_size=world_size)
    return SegmentData(train, val, source.class_names)


def open_eval_images(config: SegmentDataConfig, *, rank: int = 0, world_size: int = 1) -> EvalImages:
    """`config.val_split` alone."""
    config.validate()
    return _eval_images(_open(config, config.val_split), config=config, rank=rank, world_size=world_size)


def open_image_files(paths: Sequence[Path], *, config: SegmentDataConfig) -> EvalImages:
    """Files without masks: `sample_id` is the position in `paths`."""
    return _eval_images(PlainFiles(paths), config=config, rank=0, world_size=1)


def _open(config: SegmentDataConfig, split: str) -> MaskSource | DecodedSource:
    source = open_split(config, split)
    return DecodedSource(source) if config.in_memory else source


def _eval_images(
    source: MaskSource | DecodedSource | PlainFiles, *, config: SegmentDataConfig, rank: int, world_size: int
) -> EvalImages:
    indices = rank_indices(len(source), rank=rank, world_size=world_size)
    sampler = EvalBatchSampler(indices, batch_size=config.eval_batch_size)
    workers = min(config.resolved_workers(world_size), len(source))
    dataset = EvalDataset(source, config=config)
    return EvalLoader(
        WorkerLoader(dataset, sampler, config=config, workers=workers, persistent_workers=False),
        prefetcher=EvalPrefetcher(),
        class_names=source.class_names,
        num_images=len(source),
        skipped=SkippedImages(limit=config.max_broken_count(len(source))),
        batch_size=config.eval_batch_size,
    )
