"""The learning rate as a function of the step."""

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "poly", "step"]


@dataclass(frozen=True)
class Schedule:
    """Warm-up from `warmup_rate` to `peak`, decay to `minimum` until `decay_steps`, cool-down at `minimum`.

    The warm-up replaces the first steps of the decay, as published (timm's `warmup_prefix=False`). Cosine and
    polynomial count from step 0, so the rate after the warm-up is slightly below the peak.
    """

    kind: ScheduleKind
    peak: float
    warmup_rate: float
    minimum: float
    warmup_steps: int
    decay_steps: int
    cooldown_steps: int
    drop_every: int  # step schedule: steps between two drops
    drop_factor: float
    drop_at: tuple[int, ...] = ()  # step schedule: drops at these steps instead
    power: float = 1.0  # of the polynomial

    @property
    def total_steps(self) -> int:
        return self.decay_steps + self.cooldown_steps

    def rate(self, step: int) -> float:
        """The rate of update `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.warmup_rate + (self.peak - self.warmup_rate) * step / self.warmup_steps
        if step >= self.decay_steps:
            return self.minimum
        if self.kind == "cosine":
            cosine = math.cos(math.pi * step / self.decay_steps)
            return self.minimum + (self.peak - self.minimum) * (1 + cosine) / 2
        if self.kind == "linear":
            done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
            return self.peak + (self.minimum - self.peak) * done
        if self.kind == "poly":
            return self.minimum + (self.peak - self.minimum) * (1 - step / self.decay_steps) ** self.power
        drops = sum(step >= drop for drop in self.drop_at) if self.drop_at else step // self.drop_every
        return max(self.peak * self.drop_factor**drops, self.minimum)
