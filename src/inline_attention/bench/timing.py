"""Timing. Contenders are timed in turn, so that a drifting clock or a busy machine affects all of them alike."""

import math
import os
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
        """The timing of one call, if `calls` of them were timed together."""
        return Timing(self.median / calls, self.low / calls, self.high / calls, self.samples)


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 11  # samples of each contender, at least two
    seconds: float = 0.1  # a sample takes at least this long

    @classmethod
    def choose(cls, *, quick: bool) -> "Effort":
        return cls(rounds=5, seconds=0.03) if quick else cls()

    def for_latency(self) -> "Effort":
        """Four times the samples, because the time of a single image varies more: the host dominates it."""
        return replace(self, rounds=4 * self.rounds)


def sample(call: Call, *, device: torch.device, repeats: int) -> float:
    """Seconds a call, over `repeats` calls in a row. A GPU runs asynchronously; CUDA is timed by events."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats
    _wait_for(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait_for(device)
    return (time.perf_counter() - begin) / repeats


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def measure(calls: Mapping[str, Call], *, device: torch.device, effort: Effort) -> dict[str, Timing | str]:
    """Each call's timing, or the error that stopped it.

    Rounds are interleaved: one sample of each call, then the next round, which begins with another call, so that no
    call always comes first. The first round is warm-up.
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
                if i == 0:  # warm-up, which also shows how many calls make a sample
                    sample(call, device=device, repeats=2)
                    once = sample(call, device=device, repeats=2)
                    repeats[name] = min(10_000, max(1, math.ceil(effort.seconds / max(once, 1e-9))))
                else:
                    samples[name].append(sample(call, device=device, repeats=repeats[name]))
            except Exception as error:  # such as out of memory: keep the results of the others
                outcome[name] = describe_error(error)
        order.rotate(-1)
    return {name: outcome.get(name) or Timing.of(samples[name]) for name in calls}


def describe_error(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def synchronised(call: Call, device: torch.device) -> Call:
    """A call that waits for its own completion: latency rather than throughput."""
    if device.type == "cpu":
        return call

    def run() -> None:
        call()
        _wait_for(device)

    return run


def host_seconds(call: Call, device: torch.device, *, calls: int = 50) -> float:
    """Median time until a call returns, each on an idle device: what Python and the launches take."""
    samples = []
    for _ in range(calls):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def captured(calls: Sequence[Call]) -> Call:
    """A CUDA graph of the calls, one after the other: the kernels alone, without the cost of Python and of launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles kernels and creates handles, which is not allowed during a capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph.replay


@dataclass(frozen=True)
class Kernel:
    """A kernel in one call, over all its launches. On a CPU: an operator, without the operators it calls."""

    name: str
    seconds: float
    launches: float

    @classmethod
    def of(cls, name: str, *, seconds: float, launches: int, calls: int) -> "Kernel":
        """From the events of a profiler over `calls` calls.

        The profiler loses some of the first launches on a GPU (pytorch/pytorch#192021). Launches are therefore rounded
        to a whole number a call, unless there are fewer than one.
        """
        each = round(launches / calls) or launches / calls
        return cls(name, seconds / launches * each, each)


def profiled(call: Call, *, device: torch.device, calls: int) -> list[Kernel]:
    """The kernels of a call that has run before, the longest first."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:  # an operator that only launches kernels has no time of its own
            kernels.append(Kernel.of(event.key, seconds=microseconds / 1e6, launches=event.count, calls=calls))
    if not kernels:
        raise RuntimeError(f"PyTorch's profiler saw no kernel in {calls} calls")
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Peak bytes that a call allocates. None without allocator statistics."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def allocated_bytes(call: Call) -> int:
    """Peak memory of a call on a CPU, from the profiler's events. The CPU allocator keeps no statistics."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = most = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def copy_bandwidth(device: torch.device, *, effort: Effort) -> float:
    """Bytes read and written per second by a large copy, the upper limit for code that only moves memory."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure({"copy": lambda: target.copy_(source)}, device=device, effort=effort)["copy"]
    if isinstance(timing, str):
        raise ValueError(f"cannot copy {size / 2**20:.0f} MiB on {device}: {timing}")
    return 2 * size / timing.median
