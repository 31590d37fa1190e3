"""95 % intervals: of differences between rows, paired by seed, and of measurements, over their images."""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Student's t, two-sided 95 %, by degrees of freedom from 1 on
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
DRAWS = 1000  # of the bootstrap


class Effect(NamedTuple):
    """A difference with its 95 % interval."""

    mean: float
    margin: float | None  # half of the interval; None if there is one seed, which has none
    seeds: int

    @property
    def low(self) -> float | None:
        return None if self.margin is None else self.mean - self.margin

    @property
    def high(self) -> float | None:
        return None if self.margin is None else self.mean + self.margin

    def __str__(self) -> str:
        text = f"{self.mean:+.2f}" if self.margin is None else f"{self.mean:+.2f} ± {self.margin:.2f}"
        return text.replace("-", "−")


def effect_of(values: Mapping[int, float]) -> Effect:
    """The mean of a quantity over its seeds. The interval comes from the spread of these seeds and t with n − 1."""
    found, count = list(values.values()), len(values)
    if not found:
        raise ValueError("there are no seeds; expected one or more")
    if count == 1:
        return Effect(found[0], None, 1)
    t = _T[min(count - 1, len(_T)) - 1]
    return Effect(statistics.fmean(found), t * statistics.stdev(found) / math.sqrt(count), count)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Effect | None:
    """a − b over the seeds that both have. None without any.

    Runs of one seed see the same images in the same order. What they share because of that cancels.
    """
    differences = {seed: a[seed] - b[seed] for seed in a if seed in b}
    return effect_of(differences) if differences else None


def bootstrap(by_image: np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % interval of the mean over images (images, …) → low (…), high (…), by drawing images with replacement."""
    images = len(by_image)
    counts = np.random.default_rng(seed).multinomial(images, np.full(images, 1 / images), size=draws)
    means = np.tensordot(counts / images, by_image.astype(np.float64), axes=1)
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return low, high
