"""Losses and gradient norms, accumulated on the device between two log lines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.training.distributed import Ranks


@dataclass(frozen=True)
class Reading:
    """Measurements since the last reading."""

    loss: float  # mean over the updates and all ranks; NaN: none was finite
    grad_norm: float  # of the last update
    bad_steps: int  # updates that were skipped
    first_bad: int | None  # index of the first skipped update since the last reading
    parts: dict[str, float]  # means of the terms of the loss, if there are several


class DeviceMeter:
    """Accumulates over updates. Only `read` waits for the device.

    It copies its arguments: with CUDA graphs the next update overwrites their memory.
    """

    sums: Tensor  # (2,) sum of finite losses, and their number
    bad: Tensor  # () number of skipped updates
    first_bad: Tensor  # () index of the first skipped update; −1: none
    norm: Tensor  # () gradient norm of the last update
    parts: dict[str, Tensor]  # () sums of each term over the updates with a finite loss
    updates: int

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._reset()

    def add(self, loss: Tensor, norm: Tensor, *, bad: Tensor, parts: Mapping[str, Tensor]) -> None:
        """loss (): this rank's mean over the update; norm (): of the gradient; bad (): the update was skipped.

        parts: terms of the loss to record, () each; the same names on every rank.
        """
        finite = loss.isfinite()
        self.sums += torch.stack([torch.where(finite, loss, 0), finite])
        self.first_bad = torch.where(bad & (self.first_bad < 0), self.updates, self.first_bad)
        self.bad += bad
        self.norm.copy_(norm)
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0) + torch.where(finite, value, 0)
        self.updates += 1

    def read(self) -> Reading:
        """The measurements since the last call, over all ranks. Every rank calls this."""
        sums = torch.cat([self.sums, *(part.view(1) for part in self.parts.values())])
        total, finite, *part_sums = self.ranks.sum(sums).tolist()
        parts = {name: _ratio(value, finite) for name, value in zip(self.parts, part_sums, strict=True)}
        worst = torch.stack([self.bad, self.first_bad, self.norm])
        bad, first_bad, norm = self.ranks.maximum(worst).tolist()
        self._reset()
        return Reading(_ratio(total, finite), norm, int(bad), int(first_bad) if bad else None, parts)

    def _reset(self) -> None:
        device = self.ranks.device
        self.sums = torch.zeros(2, device=device)
        self.bad = torch.zeros((), device=device)
        self.first_bad = torch.full((), -1.0, device=device)
        self.norm = torch.zeros((), device=device)
        self.parts = {}
        self.updates = 0


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
