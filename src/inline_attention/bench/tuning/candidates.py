"""Candidates beside what runs without them: compiled side by side, and timed in turn."""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from inline_attention.bench.op import in_turn
from inline_attention.bench.timing import Call, Effort, Timing, measure

LEAST_GAIN = 1.03  # a win by less is noise

# Relative to the norm of what the others compute. It finds wrong results, and passes those of bfloat16.
TOLERANCE = 0.1

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@contextlib.contextmanager
def workers(jobs: int, *, longest: float | None = None) -> Iterator[Map]:
    """`map` over so many processes, in order. A process takes the next item when it is done with one.

    `multiprocessing.TimeoutError` if a result takes longer than `longest` seconds.
    """
    if jobs == 1:
        yield map
        return
    with torch.multiprocessing.get_context("spawn").Pool(jobs, _start_worker) as pool:

        def mapped(f: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            results = pool.imap(f, items)
            with contextlib.suppress(StopIteration):
                while True:
                    yield results.next(longest)

        yield mapped


def _start_worker() -> None:
    import torch._inductor.config

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # it is one of many, and may not have children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it


def time_calls(
    each: Mapping[str, Callable[[], Sequence[Call]]], *, device: torch.device, effort: Effort, expected: object = None
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Timings of one call, and why others failed: they could not run, or did not compute what is expected.

    Args:
        each: makes the calls of a candidate on several inputs. All candidates have the same inputs.
        expected: the result of the first of these calls. By default that of the first candidate which runs.
    """
    calls: dict[str, Call] = {}
    made: dict[str, Sequence[Call]] = {}
    failed: dict[str, str] = {}
    captured = set()
    for name, make in each.items():
        try:
            some = make()
            found = some[0]()
            expected = found if expected is None else expected
            if reason := differs(found, expected):
                failed[name] = reason
                continue
            calls[name], in_graph = in_turn(some, device)
            made[name] = some
            captured.add(in_graph)
        except Exception as error:  # such as out of resources: the others are timed
            failed[name] = repr(error)[:200]
    if len(captured) == 2:  # a graph would win against launches from Python
        calls = {name: in_turn(some, torch.device("cpu"))[0] for name, some in made.items()}
    timings = measure(calls, device=device, effort=effort)
    passed = {name: t.shared(len(made[name])) for name, t in timings.items() if isinstance(t, Timing)}
    return passed, failed | {name: t for name, t in timings.items() if isinstance(t, str)}


def micros_of(timings: Mapping[str, Timing]) -> dict[str, float]:
    return {name: 1e6 * timing.median for name, timing in timings.items()}


def differs(found: object, expected: object) -> str | None:
    """How far tensors are from those they should be, or None if they are close."""
    for x, y in zip(_tensors_of(found), _tensors_of(expected), strict=True):
        x, y = x.detach().float(), y.detach().float()
        error = float((x - y).norm() / y.norm().clamp(min=1e-30))
        if not error <= TOLERANCE:  # NaN is not
            return f"wrong: differs from the others by {error:.2g} of the norm"
    return None


def _tensors_of(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


def best_of(micros: Mapping[str, float], base: str) -> str | None:
    """The fastest candidate; None if that cannot be known, because nothing ran or the base did not."""
    candidates = [name for name in micros if name != base]
    return min(candidates, key=lambda name: micros[name]) if candidates and base in micros else None
