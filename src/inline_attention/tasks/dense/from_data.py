"""Chooses the length of a run and how often it is evaluated from the number of training images.

A published schedule counts updates or epochs of a large data set. On 18 images, 40,000 updates would show each image
20,000 times.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from inline_attention.data.sampler import fit_batch_size
from inline_attention.training.config import LoopConfig

PASSES = 100  # how often a run shows each image, within the two limits below
MIN_UPDATES, MAX_UPDATES = 300, 40_000
EVALUATIONS = 10  # of a run
_LENGTH = ("schedule.epochs", "schedule.warmup_epochs", "log.eval_epochs", "checkpoint.every_epochs")
_WARM_UP, _LONGEST_WARM_UP = 0.1, 500  # share of the updates, and updates


def choose(
    config: LoopConfig,
    *,
    images: int,
    world_size: int,
    sizes: tuple[str, ...],
    choose_sizes: Callable[[], Mapping[str, Any]],
) -> dict[str, Any]:
    """Values for the settings that `config.from_data` names, by name.

    Args:
        images: number of training images.
        sizes: names of the settings that `choose_sizes` returns. It is called only if `from_data` has one of them.
    """
    known = (*_LENGTH, *sizes)
    for name in config.from_data:
        if name not in known:
            raise ValueError(f"from_data={name}: cannot be chosen from the data; expected some of {', '.join(known)}")
    chosen: dict[str, Any] = {}
    if set(sizes) & set(config.from_data):
        chosen |= choose_sizes()
    chosen |= _choose_length(config, images=images, world_size=world_size)
    return {name: value for name, value in chosen.items() if name in config.from_data}


def _choose_length(config: LoopConfig, *, images: int, world_size: int) -> dict[str, Any]:
    """Values for the length of a run and its intervals. If `schedule.steps` is set, they follow from it."""
    schedule = config.schedule
    batch = fit_batch_size(config.data.batch_size, num_samples=images, world_size=world_size)
    per_epoch = max(1, images // (batch * world_size * config.optim.accumulate))
    chosen: dict[str, Any] = {}
    if schedule.steps is not None:
        updates = schedule.steps
    else:
        epochs = schedule.epochs
        if "schedule.epochs" in config.from_data:
            wanted = max(MIN_UPDATES, min(PASSES * per_epoch, MAX_UPDATES))
            epochs = chosen["schedule.epochs"] = math.ceil(wanted / per_epoch)
        updates = epochs * per_epoch
    if schedule.warmup_steps is None:
        warm_up = min(_LONGEST_WARM_UP, _WARM_UP * updates)
        chosen["schedule.warmup_epochs"] = round(warm_up / per_epoch, 3)
    every = max(1, round(updates / per_epoch / EVALUATIONS))
    return chosen | {"log.eval_epochs": every, "checkpoint.every_epochs": every}


def multiple_of(step: int, value: float) -> int:
    """The multiple of `step` nearest to `value`, at least `step`"""
    return max(step, step * round(value / step))
