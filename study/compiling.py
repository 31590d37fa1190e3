"""What runs have compiled, kept for all others of their model.

Runs of one model differ in their seed, rate, or length, which is not compiled. So the first of them compiles alone, and
the others start when it has written its first record. Each then finds the kernels in the folder of the runs, in later
calls too.
"""

import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO

FOLDER = ".compiled"  # in the folder of the runs
POLL_SECONDS = 0.5
INTERRUPTED = 130  # the exit status of a command that was interrupted


class CompileCache:
    def __init__(self, out: Path) -> None:
        self.folder = (out / FOLDER).resolve()
        self.closed = False  # True: nothing starts any more
        self._compiling: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def environment(self) -> dict[str, str]:
        """Of a process that shares its kernels. PyTorch may have set a folder of its own in this process."""
        folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        return {**os.environ, **{name: str(self.folder / part) for name, part in folders.items()}}

    def has(self, model: str) -> bool:
        return (self.folder / model).exists()

    def add(self, model: str) -> None:
        """Note that a run of this model has compiled."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / model).touch()

    def run(self, arguments: Sequence[str], *, model: str, metrics: Path, log: IO[bytes]) -> int:
        """The exit status of a process, which waits until no other thread compiles the model.

        metrics: the file of its first record.
        """
        with self._compiling[model]:
            if self.closed:
                return INTERRUPTED
            before = written(metrics)
            process = subprocess.Popen(arguments, stdout=log, stderr=log, env=self.environment())
            while not self.has(model) and process.poll() is None:
                if written(metrics) > before:
                    self.add(model)
                time.sleep(POLL_SECONDS)
        return process.wait()


def written(path: Path) -> float:
    """The time of the last change of a file. 0: there is none."""
    return path.stat().st_mtime if path.exists() else 0.0
