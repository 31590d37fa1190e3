"""Loaders for segmentation and detection."""

from typing import Any

from torch.utils.data import Dataset

from inline_attention.data import LoaderConfig
from inline_attention.data.collate import CollatedT
from inline_attention.data.loaders import TrainLoader
from inline_attention.data.prefetcher import Prefetcher
from inline_attention.data.sampler import EqualBatchSampler, EvalBatchSampler, rank_indices
from inline_attention.data.skipped import SkippedImages
from inline_attention.data.workers import WorkerLoader


def open_train_loader(
    dataset: Dataset[Any],
    sampler: EqualBatchSampler[Any],
    prefetcher: Prefetcher[Any, Any],
    *,
    config: LoaderConfig,
    num_images: int,
    world_size: int,
) -> TrainLoader[Any, Any]:
    """Training batches from worker processes that stay alive between epochs."""
    workers = min(config.resolved_workers(world_size), num_images)
    return TrainLoader(
        WorkerLoader(dataset, sampler, config=config, workers=workers, persistent_workers=True),
        prefetcher=prefetcher,
        batch_size=sampler.batch_size,
        steps_per_epoch=sampler.steps,
        skipped=SkippedImages(limit=config.max_broken_count(num_images)),
        exact_resume=True,
    )


def eval_batches(
    dataset: Dataset[CollatedT], *, num_images: int, batch_size: int, config: LoaderConfig, rank: int, world_size: int
) -> WorkerLoader[CollatedT]:
    """Every image of a split once over all ranks."""
    sampler = EvalBatchSampler(rank_indices(num_images, rank=rank, world_size=world_size), batch_size=batch_size)
    workers = min(config.resolved_workers(world_size), num_images)
    return WorkerLoader(dataset, sampler, config=config, workers=workers, persistent_workers=False)
