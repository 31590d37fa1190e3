"""What the three attentions cost in one model, DeiT-T, against resolution: counted, and measured on this machine."""

import functools
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from inline_attention.bench.timing import Timing, sample
from inline_attention.models import create_model
from inline_attention.models.profile import profile

from .gate import Busy, Gate
from .subjects import DEIT_TINY

SIZES = (224, 384, 640, 1024)  # those of the paper's figure
ROUNDS = 5
SAMPLE_SECONDS = 0.03  # short calls are repeated until they fill it
MEASURE_SECONDS = 120.0  # then a measurement ends, with what it has


@dataclass(frozen=True)
class Counts:
    kind: str
    size: int
    tokens: int
    macs: int
    activation_bytes: int  # what training keeps of one image, with neither checkpointing nor a fused kernel


@functools.cache
def count(kind: str, size: int) -> Counts:
    name, arguments = DEIT_TINY[kind]
    with torch.device("meta"):
        model = create_model(name, **arguments)
    stages = profile(model, img_size=(size, size))
    (tokens,) = (stage.shape[0] for stage in stages if stage.name == "blocks")
    return Counts(kind, size, tokens, sum(s.macs for s in stages), sum(s.activation_bytes for s in stages))


def counts() -> list[dict[str, Any]]:
    return [asdict(count(kind, size)) for size in SIZES for kind in DEIT_TINY]


class Stopwatch:
    """Times a forward pass of one image through each model. One measurement at a time: two would disturb each other."""

    def __init__(self, device: torch.device, gate: Gate) -> None:
        self._device, self._gate = device, gate
        self._measuring = threading.Lock()

    def measure(self, sizes: tuple[int, ...] = SIZES, *, seconds: float = MEASURE_SECONDS) -> Iterator[dict[str, Any]]:
        """Progress, and each timing as it gets better. Whoever stops asking for more ends the measurement.

        The first value comes when the measurement has begun; `Busy` is raised in its place while another runs.
        """
        if not self._measuring.acquire(blocking=False):
            raise Busy("somebody else is measuring now, and two measurements would disturb each other; try again soon")
        try:
            total = len(sizes) * len(DEIT_TINY) * (ROUNDS + 1)
            yield dict(done=0, total=total)
            yield from self._rounds(sizes, total=total, deadline=time.monotonic() + seconds)
        finally:
            self._measuring.release()

    def _rounds(self, sizes: tuple[int, ...], *, total: int, deadline: float) -> Iterator[dict[str, Any]]:
        with self._gate.turn():
            models = {kind: create_model(name, **arguments) for kind, (name, arguments) in DEIT_TINY.items()}
        calls = {kind: model.to(self._device).eval() for kind, model in models.items()}
        done = 0
        for size in sizes:
            image = torch.randn(1, 3, size, size, device=self._device)
            repeats: dict[str, int] = {}
            samples: dict[str, list[float]] = {kind: [] for kind in calls}
            for i in range(ROUNDS + 1):
                for kind, model in calls.items():
                    if time.monotonic() > deadline:
                        yield dict(done=done, total=total, stopped="out of time: this machine needs longer than allowed")
                        return
                    with self._gate.turn(), torch.inference_mode():
                        if i == 0:  # warm-up, and how many calls make a sample
                            model(image)
                            once = sample(lambda: model(image), device=self._device, repeats=1)
                            repeats[kind] = max(1, math.ceil(SAMPLE_SECONDS / once))
                        else:
                            call = functools.partial(model, image)
                            samples[kind].append(sample(call, device=self._device, repeats=repeats[kind]))
                    done += 1
                    progress: dict[str, Any] = dict(done=done, total=total)
                    if len(samples[kind]) >= 2:
                        progress |= dict(kind=kind, size=size, **asdict(Timing.of(samples[kind])))
                    yield progress
