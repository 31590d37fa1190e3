"""SIGTERM and SIGINT as requests to stop after the current update."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A signal handler that remembers the signal."""

    number: int = 0  # the signal that was received; 0: none

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt  # the second Ctrl-C stops at once, without saving
        self.number = number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handle the signals inside the block. Outside the main thread, where Python forbids it, nothing is handled."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request) for number in STOP_SIGNALS}
    try:
        with _blocked_in_children():
            yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _blocked_in_children() -> Iterator[None]:
    """Processes started inside the block, such as data loader workers, block the signals.

    A scheduler or a terminal signals every process of a job. If workers stopped, the current update could not finish. A
    child inherits the signal mask of the thread that starts it. So the main thread blocks the signals, and an idle
    thread receives them. Python still runs the handlers in the main thread.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where a signal reaches a single process
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
