"""One process at a time trains in a folder."""

import errno
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import training_runs as _runs

from inline_attention.training import lock as _lock
from inline_attention.training.lock import FileLock
from inline_attention.training.run_folder import LOCK


def hold(path: Path, held: Path) -> None:
    """In a process of its own: takes a lock and keeps it."""
    assert FileLock(path).take()
    held.touch()
    time.sleep(600)


def train(argv: list[str], log: Path) -> None:
    """In a process of its own, with data loader workers that are forked from it, as a command's are."""
    multiprocessing.set_start_method("fork", force=True)
    sys.exit(_runs.inline(argv, log=log))


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    path, held = tmp_path / "lock", tmp_path / "held"
    process = _runs.processes.Process(target=hold, args=(path, held), daemon=True)
    process.start()
    while process.is_alive() and not held.exists():
        time.sleep(0.001)
    lock = FileLock(path)
    assert not lock.take()
    assert lock.holder().startswith(f"{process.pid} on ")
    process.kill()
    process.join()
    assert lock.take()
    assert lock.take()  # has it
    assert lock.holder().startswith(f"{os.getpid()} on ")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_lock.fcntl, "lockf", refuse)
    with FileLock(tmp_path / "lock") as first, FileLock(tmp_path / "lock") as second:
        assert first.take()
        assert second.take()


def test_a_second_process_is_refused_and_a_dead_one_is_followed_at_once(tmp_path: Path) -> None:
    """The killed process leaves a data loader worker running for a few seconds."""
    output, log, refused = tmp_path / "run", tmp_path / "log.txt", tmp_path / "refused.txt"
    long = _runs.arguments(output, "schedule.epochs=1000", "checkpoint.every_steps=3", "data.workers=1",
                           "data.in_memory=false", "--resume=auto")  # fmt: skip
    first = _runs.processes.Process(target=train, args=(long, log))
    first.start()
    while first.is_alive() and not list((output / "checkpoints").glob("step-*")):
        time.sleep(0.001)
    try:
        before = (output / "environment.json").read_bytes()
        assert _runs.run(long, log=refused) == 2
        assert f"another process (PID {first.pid} on " in refused.read_text()
        assert f"trains in {output}: wait for it" in refused.read_text()
        assert (output / "environment.json").read_bytes() == before
        assert first.is_alive(), log.read_text()
    finally:
        os.kill(first.pid or 0, signal.SIGKILL)
        first.join()
    with FileLock(output / LOCK) as lock:
        assert lock.take()
    short = ["train", f"--resume={output}", "schedule.epochs=1", "data.workers=0"]
    assert _runs.run(short, log=log) == 0, log.read_text()[-2000:]
