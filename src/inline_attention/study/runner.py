"""Makes the runs of a grid: several at a time, each an `inline train` of its own, until the time is up.

A run is finished when its folder has a summary. One that was stopped goes on from its checkpoint the next time.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from inline_attention.study.grid import DATASETS, Run, command_line
from inline_attention.training.report import METRICS, SUMMARY

SESSIONS = "sessions.jsonl"  # one line a call: when, how long, how many at a time, what it finished
FAILURE = "failure.txt"  # of a run that ended by itself without a result, a diverged one for example
LOG = "log.txt"
WALL = "wall.json"  # seconds from start to end, and until the first epoch was under way, summed over a run's starts
STOP_SECONDS = 25.0  # that a run gets to finish its update and save
POLL_SECONDS = 0.5


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).exists()


def has_failed(folder: Path) -> bool:
    return (folder / FAILURE).exists() and not is_finished(folder)


def wall_seconds(folder: Path) -> float:
    return _wall(folder).get("seconds", 0.0)


def _wall(folder: Path) -> dict[str, float]:
    path = folder / WALL
    return json.loads(path.read_text()) if path.exists() else {}


@dataclass
class Outcome:
    finished: list[str] = field(default_factory=list)  # in this call
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # not begun, or stopped
    interrupted: bool = False


@dataclass
class _Job:
    run: Run
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started: float
    records: float  # when its metrics were written last before that; 0: never
    under_way: float | None = None  # seconds from the start to the first record
    stopped: bool = False  # by us


class GridRunner:
    """A grid's runs as processes, `jobs` at a time.

    Args:
        out: folder of all run folders.
        paths: data set → where its images are.
        jobs: runs at a time.
        minutes: after which nothing runs any more; None: until all is done.
        whole_runs: begin nothing that would not end in time, as far as finished runs tell.
        extra: settings (key=value) and options of `inline train` for every run.
        retry: make failed runs again.
        tell: hears a line about each event.
        show: hears often which runs are running, with the epoch of each, and how many are done of how many.
    """

    def __init__(
        self,
        out: Path,
        *,
        paths: Mapping[str, str],
        jobs: int = 1,
        minutes: float | None = None,
        whole_runs: bool = False,
        extra: Sequence[str] = (),
        retry: bool = False,
        tell: Callable[[str], None] = print,
        show: Callable[[dict[str, float | None], int, int], None] | None = None,
    ) -> None:
        if jobs < 1:
            raise ValueError(f"--jobs is {jobs}; expected 1 or more")
        if minutes is not None and 60 * minutes <= STOP_SECONDS:
            raise ValueError(f"--minutes is {minutes:g}; runs need {STOP_SECONDS:g} s to save: give 1 or more")
        self.out, self.paths, self.jobs, self.extra = out, paths, jobs, tuple(extra)
        self.retry, self.whole_runs = retry, whole_runs
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.tell, self.show = tell, show
        self.running: list[_Job] = []
        self.outcome = Outcome()

    def make(self, runs: Sequence[Run]) -> Outcome:
        """Returns when all runs are made, when the time is up, or when SIGINT or SIGTERM came; nothing is lost."""
        missing = sorted({run.dataset for run in runs} - self.paths.keys())
        if missing:
            raise ValueError(
                f"no data for {', '.join(missing)}: give --data {missing[0]}=FOLDER (several: with commas)"
            )
        self.out.mkdir(parents=True, exist_ok=True)
        pending = [run for run in runs if self._is_due(run)]
        self.total, self.done = len(runs), len(runs) - len(pending)
        begun, clock = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
        try:
            with _sigterm_as_interrupt():
                self._work(pending)
        except KeyboardInterrupt:
            self.outcome.interrupted = True
        finally:
            self._stop_all()
            self.outcome.left = [run.name for run in runs if not is_finished(self.out / run.name)]
            session = {
                "start": begun,
                "seconds": round(time.monotonic() - clock, 1),
                "jobs": self.jobs,
                "finished": self.outcome.finished,
                "failed": self.outcome.failed,
            }
            with open(self.out / SESSIONS, "a") as file:
                file.write(json.dumps(session) + "\n")
        return self.outcome

    def _is_due(self, run: Run) -> bool:
        folder = self.out / run.name
        return not is_finished(folder) and (self.retry or not has_failed(folder))

    def _work(self, pending: list[Run]) -> None:
        while pending or self.running:
            for job in [job for job in self.running if job.process.poll() is not None]:
                self._end(job)
            left = self._seconds_left()
            if left is not None and left <= STOP_SECONDS:
                if self.running or pending:
                    self.tell("the time is up: what runs is saved and goes on the next time")
                return
            while len(self.running) < self.jobs and (run := self._next(pending)) is not None:
                pending.remove(run)
                self._start(run)
            if not self.running:
                if pending:
                    self.tell(f"{len(pending)} runs are left, none of which would end in time")
                return
            for job in self.running:
                if job.under_way is None and _written(self.out / job.run.name) > job.records:
                    job.under_way = time.monotonic() - job.started
            if self.show is not None:
                self.show(
                    {job.run.name: _epoch(self.out / job.run.name) for job in self.running}, self.done, self.total
                )
            time.sleep(POLL_SECONDS)

    def _next(self, pending: list[Run]) -> Run | None:
        """The first run; with `whole_runs` the first that is expected to end in time, if anything is known."""
        left = self._seconds_left() if self.whole_runs else None
        for run in pending:
            expected = self.expected_seconds(run)
            if left is None or expected is None or expected <= left - STOP_SECONDS:
                return run
        return None

    def expected_seconds(self, run: Run) -> float | None:
        """What is left of a run, by finished ones on the same data with as many tokens, of the same row where there
        are any; None: there are none. A start (processes, images, compilation) takes as long whatever the length."""
        same = f"{run.dataset}-p{run.patch}-e*"
        walls: dict[Path, dict[str, float]] = {}
        for pattern in (f"{same}-{run.row}-s*", same):
            walls = walls or {folder: _wall(folder) for folder in self.out.glob(pattern) if is_finished(folder)}
        measured = {folder: wall for folder, wall in walls.items() if wall}
        if not measured:
            return None
        start = max(wall["under_way"] for wall in measured.values())
        epoch = max(
            (wall["seconds"] - wall["under_way"]) / int(folder.name.split("-e")[1].split("-")[0])
            for folder, wall in measured.items()
        )
        return start + epoch * (run.epochs - (_epoch(self.out / run.name) or 0))

    def _start(self, run: Run) -> None:
        folder = self.out / run.name
        folder.mkdir(exist_ok=True)
        (folder / FAILURE).unlink(missing_ok=True)
        arguments = run.arguments(self.paths[run.dataset], self.out, extra=self.extra)
        self.tell(command_line(arguments))
        log = open(folder / LOG, "ab")  # noqa: SIM115  # until the process ends
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        process = subprocess.Popen(
            [sys.executable, "-m", "inline_attention", *arguments],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.running.append(_Job(run, process, log, time.monotonic(), records=_written(folder)))

    def _end(self, job: _Job) -> None:
        self.running.remove(job)
        job.log.close()
        folder, name = self.out / job.run.name, job.run.name
        before, now = _wall(folder), time.monotonic() - job.started
        seconds = before.get("seconds", 0.0) + now
        under_way = before.get("under_way", 0.0) + (now if job.under_way is None else job.under_way)
        wall = {"seconds": round(seconds, 1), "under_way": round(under_way, 1), "jobs": self.jobs}
        (folder / WALL).write_text(json.dumps(wall))
        if is_finished(folder):
            self.done += 1
            self.outcome.finished.append(name)
            summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
            self.tell(f"{name}: top-1 {summary['val_top1']:.2f}% in {seconds:.0f} s ({self.done}/{self.total})")
        elif not job.stopped and job.process.returncode not in (128 + signal.SIGTERM, 128 + signal.SIGINT):
            self.done += 1
            lines = (folder / LOG).read_text(errors="replace").splitlines()
            (folder / FAILURE).write_text("\n".join(lines[-5:]) + "\n")
            self.outcome.failed.append(name)
            self.tell(f"{name} failed: {lines[-1] if lines else 'nothing was printed'}")

    def _stop_all(self) -> None:
        for job in self.running:
            if job.process.poll() is None:
                job.stopped = True
                job.process.terminate()
        limit = time.monotonic() + STOP_SECONDS
        for job in list(self.running):
            try:
                job.process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:  # its last checkpoint remains
                job.process.kill()
                job.process.wait()
            self._end(job)

    def _seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()


def _epoch(folder: Path) -> float | None:
    """Where a run stands, by the last line of its metrics."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        return float(json.loads((folder / METRICS).read_text().splitlines()[-1])["epoch"])
    return None


def _written(folder: Path) -> float:
    """When the metrics of a run were written last; 0: never."""
    with contextlib.suppress(OSError):
        return (folder / METRICS).stat().st_mtime
    return 0.0


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Any:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def dataset_paths(given: str | None) -> dict[str, str]:
    """ "tiny_imagenet=FOLDER,imagenette=FOLDER" → by name, with those that need no folder"""
    paths = {name: dataset.path for name, dataset in DATASETS.items() if dataset.path is not None}
    for item in filter(None, (given or "").split(",")):
        name, equals, path = item.partition("=")
        if name not in DATASETS or not equals or not path:
            raise ValueError(f"--data {item!r}: expected NAME=FOLDER with a name of {', '.join(DATASETS)}")
        paths[name] = path
    return paths
