"""The process of one chunk: creates the part, runs its cases, and reports each to the supervisor."""

import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from .part import MIB, Part


@dataclass
class Began:
    case: int


@dataclass
class Ended:
    case: int
    outcome: dict[str, int]


@dataclass
class Failed:
    case: int
    text: str


@dataclass
class Closed:
    measured: dict[str, float]


LOG = "output.txt"  # what a chunk prints, in its folder
Message = Began | Ended | Failed | Closed


def run_chunk(part: type[Part], seed: int, cases: Sequence[int], folder: Path, pipe: Connection) -> None:
    os.setsid()  # the supervisor handles Ctrl-C, and then ends this whole group
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # libraries write to them directly, not through Python
        os.dup2(log, stream)
    current = cases[0]
    try:
        trial = part(seed, folder)
        limit_memory(part.spare_memory)
        begin = peak_memory()
        for current in cases:
            pipe.send(Began(current))
            try:
                pipe.send(Ended(current, dict(trial.run(current))))
            except Exception:
                pipe.send(Failed(current, traceback.format_exc()))
        measured = dict(trial.close())
        if part.spare_memory is not None:
            grown = peak_memory() - begin
            assert grown < part.spare_memory, f"a chunk took {grown / MIB:.0f} MiB more than it began with"
            measured["most memory beyond the start, MiB"] = grown / MIB
        pipe.send(Closed(measured))
    except Exception:
        pipe.send(Failed(current, traceback.format_exc()))
        pipe.send(Closed({}))


def limit_memory(spare: int | None) -> None:
    """Makes far too large an allocation an error, so that it cannot exhaust the machine.

    The limit is on address space, of which allocators reserve more than they use. `peak_memory` is the real bound.
    """
    if spare is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 8 * spare
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
