"""Clocks: contenders timed in turn, so that drifting clocks and neighbours on the machine touch all of them alike."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median and quartiles of the samples."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))

    def shared(self, calls: int) -> "Timing":
        """Of one of `calls` that were timed as one."""
        return Timing(self.median / calls, self.low / calls, self.high / calls, self.samples)


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 11  # samples a contender, two at least
    seconds: float = 0.1  # at least so long a sample

    @classmethod
    def choose(cls, *, quick: bool) -> "Effort":
        return cls(rounds=5, seconds=0.03) if quick else cls()

    def for_latency(self) -> "Effort":
        """Four times the samples: one image takes as long as the host does, and hosts are restless."""
        return replace(self, rounds=4 * self.rounds)


def sample(call: Call, *, device: torch.device, repeats: int) -> float:
    """Seconds a call, of `repeats` in a row: between events on a GPU, which runs behind the clock on the wall."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def measure(calls: Mapping[str, Call], *, device: torch.device, effort: Effort) -> dict[str, Timing | str]:
    """Each call's timing, or the error that stopped it.

    Rounds are interleaved: one sample of each, then the next round, which begins with another call, so that none has
    the better place. The first round is warm-up.
    """
    outcome: dict[str, Timing | str] = {}
    repeats: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = deque(calls)
    for i in range(effort.rounds + 1):
        for name in order:
            if name in outcome:
                continue
            call = calls[name]
            try:
                if i == 0:  # warm-up, and how many calls make a sample
                    sample(call, device=device, repeats=2)
                    once = sample(call, device=device, repeats=2)
                    repeats[name] = min(10_000, max(1, math.ceil(effort.seconds / max(once, 1e-9))))
                else:
                    samples[name].append(sample(call, device=device, repeats=repeats[name]))
            except Exception as error:  # out of memory, say: the others' figures are not lost
                outcome[name] = describe_error(error)
        order.rotate(-1)
    return {name: outcome.get(name) or Timing.of(samples[name]) for name in calls}


def describe_error(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def synchronised(call: Call, device: torch.device) -> Call:
    """The call and its completion: latency rather than throughput."""
    if device.type != "cuda":
        return call

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def captured(calls: Sequence[Call]) -> Call:
    """A CUDA graph that makes the calls in turn: kernels alone, without what Python and launches cost."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles kernels and creates handles, which a capture must not
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph.replay


@dataclass(frozen=True)
class Kernel:
    """Of one call: what a kernel (on a CPU an operator, less what it calls) takes in all its launches."""

    name: str
    seconds: float
    launches: float

    @classmethod
    def of(cls, name: str, *, seconds: float, launches: int, calls: int) -> "Kernel":
        """From what a profiler saw in `calls` calls.

        It loses some of the first launches on a GPU (pytorch/pytorch#192021). A call has a whole number of them, unless
        they are rare.
        """
        each = round(launches / calls) or launches / calls
        return cls(name, seconds / launches * each, each)


def profiled(call: Call, *, device: torch.device, calls: int) -> list[Kernel]:
    """The kernels of a call that has been made before, those that take longest first."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:  # what only launches kernels has none
            kernels.append(Kernel.of(event.key, seconds=microseconds / 1e6, launches=event.count, calls=calls))
    if not kernels:
        raise RuntimeError(f"PyTorch's profiler saw no kernel in {calls} calls")
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Bytes that a call needs beyond what is allocated before it; None where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(device: torch.device, *, effort: Effort) -> float:
    """Bytes read plus bytes written a second, by a large copy: the ceiling of what only moves memory."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure({"copy": lambda: target.copy_(source)}, device=device, effort=effort)["copy"]
    if isinstance(timing, str):
        raise ValueError(f"cannot copy {size / 2**20:.0f} MiB on {device}: {timing}")
    return 2 * size / timing.median
