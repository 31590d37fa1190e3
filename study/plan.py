"""What the grid still needs: finished and missing runs of each group, and the time that they take."""

import heapq
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from study.grid import DEFAULT_GROUPS, GROUPS, MAIN_EPOCHS, ROWS, Run
from study.results import Results, RunResult
from study.runner import START_SECONDS

JOBS = 7  # runs at a time on one H200, as the recorded ones


class GroupPlan(NamedTuple):
    name: str
    question: str
    runs: list[Run]
    left: list[Run]  # not finished
    minutes: float | None  # of the missing runs, JOBS at a time; None: nothing like them has been timed


def plan(
    results: Results, groups: Sequence[str] = DEFAULT_GROUPS, *, main_epochs: int = MAIN_EPOCHS
) -> list[GroupPlan]:
    done = {result.run for result in results.runs}
    plans = []
    for name in groups:
        runs = GROUPS[name].runs(main_epochs=main_epochs)
        left = [run for run in runs if run not in done]
        seconds = [expected_seconds(run, results.runs) for run in left]
        known = [second for second in seconds if second is not None]
        minutes = finish_time(known) / 60 if len(known) == len(left) else None
        plans.append(GroupPlan(name, GROUPS[name].question, runs, left, minutes))
    return plans


def finish_time(seconds: Sequence[float], *, jobs: int = JOBS) -> float:
    """Seconds until runs of these lengths have ended, `jobs` at a time, each with its start.

    The last runs have the device to themselves and are faster than this says.
    """
    ends = [0.0] * jobs
    for length in seconds:
        heapq.heapreplace(ends, ends[0] + START_SECONDS + length)
    return max(ends)


def expected_seconds(run: Run, finished: Sequence[RunResult]) -> float | None:
    """The training time of a run while JOBS run at a time, by finished runs of such models on the same data.

    Runs of the same row are preferred, then those of the most similar length. None without such runs, because the cost
    of its settings, such as other augmentation, is then not known.
    """
    ours = _cost_settings(run)
    known = [r for r in finished if (r.run.dataset, r.run.patch) == (run.dataset, run.patch)]
    known = [r for r in known if _cost_settings(r.run) == ours and ROWS[r.run.row].model == ROWS[run.row].model]
    known = [r for r in known if r.run.row == run.row] or known
    if not known:
        return None
    nearest = min(abs(r.run.epochs - run.epochs) for r in known)
    rates = [r.seconds / _seen(r.run) for r in known if abs(r.run.epochs - run.epochs) == nearest]
    return statistics.fmean(rates) * _seen(run)


def _cost_settings(run: Run) -> dict[str, object]:
    """Settings of a row, other than its number of images, that change the time of an epoch."""
    cheap = ("optim.lr", "optim.clip_norm", "data.train_share")
    return {key: value for key, value in ROWS[run.row].settings.items() if key not in cheap}


def _seen(run: Run) -> float:
    """Epochs of the whole data."""
    return run.epochs * ROWS[run.row].settings.get("data.train_share", 1)
