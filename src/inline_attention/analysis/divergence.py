"""Rows that a division by almost zero has blown up."""

from dataclasses import dataclass

from torch import Tensor

# A row of shares has Σ|w| = 1 and a signed one some more; a sum near zero in a divisor leaves no doubt.
DIVERGED_MASS = 1e3


@dataclass
class Divergence:
    """How many rows are not finite, or have Σ|w| above DIVERGED_MASS; they stay in every mean."""

    rows: int = 0
    diverged: int = 0

    def add(self, weights: Tensor) -> None:
        """weights (…, rows, N)"""
        mass = weights.abs().sum(-1)
        self.rows += mass.numel()
        self.diverged += int((~(mass <= DIVERGED_MASS)).sum())  # NaN compares false
