"""SIGTERM and SIGINT as a request to stop at the next update."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
    previous = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
