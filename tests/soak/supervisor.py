"""Runs chunks of cases in processes, several at a time, and notices those that crash or hang."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from training_runs import processes

from .part import Part
from .record import Failure, State
from .worker import LOG, Began, Closed, Ended, Failed, run_chunk


@dataclass
class Chunk:
    """Cases that share a process. If a case crashes or hangs, a new process runs the rest."""

    part: type[Part]
    number: int
    cases: list[int]  # those still to be run
    outcomes: Counter[str] = field(default_factory=Counter)
    measured: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    done: int = 0
    began: float = 0.0
    current: int | None = None
    since: float = 0.0  # when the process last sent a message
    is_hung: bool = False


def chunks_of(part: type[Part], state: State) -> Iterator[Chunk]:
    """The chunks that are not in the state yet."""
    for number, first in enumerate(range(0, state.cases, part.per_chunk)):
        if number not in state.chunks_done:
            yield Chunk(part, number, list(range(first, min(first + part.per_chunk, state.cases))))


def run(
    parts: Sequence[tuple[type[Part], State]],
    *,
    folder: Path,
    jobs: int,
    show: Callable[[dict[str, int]], None] = lambda done: None,
) -> None:
    """Runs every missing chunk. The state is saved in `folder` after each, so that an interrupted run can continue.

    Args:
        show: called now and then with the number of cases done, by part.
    """
    states = {part.name: state for part, state in parts}
    waiting = [chunk for part, state in parts for chunk in chunks_of(part, state)]
    running: dict[Connection, tuple[BaseProcess, Chunk, Path]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                chunk = waiting.pop(0)
                pipe, process, scratch = _start(chunk, seed=states[chunk.part.name].seed)
                running[pipe] = process, chunk, scratch
            for ready in wait(list(running), timeout=1.0):
                assert isinstance(ready, Connection)
                process, chunk, scratch = running[ready]
                try:
                    _note(chunk, ready.recv())
                except EOFError:
                    _end(process)
                    if chunk.cases and not chunk.is_hung:
                        printed = (
                            (scratch / LOG).read_text(errors="replace")[-1000:] if (scratch / LOG).exists() else ""
                        )
                        _fail_current(chunk, f"{printed}\nthe process ended with status {process.exitcode}")
                    shutil.rmtree(scratch, ignore_errors=True)
                    del running[ready]
                    _finish(chunk, states[chunk.part.name], folder, waiting)
            for process, chunk, _ in running.values():
                if time.monotonic() - chunk.since > chunk.part.patience:
                    _fail_current(chunk, f"hung: no answer within {chunk.part.patience:.0f} seconds")
                    chunk.since, chunk.is_hung = time.monotonic(), True
                    _end(process)  # its pipe closes, and the rest of the chunk gets another process
            done = {name: state.cases_done for name, state in states.items()}
            for _, chunk, _ in running.values():
                done[chunk.part.name] += chunk.done
            show(done)
    finally:
        for process, _, scratch in running.values():
            _end(process)
            shutil.rmtree(scratch, ignore_errors=True)


def _start(chunk: Chunk, *, seed: int) -> tuple[Connection, BaseProcess, Path]:
    scratch = Path(tempfile.mkdtemp(prefix=f"soak-{chunk.part.name}-"))
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=run_chunk, args=(chunk.part, seed, chunk.cases, scratch, theirs))
    process.start()
    theirs.close()
    chunk.since = time.monotonic()
    chunk.began = chunk.began or chunk.since
    return ours, process, scratch


def _note(chunk: Chunk, message: Began | Ended | Failed | Closed) -> None:
    chunk.since = time.monotonic()
    match message:
        case Began(case):
            chunk.current = case
        case Ended(case, outcome):
            chunk.outcomes.update(outcome)
            _tick_off(chunk, case)
        case Failed(case, text):
            chunk.failures.append(Failure(case, text[-1500:]))
            _tick_off(chunk, case)
        case Closed(measured):
            chunk.measured |= measured
            chunk.cases.clear()


def _tick_off(chunk: Chunk, case: int) -> None:
    if case in chunk.cases:  # closing a chunk may fail after its last case has ended
        chunk.cases.remove(case)
        chunk.done += 1


def _fail_current(chunk: Chunk, text: str) -> None:
    case = chunk.cases[0] if chunk.current is None else chunk.current
    chunk.failures.append(Failure(case, text))
    _tick_off(chunk, case)


def _finish(chunk: Chunk, state: State, folder: Path, waiting: list[Chunk]) -> None:
    if chunk.cases:
        chunk.current, chunk.is_hung = None, False
        waiting.insert(0, chunk)
        return
    state.add(outcomes=chunk.outcomes, measured=chunk.measured, failures=chunk.failures)
    state.chunks_done.append(chunk.number)
    state.cases_done += chunk.done
    state.seconds += time.monotonic() - chunk.began
    state.save(folder)


def _end(process: BaseProcess) -> None:
    """Ends the process and its children. SIGTERM comes first, so that it can end children outside its group."""
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, number)
        process.join(patience)
        if process.exitcode is not None:
            return
