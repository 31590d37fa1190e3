"""Batch samplers: which samples make up each batch of an epoch, on every rank.

The order is a function of (seed, epoch). It is drawn for all ranks at once and then divided, so that it does not depend
on the number of ranks.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

from inline_attention.data.seeding import derive_seed

KeyT = TypeVar("KeyT")


class SampleKey(NamedTuple):
    """The key from which a training dataset makes a sample."""

    epoch: int
    sample: int
    copy: int  # index of the copy, in repeated augmentation


class EpochBatchSampler(Sampler[list[KeyT]]):
    """A batch sampler in the manner of `DistributedSampler`: call `set_epoch`, then iterate."""

    def __init__(self) -> None:
        self._epoch, self._start_step = 0, 0

    def set_epoch(self, epoch: int, *, start_step: int = 0) -> None:
        """The next iteration yields the batches of `epoch` from `start_step` on."""
        self._epoch, self._start_step = epoch, start_step

    def __iter__(self) -> Iterator[list[KeyT]]:
        return self.batches(self._epoch, self._start_step)

    @abstractmethod
    def batches(self, epoch: int, start_step: int) -> Iterator[list[KeyT]]:
        """Yield the keys of each batch."""


class EqualBatchSampler(EpochBatchSampler[KeyT]):
    """A batch sampler for training: an epoch has `steps` batches of `batch_size` samples on every rank."""

    batch_size: int
    steps: int


class TrainBatchSampler(EqualBatchSampler[SampleKey]):
    """Batches of one rank, all of the same size. The incomplete batch at the end of an epoch is dropped."""

    def __init__(
        self, num_samples: int, *, batch_size: int, seed: int, rank: int, world_size: int, repeats: int = 0
    ) -> None:
        super().__init__()
        self._num_samples, self._seed, self._repeats = num_samples, seed, repeats
        self.batch_size = fit_batch_size(batch_size, num_samples=num_samples, world_size=world_size)
        self._positions = rank_positions(self.batch_size, rank=rank, world_size=world_size)
        self._global_batch = self.batch_size * world_size
        self.steps = num_samples // self._global_batch

    def batches(self, epoch: int, start_step: int) -> Iterator[list[SampleKey]]:
        order = epoch_order(self._num_samples, seed=self._seed, epoch=epoch, repeats=self._repeats)
        for step in range(start_step, self.steps):
            rows = order[step * self._global_batch + self._positions]
            yield [SampleKey(epoch, int(sample), int(copy)) for sample, copy in rows]


class EvalBatchSampler(EpochBatchSampler[int]):
    """Batches of the samples `indices`, in order. The last batch may be smaller."""

    def __init__(self, indices: Sequence[int], *, batch_size: int) -> None:
        super().__init__()
        self._indices, self._batch_size = indices, batch_size

    def batches(self, epoch: int, start_step: int) -> Iterator[list[int]]:
        for start in range(start_step * self._batch_size, len(self._indices), self._batch_size):
            yield list(self._indices[start : start + self._batch_size])


def rank_indices(num_samples: int, *, rank: int, world_size: int) -> range:
    """The samples that `rank` evaluates: rank, rank + world_size, … Every sample belongs to exactly one rank."""
    return range(rank, num_samples, world_size)


def fit_batch_size(batch_size: int, *, num_samples: int, world_size: int) -> int:
    """The batch size of a rank: `batch_size`, or less if the training split has fewer images than all ranks need.

    An even batch size stays even, since mixup mixes pairs.
    """
    if batch_size * world_size <= num_samples:
        return batch_size
    fitting = num_samples // world_size
    if batch_size % 2 == 0 and fitting > 1:
        fitting -= fitting % 2
    if fitting == 0:
        raise ValueError(f"the training split has {num_samples} image(s) for {world_size} ranks; use fewer ranks")
    return fitting


def epoch_order(num_samples: int, *, seed: int, epoch: int, repeats: int = 0) -> np.ndarray:
    """(num_samples, 2) int64: the sample and the index of its copy at each position of the epoch.

    Without repeated augmentation this is a permutation, and every copy is 0. With `repeats` r, each sample appears r
    times in a row. The epoch keeps its length: it shows r augmentations of 1/r of the images.
    """
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    samples = torch.randperm(num_samples, generator=generator).numpy()
    copies = max(1, repeats)
    samples = np.repeat(samples, copies)[:num_samples]
    return np.stack([samples, np.arange(num_samples) % copies], axis=1)


def rank_positions(batch_size: int, *, rank: int, world_size: int) -> np.ndarray:
    """(batch_size,) int64: the positions of `rank` in the global batch of G = world_size · batch_size samples.

    Mixup mixes image i of a batch with image G − 1 − i (`flip(0)`). Each rank therefore holds block `rank` of the first
    half and the mirror image of that block. Partners are on the same rank, and flipping the local batch flips the
    global one: R ranks with batch size B compute what one rank computes with batch size R·B. An odd batch cannot be
    mixed and is a plain block.
    """
    if batch_size % 2:
        return np.arange(rank * batch_size, (rank + 1) * batch_size)
    half = batch_size // 2
    front = np.arange(rank * half, (rank + 1) * half)
    return np.concatenate([front, world_size * batch_size - 1 - front[::-1]])


def replacement(sample: int, *, seed: int, epoch: int, attempt: int, num_samples: int) -> int:
    """The sample that replaces the unreadable `sample`; try attempt 0, 1, … until one is readable."""
    return derive_seed("replacement", seed, epoch, sample, attempt) % num_samples
