"""Measures settings whose models compile side by side.

Compiling takes most of a benchmark, and little of a GPU. So several processes prepare a setting each. When all of them
are ready, they are timed one after the other, while the others wait.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from .model import ModelResult, Setting, failed_results, run_setting

READY = "ready"


def run_settings(
    settings: Sequence[Setting], *, jobs: int, log: Callable[[str], None], **options: Any
) -> Iterator[list[ModelResult]]:
    """The results of each setting, in order.

    Args:
        jobs: settings that are prepared at a time. Their models are in memory together.
        options: of `run_setting`.
    """
    if jobs == 1:
        for setting in settings:
            yield run_setting(setting, log=log, **options)
        return
    for first in range(0, len(settings), jobs):
        workers = [Worker(setting, options) for setting in settings[first : first + jobs]]
        try:
            for worker in workers:
                worker.wait_until_ready(log)
            for worker in workers:
                yield worker.results(log)
        finally:
            for worker in workers:
                worker.process.terminate()


class Worker:
    """A process that measures one setting."""

    def __init__(self, setting: Setting, options: dict[str, Any], work: Callable[..., None] | None = None) -> None:
        self.setting, self.options = setting, options
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self.connection, connection = context.Pipe()
        arguments = (connection, setting, torch.get_num_threads(), options)
        self.process = context.Process(target=work or _measure, args=arguments, daemon=True)
        self.process.start()
        connection.close()  # so that the end of the process is noticed

    def wait_until_ready(self, log: Callable[[str], None]) -> None:
        with contextlib.suppress(EOFError):  # `results` reports it
            while (message := self.connection.recv()) != READY:
                log(message)

    def results(self, log: Callable[[str], None]) -> list[ModelResult]:
        try:
            self.connection.send(READY)
            while isinstance(message := self.connection.recv(), str):
                log(message)
        except (EOFError, OSError):
            self.process.join()
            error = f"its process ended with exit status {self.process.exitcode}"
            log(f"failed: {self.setting}: {error}")
            return failed_results(self.setting, error, self.options["contenders"], self.options["modes"])
        found: list[ModelResult] = message
        return found


def _measure(connection: Connection, setting: Setting, threads: int, options: dict[str, Any]) -> None:
    """What a process does: sends lines of text, READY, and after an answer the results."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    torch.set_num_threads(threads)
    device = options["device"]
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)

    def wait() -> None:
        connection.send(READY)
        connection.recv()

    connection.send(run_setting(setting, log=connection.send, before_timing=wait, **options))
