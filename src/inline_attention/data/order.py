"""Which sample is seen when, and by which rank."""

import numpy as np
import torch

from inline_attention.data.seeding import derive_seed


def epoch_order(num_samples: int, *, seed: int, epoch: int, repeats: int = 0) -> np.ndarray:
    """(num_samples, 2) int64: the sample and the number of its copy at each position of the epoch.

    Without repeated augmentation: a permutation, copy 0. With `repeats` r: each sample r times in a row, cut
    after `num_samples`, so that an epoch keeps its length and shows r augmentations of 1/r of the images.
    """
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    samples = torch.randperm(num_samples, generator=generator).numpy()
    copies = max(1, repeats)
    samples = np.repeat(samples, copies)[:num_samples]
    return np.stack([samples, np.arange(num_samples) % copies], axis=1)


def rank_positions(batch_size: int, *, rank: int, world_size: int) -> np.ndarray:
    """(batch_size,) int64: the positions of the global batch of G = world_size · batch_size held by `rank`.

    Mixup mixes image i of a batch with image G − 1 − i (`flip(0)`). A rank therefore holds block `rank` of
    the first half followed by its mirror image: partners meet on one rank, and the flip of the local batch
    is the flip of the global one. R ranks with batch B then compute what one rank with batch R·B computes.
    An odd batch cannot be mixed and is a plain block.
    """
    if batch_size % 2:
        return np.arange(rank * batch_size, (rank + 1) * batch_size)
    half = batch_size // 2
    front = np.arange(rank * half, (rank + 1) * half)
    return np.concatenate([front, world_size * batch_size - 1 - front[::-1]])


def replacement(sample: int, *, seed: int, epoch: int, attempt: int, num_samples: int) -> int:
    """The sample that stands in for unreadable `sample`; attempt 0, 1, … until one is readable."""
    return derive_seed("replacement", seed, epoch, sample, attempt) % num_samples
