"""Trains the runs of a grid, several at a time, each as its own `inline train`, until the time is up.

A run is finished when its folder has a summary. A stopped run continues from its checkpoint in the next call. Several
calls may share a grid: each skips the runs that another one is training.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from inline_attention.data import open_data
from inline_attention.data.streams import is_stream
from inline_attention.tasks.classification.config import load_config
from inline_attention.training.files import write_atomically
from inline_attention.training.lock import FileLock
from inline_attention.training.report import METRICS, SUMMARY
from inline_attention.training.run_folder import LOCK
from inline_attention.training.signals import STOP_SIGNALS
from study.compiling import CompileCache, written
from study.grid import DATASETS, RECIPE, Run, command_line, parse_name

SESSIONS = "sessions.jsonl"  # one line for each call: start, duration, jobs, finished runs
FAILURE = "failure.txt"  # of a run that ended without a result, such as a diverged one
LOG = "log.txt"
CLAIM = ".claim"  # locked by the call that trains the run, because its process locks the folder only after the start
WALL = "wall.json"  # seconds from start to end and until the first record, summed over the starts of a run
START_SECONDS = 60.0  # processes, images and compilation, if no run has finished here
STOP_SECONDS = 25.0  # time for a run to finish its update and save
STOPPED = {sign for number in STOP_SIGNALS for sign in (128 + number, -number)}  # <0: during its start
POLL_SECONDS = 0.5


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).exists()


def has_failed(folder: Path) -> bool:
    return (folder / FAILURE).exists() and not is_finished(folder)


def _wall(folder: Path) -> dict[str, float]:
    path = folder / WALL
    return json.loads(path.read_text()) if path.exists() else {}


@dataclass
class Outcome:
    finished: list[str] = field(default_factory=list)  # in this call
    failed: list[str] = field(default_factory=list)  # in this call or earlier
    elsewhere: list[str] = field(default_factory=list)  # being trained by another process
    left: list[str] = field(default_factory=list)  # all unfinished runs
    interrupted: bool = False


@dataclass
class _Job:
    run: Run
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    claim: FileLock
    started: float
    records: float  # last change of its metrics before the start; 0: never
    under_way: float | None = None  # seconds from the start to the first record
    stopped: bool = False  # by this call


class GridRunner:
    """Trains the runs of a grid as processes, `jobs` at a time.

    Args:
        out: folder of all run folders.
        paths: data set → folder of its images.
        jobs: runs at a time.
        minutes: time limit. None: until all runs are done.
        whole_runs: skip runs that cannot finish in time, judged by the finished ones.
        settings: key=value, for every run.
        retry: train failed runs again.
        estimate: the seconds that a run trains, if nothing like it has finished here. None: not known.
        log: called with a line about each event.
        show: called often, with the epoch of each running run, the number of finished runs, and the number of all.
    """

    def __init__(
        self,
        out: Path,
        *,
        paths: Mapping[str, str],
        jobs: int = 1,
        minutes: float | None = None,
        whole_runs: bool = False,
        settings: Sequence[str] = (),
        retry: bool = False,
        estimate: Callable[[Run], float | None] = lambda run: None,
        log: Callable[[str], None] = print,
        show: Callable[[dict[str, float | None], int, int], None] | None = None,
    ) -> None:
        if jobs < 1:
            raise ValueError(f"--jobs is {jobs}; expected 1 or more")
        if minutes is not None and 60 * minutes <= STOP_SECONDS:
            raise ValueError(f"--minutes is {minutes:g}; runs need {STOP_SECONDS:g} s to save: give 1 or more")
        self.out, self.paths, self.jobs, self.settings = out, paths, jobs, tuple(settings)
        self.retry, self.whole_runs, self.estimate = retry, whole_runs, estimate
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.log, self.show, self.cache = log, show, CompileCache(out)
        self.running: list[_Job] = []
        self.pending: list[Run] = []
        self.outcome = Outcome()
        self.hurry = False  # True: do not wait for runs to save

    def make(self, runs: Sequence[Run]) -> Outcome:
        """Returns when all runs are done, when the time is up, or after SIGINT or SIGTERM. Nothing is lost."""
        unfinished = [run for run in runs if not is_finished(self.out / run.name)]
        failed = [run for run in unfinished if has_failed(self.out / run.name)]
        self.pending = unfinished if self.retry else [run for run in unfinished if run not in failed]
        self.total, self.done = len(runs), len(runs) - len(unfinished)
        self._check_data()
        if self.retry:
            for run in failed:
                (self.out / run.name / FAILURE).unlink(missing_ok=True)  # another call may have removed it
        elif failed:
            names = ", ".join(run.name for run in failed)
            self.log(f"failed earlier and skipped: {names}; --retry trains them again")
        self.out.mkdir(parents=True, exist_ok=True)
        begun, clock = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
        with self._heeding_signals(), contextlib.ExitStack() as last:
            last.callback(lambda: self._write_session(begun, seconds=time.monotonic() - clock))
            last.callback(self._stop_all)  # before the session is written, also after an error
            self._work()
        self.outcome.failed = [run.name for run in runs if has_failed(self.out / run.name)]
        self.outcome.left = [run.name for run in runs if not is_finished(self.out / run.name)]
        return self.outcome

    def _check_data(self) -> None:
        """Raise ValueError for a data set that cannot be opened, before every run fails because of it."""
        needed = {run.dataset: run for run in self.pending}
        missing = sorted(needed.keys() - self.paths.keys())
        if missing:
            raise ValueError(
                f"no data for {', '.join(missing)}: give --data {missing[0]}=FOLDER (several: with commas)"
            )
        for name, run in needed.items():
            flags = {"data": {"path": self.paths[name]}}
            data = load_config(str(RECIPE), overrides=[*run.overrides(), *self.settings], flags=flags).data
            if not is_stream(data.path):
                data = replace(data, in_memory=False, augment_on_device=False)  # opened, not read
            try:
                open_data(data)
            except (ValueError, OSError, ImportError) as error:
                raise ValueError(f"--data {name}={self.paths[name]}: {error}") from error

    def _work(self) -> None:
        while True:
            for job in self._ended():
                self._end(job)
            if self.show is not None:
                epochs = {job.run.name: _epoch(self.out / job.run.name) for job in self.running}
                self.show(epochs, self.done, self.total)
            if self.outcome.interrupted:
                self.log(
                    "stopping: running trainings are saved and continue in the next call; Ctrl-C again: do not wait"
                )
                return
            left = self._seconds_left()
            if left is not None and left <= STOP_SECONDS and (self.running or self.pending):
                self.log("the time is up: running trainings are saved and continue in the next call")
                return
            while len(self.running) < self.jobs and self._start_next():
                pass
            if not self.running:
                break
            for job in self.running:
                if job.under_way is None and written(self.out / job.run.name / METRICS) > job.records:
                    job.under_way = time.monotonic() - job.started
                    self.cache.add(job.run.model)
            time.sleep(POLL_SECONDS)
        if self.outcome.elsewhere:
            self.log(f"another process is training {', '.join(self.outcome.elsewhere)}: skipped")
        if too_long := len(self.pending) - len(self.outcome.elsewhere):
            self.log(f"{too_long} runs are left, but none can finish in time")

    def _start_next(self) -> bool:
        """Start the first run that no other process is training and whose model no run is compiling.

        With `whole_runs`, skip runs that are expected to take too long. Runs that another call has finished are removed
        from the pending ones.
        """
        left = self._seconds_left() if self.whole_runs else None
        self.outcome.elsewhere = []
        compiling = {job.run.model for job in self.running if job.under_way is None}
        for run in list(self.pending):
            if run.model in compiling and not self.cache.has(run.model):
                continue
            expected = None if left is None else self.expected_seconds(run)
            if left is not None and expected is not None and expected > left - STOP_SECONDS:
                continue
            folder = self.out / run.name
            claim = _claim(folder)
            if claim is None:
                self.outcome.elsewhere.append(run.name)
                continue
            self.pending.remove(run)
            if not is_finished(folder) and not has_failed(folder):
                self._start(run, claim)
                return True
            self.done += is_finished(folder)
            claim.release()
        return False

    def expected_seconds(self, run: Run) -> float | None:
        """The expected seconds until a run ends, judged by finished runs with the same data and tokens.

        Runs of the same row are preferred. None if there are none. The time of a start (processes, images, compilation)
        does not depend on the length of a run.
        """
        known = [
            (other, wall)
            for folder in self.out.glob(f"{run.dataset}-p{run.patch}-*")
            if (other := parse_name(folder.name)) is not None and is_finished(folder) and (wall := _wall(folder))
        ]
        known = [(other, wall) for other, wall in known if other.row == run.row] or known
        left = 1 - (_epoch(self.out / run.name) or 0) / run.epochs
        if not known:
            seconds = self.estimate(run)
            return None if seconds is None else START_SECONDS + left * seconds
        start = max(wall["under_way"] for _, wall in known)
        epoch = max((wall["seconds"] - wall["under_way"]) / other.epochs for other, wall in known)
        return start + epoch * run.epochs * left

    def _start(self, run: Run, claim: FileLock) -> None:
        folder = self.out / run.name
        where = (self.paths[run.dataset], self.out)
        self.log(command_line(run.arguments(*where, extra=self.settings)))
        log = open(folder / LOG, "ab")  # noqa: SIM115  # until the process ends
        # In its own session: Ctrl-C reaches only this process, which passes it on once.
        process = subprocess.Popen(
            [sys.executable, "-m", "inline_attention", *run.arguments(*where, extra=self.settings, recipe=RECIPE)],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=self.cache.environment(),
        )  # fmt: skip
        self.running.append(_Job(run, process, log, claim, time.monotonic(), records=written(folder / METRICS)))

    def _ended(self) -> list[_Job]:
        return [job for job in self.running if job.process.poll() is not None]

    def _end(self, job: _Job) -> None:
        self.running.remove(job)
        with job.claim, job.log:
            folder, name = self.out / job.run.name, job.run.name
            if not is_finished(folder) and _is_locked(folder):
                # Another process, from a killed call or started by hand, had locked the run first.
                self.pending.append(job.run)
                return
            before, now = _wall(folder), time.monotonic() - job.started
            seconds = before.get("seconds", 0.0) + now
            under_way = before.get("under_way", 0.0) + (now if job.under_way is None else job.under_way)
            wall = {"seconds": round(seconds, 1), "under_way": round(under_way, 1), "jobs": self.jobs}
            write_atomically(folder / WALL, json.dumps(wall).encode())
            if is_finished(folder):
                self.done += 1
                self.outcome.finished.append(name)
                summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
                self.log(f"{name}: {self._describe(summary)} in {seconds:.0f} s ({self.done}/{self.total})")
            elif not job.stopped and job.process.returncode not in STOPPED:
                lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
                (folder / FAILURE).write_text("\n".join(lines[-5:]) + "\n", encoding="utf-8")
                self.outcome.failed.append(name)
                self.log(f"{name} failed: {lines[-1] if lines else 'nothing was printed'}")

    @staticmethod
    def _describe(summary: Mapping[str, Any]) -> str:
        return f"top-1 {summary['val_top1']:.2f}%"

    def _stop_all(self) -> None:
        for job in self.running:
            job.stopped = job.process.poll() is None
            job.process.terminate()
        limit = time.monotonic() + STOP_SECONDS
        while self.running:
            for job in self._ended():
                self._end(job)
            if self.hurry or time.monotonic() > limit:
                for job in self.running:
                    job.process.kill()  # its last checkpoint stays
            time.sleep(POLL_SECONDS / 10)

    def _write_session(self, begun: str, *, seconds: float) -> None:
        session = {
            "start": begun,
            "seconds": round(seconds, 1),
            "jobs": self.jobs,
            "finished": self.outcome.finished,
            "failed": self.outcome.failed,
        }
        with open(self.out / SESSIONS, "a") as file:
            file.write(json.dumps(session) + "\n")

    def _seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @contextlib.contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """Inside the block, signals are recorded for the loops and raise nothing, even while runs are being stopped."""
        if threading.current_thread() is not threading.main_thread():  # Python allows no handlers there
            yield
            return
        previous = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        self.hurry = self.hurry or (self.outcome.interrupted and number == signal.SIGINT)
        self.outcome.interrupted = True


def _claim(folder: Path) -> FileLock | None:
    """Claim the run for this call. None: another process is training it."""
    folder.mkdir(exist_ok=True)
    claim = FileLock(folder / CLAIM)
    if claim.take():
        if not _is_locked(folder):
            return claim
        claim.release()
    return None


def _is_locked(folder: Path) -> bool:
    """Whether a process is training there."""
    with FileLock(folder / LOCK) as lock:
        return not lock.take()


def _epoch(folder: Path) -> float | None:
    """The epoch of a run, from the last line of its metrics."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        return float(json.loads((folder / METRICS).read_text().splitlines()[-1])["epoch"])
    return None


def dataset_paths(text: str | None) -> dict[str, str]:
    """ "tiny_imagenet=FOLDER,imagenette=FOLDER" → folders by name, with the data sets that need none"""
    paths = {name: dataset.path for name, dataset in DATASETS.items() if dataset.path is not None}
    for item in filter(None, (text or "").split(",")):
        name, equals, path = item.partition("=")
        if name not in DATASETS or not equals or not path:
            raise ValueError(f"--data {item!r}: expected NAME=FOLDER with a name of {', '.join(DATASETS)}")
        paths[name] = path
    return paths
