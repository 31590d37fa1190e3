"""What a part of the soak is."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

MIB = 2**20


class Part(ABC):
    """Numbered cases, each of them a function of the seed and its number.

    A chunk of cases runs in a process of its own: an instance is made there, runs the chunk's cases and is closed.
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
        """How the case came out, as counts by name. Raises where the promise was broken."""

    def close(self) -> Mapping[str, float]:
        """Ends the chunk. Returns measurements by name, of which the largest of all chunks is reported."""
        return {}

    def draw(self, case: int) -> random.Random:
        return random.Random(f"{self.name} {self.seed} {case}")
