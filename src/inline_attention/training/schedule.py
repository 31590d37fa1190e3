"""The learning rate as a function of the update."""

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "poly", "step", "wsd", "plateau"]


@dataclass(frozen=True)
class Schedule:
    """Warm-up from `warmup_rate` to `peak`, decay to `minimum` until `decay_steps`, cool-down at `minimum`.

    The warm-up replaces the first steps of the decay, as published (timm's `warmup_prefix=False`). Cosine and
    polynomial count from step 0, so the rate after the warm-up is slightly below the peak. "wsd" (warm-up, stable,
    decay) stays at the peak and falls in a line at the end. "plateau" falls when the evaluations no longer improve.
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
    falling_steps: int = 0  # wsd: steps of the decay

    @property
    def total_steps(self) -> int:
        return self.decay_steps + self.cooldown_steps

    def rate(self, step: int, *, plateaus: int = 0) -> float:
        """The rate of update `step`, counted from 0. plateaus: how often the evaluations stopped improving."""
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
        if self.kind == "wsd":
            left = (self.decay_steps - step) / max(1, self.falling_steps)
            return self.minimum + (self.peak - self.minimum) * min(1.0, left)
        if self.kind == "plateau":
            return max(self.peak * self.drop_factor**plateaus, self.minimum)
        drops = sum(step >= drop for drop in self.drop_at) if self.drop_at else step // self.drop_every
        return max(self.peak * self.drop_factor**drops, self.minimum)
