"""The cost of DeiT-T with each of the three attentions over resolution, counted and timed on this machine."""

import functools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from inline_attention.bench.timing import Timing, sample
from inline_attention.models import create_model
from inline_attention.models.base import VisionModel
from inline_attention.models.profile import profile

from .gate import Busy, Gate
from .subjects import DEIT_TINY

SIZES = (224, 384, 640, 1024)  # those of the paper's figure
ROUNDS = 5
SAMPLE_SECONDS = 0.03  # short calls are repeated for this long
MEASURE_SECONDS = 120.0  # limit of a measurement; results so far are kept


@dataclass(frozen=True)
class Counts:
    kind: str
    size: int
    tokens: int
    macs: int
    activation_bytes: int  # kept for the backward pass of one image, without checkpointing


def deit_tiny(kind: str) -> VisionModel:
    name, arguments = DEIT_TINY[kind]
    model = create_model(name, **arguments)
    assert isinstance(model, VisionModel)
    return model.eval()


@functools.cache
def count(kind: str, size: int) -> Counts:
    with torch.device("meta"):
        stages = profile(deit_tiny(kind), img_size=(size, size))
    (tokens,) = (stage.shape[0] for stage in stages if stage.name == "blocks")
    return Counts(kind, size, tokens, sum(s.macs for s in stages), sum(s.activation_bytes for s in stages))


def counts() -> list[dict[str, Any]]:
    return [asdict(count(kind, size)) for size in SIZES for kind in DEIT_TINY]


class Stopwatch:
    """Times a forward pass of one image through each model. One measurement at a time: two would disturb each other."""

    def __init__(self, device: torch.device, gate: Gate) -> None:
        self._device, self._gate = device, gate
        self._measuring = threading.Lock()

    def measure(self, sizes: Sequence[int], *, seconds: float = MEASURE_SECONDS) -> Iterator[dict[str, Any]]:
        """Yield progress, and the timing of a model after every sample. Closing the iterator ends the measurement.

        The first value comes before anything is measured. If another measurement runs, `Busy` is raised instead.
        """
        if not self._measuring.acquire(blocking=False):
            raise Busy("another measurement is running, and two would disturb each other; try again soon")
        try:
            done, total = 0, len(sizes) * len(DEIT_TINY) * (ROUNDS + 1)
            yield dict(done=done, total=total)
            deadline = time.monotonic() + seconds
            try:
                for timing in self._samples(sizes):
                    done += 1
                    yield dict(done=done, total=total, **timing)
                    if time.monotonic() > deadline and done < total:
                        raise Busy(f"the time for a measurement, {seconds:.0f} seconds, is over")
            except Busy as error:
                yield dict(done=done, total=total, stopped=f"Ended early: {error}. The results so far are kept.")
        finally:
            self._measuring.release()

    def _samples(self, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The timing after each sample, empty until there are two. Others may compute between samples."""
        with self._gate.turn():
            models = {kind: deit_tiny(kind).to(self._device) for kind in DEIT_TINY}
        for size in sizes:
            with self._gate.turn():
                image = torch.randn(1, 3, size, size, device=self._device)
            calls = {kind: functools.partial(model, image) for kind, model in models.items()}
            repeats: dict[str, int] = {}
            samples: dict[str, list[float]] = {kind: [] for kind in calls}
            for i, (kind, call) in product(range(ROUNDS + 1), calls.items()):
                with self._gate.turn(), torch.inference_mode():
                    if i == 0:  # warm-up, and how many calls make a sample
                        call()
                        once = sample(call, device=self._device, repeats=1)
                        repeats[kind] = max(1, math.ceil(SAMPLE_SECONDS / once))
                    else:
                        samples[kind].append(sample(call, device=self._device, repeats=repeats[kind]))
                enough = len(samples[kind]) >= 2
                yield dict(kind=kind, size=size, **asdict(Timing.of(samples[kind]))) if enough else {}
