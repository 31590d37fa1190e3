"""SIGTERM and SIGINT as a request to stop at the next update."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    number: int = 0  # of the signal; 0: none came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt  # asked twice: at once, without saving
        self.number = number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handlers inside the block. Python allows them in the main thread alone; elsewhere nothing is caught."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request) for number in STOP_SIGNALS}
    try:
        with _children_spared():
            yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _children_spared() -> Iterator[None]:
    """Processes started inside are not stopped by the signals that this one saves its state for.

    A scheduler or a terminal signals every process of a job, data loader workers too, whose death would end the update
    that is to be finished first. They inherit what their starting thread blocks, so the main thread blocks the signals,
    and a thread that does nothing else takes them: Python runs the handler in the main thread all the same.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where signals reach no other process
        yield
        return
    over = threading.Event()
    receiver = threading.Thread(target=over.wait, name="stop signals", daemon=True)
    receiver.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
        receiver.join()
