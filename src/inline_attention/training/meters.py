"""What the loop measures, kept on the device between two looks at it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.training.distributed import Ranks


@dataclass(frozen=True)
class Reading:
    loss: float  # mean over the updates and all ranks; NaN: none was finite
    grad_norm: float  # of the last update
    bad_steps: int  # updates that were left out, since the last reading
    first_bad: int | None  # how many updates after the last reading the first of them came
    parts: dict[str, float]  # means of the loss's parts, where there are several


class DeviceMeter:
    """Sums over updates; nothing is read until `read`, the only place where the host waits for the device.

    It keeps no tensor that it is given: the next update may compute into the same memory.
    """

    sums: Tensor  # (2,) finite losses and their number
    bad: Tensor  # () updates left out
    first_bad: Tensor  # () number of the first of them, −1: none
    norm: Tensor  # () of the last update
    parts: dict[str, Tensor]  # () sums of each part of the loss over the updates with a finite loss
    updates: int

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._reset()

    def add(self, loss: Tensor, norm: Tensor, *, bad: Tensor, parts: Mapping[str, Tensor]) -> None:
        """loss (): this rank's mean over the update; norm (): the gradient's; bad (): the update was left out.

        parts: what the loss is the sum of, where that is worth a record; the same names on every rank.
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
        """Since the last call, over all ranks; called on every rank."""
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
