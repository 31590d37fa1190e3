"""Rows that diverge in a division by almost zero."""

from dataclasses import dataclass

from torch import Tensor

# Positive rows have Σ|w| = 1, signed rows a little more. A divisor near zero gives far larger values.
DIVERGED_MASS = 1e3


@dataclass
class Divergence:
    """Counts rows that are not finite or have Σ|w| above DIVERGED_MASS. They stay in every mean."""

    rows: int = 0
    diverged: int = 0

    def add(self, weights: Tensor) -> None:
        """weights (…, rows, N)"""
        mass = weights.abs().sum(-1)
        self.rows += mass.numel()
        self.diverged += int((~(mass <= DIVERGED_MASS)).sum())  # NaN compares false
