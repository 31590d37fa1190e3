"""Limits how many computations run and wait. One runs at a time, because PyTorch uses all cores."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet


class Busy(Exception):
    """Too many computations are requested. The text is shown to the user."""


class Gate:
    """`running` computations run, and `waiting` others wait for at most `seconds`. Any other raises `Busy`."""

    def __init__(self, *, running: int = 1, waiting: int, seconds: float = 60.0) -> None:
        self._running, self._seconds = running, seconds
        self._places = threading.BoundedSemaphore(running + waiting)
        self._turns = threading.BoundedSemaphore(running)
        self._threads: WeakSet[threading.Thread] = WeakSet()  # had a turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise Busy("too many people are computing here at once; try again in a moment")
        try:
            if not self._turns.acquire(timeout=self._seconds):
                raise Busy(f"no turn came within {self._seconds:.0f} seconds; try again later")
            try:
                self._threads.add(threading.current_thread())
                yield
            finally:
                self._turns.release()
        finally:
            self._places.release()

    def close(self) -> None:
        """Wait for running computations, and start no others.

        A thread that is inside PyTorch when the interpreter ends would abort the process. A thread whose turn is over
        may still be freeing its tensors, so wait for the threads too.
        """
        for _ in range(self._running):
            self._turns.acquire(timeout=self._seconds)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
