"""The base class of the parts of the soak."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

MIB = 2**20


class Part(ABC):
    """Numbered cases. The seed and the number determine a case.

    A chunk of cases runs in its own process, which creates an instance, runs the cases and closes the instance.
    """

    name: ClassVar[str]
    what: ClassVar[str]  # the row of the table
    promise: ClassVar[str]  # what every case checks
    count: ClassVar[int]  # how often a full soak tries
    per_case: ClassVar[int] = 1  # how many of `count` one case makes
    per_chunk: ClassVar[int]  # cases
    patience: ClassVar[float] = 60.0  # seconds after which a case counts as hung
    spare_memory: ClassVar[int | None] = None  # bytes that a chunk may take beyond what it began with

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder

    @abstractmethod
    def run(self, case: int) -> Mapping[str, int]:
        """Runs a case and returns counts of its outcomes by name. Raises an error if the promise is broken."""

    def close(self) -> Mapping[str, float]:
        """Ends the chunk. Returns measurements by name. The record has the largest over all chunks."""
        return {}

    def draw(self, case: int) -> random.Random:
        return random.Random(f"{self.name} {self.seed} {case}")
