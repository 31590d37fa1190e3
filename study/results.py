"""Reads a folder of runs: accuracies with their spread, curves, times."""

import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from inline_attention.bench.record import fastest, read_record
from inline_attention.tasks.classification.config import TrainConfig
from inline_attention.training import settings
from inline_attention.training.config import read_yaml
from inline_attention.training.report import METRICS, SUMMARY
from inline_attention.training.run_folder import CONFIG, ENVIRONMENT
from study.grid import DATASETS, MAIN, ROWS, Run, as_yaml, parse_name
from study.intervals import Effect, paired
from study.runner import FAILURE, SESSIONS, has_failed, is_finished

ANALYSIS, SPEED, PROBES = "analysis.json", "speed.json", "probes.json"
SWEEP = "sweep.json"  # optional: a record of `inline bench sweep --json`
AGAIN = "again"  # folder of repeated runs
_PLACES = ("data.path", "device")  # settings about the place of a run, not its content


class Setting(NamedTuple):
    """The properties that runs must share to be compared."""

    dataset: str
    patch: int
    epochs: int

    @property
    def is_evidence(self) -> bool:
        return DATASETS[self.dataset].is_evidence

    @property
    def tokens(self) -> int:
        return DATASETS[self.dataset].tokens(self.patch)

    def __str__(self) -> str:
        return f"{DATASETS[self.dataset].title}, {self.tokens} tokens, {self.epochs} epochs"


@dataclass(frozen=True)
class RunResult:
    run: Run
    folder: Path
    top1: float  # after the last epoch: nothing is selected by validation accuracy
    best: float  # highest of all epochs
    images: int  # in the validation split
    curve: list[tuple[float, float]]  # epoch, top-1
    seconds: float  # of training, while other jobs may have run
    analysis: dict[str, Any] | None
    changed: list[str]  # key=value, settings that differ from the grid
    commit: str
    machine: str

    @property
    def setting(self) -> Setting:
        return Setting(self.run.dataset, self.run.patch, self.run.epochs)


@dataclass(frozen=True)
class Sample:
    """Top-1 of one row in one setting over its seeds."""

    by_seed: dict[int, float]

    @property
    def values(self) -> list[float]:
        return list(self.by_seed.values())

    @property
    def seeds(self) -> int:
        return len(self.by_seed)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Standard deviation over seeds. None for one seed."""
        return statistics.stdev(self.values) if self.seeds > 1 else None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def is_early(analysis: Mapping[str, Any]) -> bool:
    """Whether an analysis is from before version 0.2, which defined confusion and random masks differently."""
    return "loose_confusion" in analysis or "confusion" in analysis


def describe_seeds(samples: Iterable[Sample]) -> str:
    """A text such as "one seed each", "3 seeds each" or "1 or 3 seeds"."""
    seeds = sorted({sample.seeds for sample in samples})
    if len(seeds) == 1:
        return "one seed each" if seeds == [1] else f"{seeds[0]} seeds each"
    return f"{' or '.join(map(str, seeds))} seeds"


class Sweep(NamedTuple):
    """InLine-DeiT-T against DeiT-T in inference, by the side of the images."""

    ratios: dict[int, float]  # the counterpart with FlashAttention
    math_ratios: dict[int, float]  # the counterpart with softmax written out, which the paper compares with
    commit: str
    machine: str


@dataclass(frozen=True)
class Results:
    runs: list[RunResult]
    again: list[RunResult]
    failures: dict[str, str]  # run → error message
    sessions: list[tuple[str, float]]  # start and seconds of each call of `python -m study train`
    probes: dict[str, Any] | None
    speed: dict[str, Any] | None
    sweep: Sweep | None

    @property
    def device_seconds(self) -> float:
        return sum(seconds for _, seconds in self.sessions)

    @property
    def settings(self) -> list[Setting]:
        return sorted({result.setting for result in self.runs})

    def rows(self, setting: Setting) -> dict[str, Sample]:
        """In the order of the grid."""
        found: dict[str, dict[int, float]] = {}
        for result in self.runs:
            if result.setting == setting:
                found.setdefault(result.run.row, {})[result.run.seed] = result.top1
        return {row: Sample(found[row]) for row in ROWS if row in found}

    @property
    def main_setting(self) -> Setting | None:
        """The setting in which InLine and linear attention have the most seeds, then epochs; evidence first."""
        both = [s for s in self.settings if {"inline", "linear"} <= self.rows(s).keys()]
        return max(both, key=lambda s: (s.is_evidence, len(self.rows(s)["inline"].values), s.epochs), default=None)

    @property
    def longer_settings(self) -> list[Setting]:
        """Settings of main rows with the data and tokens of the main one, more epochs and fewer seeds."""
        main = self.main_setting
        longer = [s for s in self.settings if main is not None and s[:2] == main[:2] and s.epochs > main.epochs]
        return [s for s in longer if MAIN.keys() & self.rows(s).keys()]

    def settings_of(self, *rows: str) -> list[Setting]:
        """Settings that have all of these rows and decide verdicts: the most common seeds first, then epochs."""
        found = {}
        for setting in filter(lambda s: s.is_evidence, self.settings):
            samples = self.rows(setting)
            if set(rows) <= samples.keys() and (seeds := self.common_seeds(setting, rows)):
                found[setting] = (len(seeds), setting.epochs)
        return sorted(found, key=found.__getitem__, reverse=True)

    def common_seeds(self, setting: Setting, rows: Sequence[str]) -> dict[int, dict[str, float]]:
        """seed → row → top-1, for the seeds that all of these rows have."""
        samples = self.rows(setting)
        seeds = set.intersection(*(set(samples[row].by_seed) for row in rows))
        return {seed: {row: samples[row].by_seed[seed] for row in rows} for seed in sorted(seeds)}

    def difference(self, setting: Setting, a: str, b: str) -> Effect | None:
        """Row a − row b in points, paired by seed. None if a row or a common seed is missing."""
        rows = self.rows(setting)
        return paired(rows[a].by_seed, rows[b].by_seed) if {a, b} <= rows.keys() else None

    def analyses(self, setting: Setting, row: str, *parts: str) -> dict[int, dict[str, Any]]:
        """The analyses of a row by seed that have these parts. Those of an early definition decide nothing."""
        found = ((r.run.seed, r.analysis) for r in self.runs if r.setting == setting and r.run.row == row)
        return {
            seed: analysis
            for seed, analysis in found
            if analysis is not None and not is_early(analysis) and set(parts) <= analysis.keys()
        }

    def find(self, setting: Setting, row: str) -> RunResult | None:
        """The run of the lowest seed."""
        found = [r for r in self.runs if r.setting == setting and r.run.row == row]
        return min(found, key=lambda r: r.run.seed, default=None)


def run_folders(out: Path) -> list[tuple[Run, Path]]:
    if not out.is_dir():
        return []
    found = [(parse_name(folder.name), folder) for folder in sorted(out.iterdir()) if folder.is_dir()]
    return [(run, folder) for run, folder in found if run is not None]


def collect(out: Path, *, onto: Path | None = None, sweeps: Sequence[Path] = (), may_be_empty: bool = False) -> Results:
    """Finished runs of a folder, added to those of an earlier report's results.json if `onto` names one.

    With `onto`, the folder may be missing or empty. ValueError if there is no result at all, unless that is expected.

    sweeps: records of `inline bench sweep`. A size is taken from the first that has it.
    """
    if sweeps:
        return replace(collect(out, onto=onto, may_be_empty=may_be_empty), sweep=_read_sweeps(sweeps))
    if onto is not None:
        return _added(read_report(onto), _read_folder(out), out)
    if not out.is_dir() and not may_be_empty:
        raise ValueError(f"there is no folder {str(out)!r}; `python -m study train --output {out}` creates it")
    results = _read_folder(out)
    if not results.runs and results.probes is None and not may_be_empty:
        failures = results.failures
        failed = f"; {', '.join(failures)} failed, {FAILURE} in the folder says why" if failures else ""
        raise ValueError(f"neither finished runs nor probes in {str(out)!r}{failed}")
    return results


def _read_folder(out: Path) -> Results:
    folders = run_folders(out)
    sessions = _read_lines(out / SESSIONS) if (out / SESSIONS).exists() else []
    return Results(
        runs=_finished(folders),
        again=_finished(run_folders(out / AGAIN)),
        failures={folder.name: _text(folder / FAILURE).strip() for _, folder in folders if has_failed(folder)},
        sessions=[(session["start"], session["seconds"]) for session in sessions],
        probes=_read_json(out / PROBES),
        speed=_read_json(out / SPEED),
        sweep=_read_sweeps([out / SWEEP]) if (out / SWEEP).exists() else None,
    )


def read_report(path: Path) -> Results:
    """The results of an earlier report, without the folders of its runs."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sweep = content["sweep"]
        return Results(
            runs=[
                result for setting in content["settings"] for row in setting["rows"] for result in _runs(setting, row)
            ],
            again=[_made_again(entry) for entry in content["again"]],
            failures=content["failures"],
            sessions=[(start, seconds) for start, seconds in content["sessions"]],
            probes=content["probes"],
            speed=content["speed"],
            sweep=sweep and _sweep_of(sweep),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a results.json that `python -m study report` wrote: {error!r}") from error


def _runs(setting: dict[str, Any], row: dict[str, Any]) -> Iterator[RunResult]:
    for i, seed in enumerate(row["seeds"]):
        run = Run(setting["dataset"], row["row"], setting["epochs"], seed, setting["patch"])
        usual = run.arguments(run.dataset.upper(), Path("runs"))
        yield RunResult(
            run=run,
            folder=Path(run.name),  # no longer exists
            top1=row["top1"][i],
            best=row["best"][i],
            images=row["images"][i],
            curve=[(epoch, top1) for epoch, top1 in row["curves"][i]],
            seconds=row["seconds"][i],
            analysis=row["analyses"][i],
            # The report has the command of the first seed only.
            changed=[word for word in shlex.split(row["command"])[1:] if word not in (*usual, *_of_seed(run, row))],
            commit=" and ".join(row["commit"]),
            machine=" and ".join(row["machine"]),
        )


def _sweep_of(entry: dict[str, Any]) -> Sweep:
    ratios = {key: {int(side): ratio for side, ratio in entry[key].items()} for key in ("ratios", "math_ratios")}
    return Sweep(**{**entry, **ratios})


def _of_seed(run: Run, row: dict[str, Any]) -> list[str]:
    """Words of a row's command that do not apply to this run, because its seed differs."""
    return replace(run, seed=row["seeds"][0]).arguments(run.dataset.upper(), Path("runs"))


def _made_again(entry: dict[str, Any]) -> RunResult:
    run = parse_name(entry["run"])
    if run is None:
        raise ValueError(f"{entry['run']} is not a run of the grid")
    made = {key: entry[key] for key in ("top1", "commit", "machine")}
    return RunResult(
        run, Path(run.name), **made, best=entry["top1"], images=0, curve=[], seconds=0.0, analysis=None, changed=[]
    )


def _added(old: Results, new: Results, out: Path) -> Results:
    """Add new runs, which replace old ones of the same name, and analyses in `out` of old runs.

    A folder that was added before changes nothing, so that a report can be repeated.
    """
    kept = [replace(r, analysis=_read_json(out / r.run.name / ANALYSIS) or r.analysis) for r in old.runs]
    made, again = ({result.run for result in results} for results in (new.runs, new.again))
    failures = {**old.failures, **new.failures}
    speed = old.speed or new.speed
    if old.speed and new.speed and old.speed["machine"] == new.speed["machine"]:
        commits = sorted({*old.speed["commits"], *new.speed["commits"]})
        speed = {**old.speed, "rows": {**old.speed["rows"], **new.speed["rows"]}, "commits": commits}
    return Results(
        runs=sorted([*(r for r in kept if r.run not in made), *new.runs], key=lambda r: r.run.name),
        again=[*(r for r in old.again if r.run not in again), *new.again],
        failures={name: text for name, text in failures.items() if name not in {run.name for run in made}},
        sessions=[*old.sessions, *(session for session in new.sessions if session not in old.sessions)],
        probes=new.probes or old.probes,
        speed=speed,
        sweep=new.sweep or old.sweep,
    )


def _finished(folders: Sequence[tuple[Run, Path]]) -> list[RunResult]:
    return [_read_run(run, folder) for run, folder in folders if is_finished(folder)]


def _read_run(run: Run, folder: Path) -> RunResult:
    try:
        return _read(run, folder)
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise ValueError(
            f"the run {str(folder)!r} is damaged ({error}): repair it, or remove the folder and train it again"
        ) from error


def _read(run: Run, folder: Path) -> RunResult:
    summary = _parse(_text(folder / SUMMARY), folder / SUMMARY)
    evaluations = [record for record in _read_lines(folder / METRICS) if record["kind"] == "eval"]
    if not evaluations:
        raise ValueError(f"there is no evaluation in {METRICS}")
    environment = json.loads(_text(folder / ENVIRONMENT))[-1]
    gpus = [value for key, value in environment.items() if key.startswith("gpu ")]
    return RunResult(
        run=run,
        folder=folder,
        top1=summary["val_top1"],
        best=summary["best_top1"],
        images=int(evaluations[-1]["val_images"]),
        curve=[(record["epoch"], record["val_top1"]) for record in evaluations],
        seconds=summary["seconds"],
        analysis=_read_json(folder / ANALYSIS),
        changed=_changed_settings(run, folder),
        commit=environment["inline-attention"],
        machine=gpus[0] if environment["device"].startswith("cuda") and gpus else environment["cpu"],
    )


def _changed_settings(run: Run, folder: Path) -> list[str]:
    """Settings in which a run differs from the current grid, by `--set` or because the grid has changed."""
    text = _text(folder / CONFIG)
    was, now = settings.update(TrainConfig(), read_yaml(text, str(folder / CONFIG))), run.config()
    values = ((key, attrgetter(key)(was), attrgetter(key)(now)) for key in settings.keys(was) if key not in _PLACES)
    return [f"{key}={as_yaml(value)}" for key, value, expected in values if value != expected]


def _read_sweeps(paths: Sequence[Path]) -> Sweep:
    """One sweep of several records. A size is taken from the first that has it."""
    found = [_read_sweep(path) for path in paths]

    def merged(name: str) -> dict[int, float]:
        ratios = {side: ratio for sweep in reversed(found) for side, ratio in getattr(sweep, name).items()}
        return dict(sorted(ratios.items()))

    commits, machines = (" and ".join(dict.fromkeys(getattr(s, name) for s in found)) for name in ("commit", "machine"))
    return Sweep(merged("ratios"), merged("math_ratios"), commits, machines)


def _read_sweep(path: Path) -> Sweep:
    _, facts, results = read_record(path, kinds=("model",))
    deit = [r for r in results if (r["model"], r["task"]) == ("inline_deit_tiny", "infer") and r["error"] is None]
    rates = {(r["img_size"], r["contender"]): r["images_per_second"] for r in fastest(deit, lambda r: (r["img_size"],))}

    def ratios(peer: str) -> dict[int, float]:
        sides = sorted(side for side, contender in rates if contender == peer and (side, "fused") in rates)
        return {side: rates[side, "fused"] / rates[side, peer] for side in sides}

    gpus = [value for name, value in facts.items() if name.startswith("gpu ")]
    return Sweep(ratios("peer"), ratios("peer_math"), facts["inline-attention"], gpus[0] if gpus else facts["cpu"])


def _read_json(path: Path) -> dict[str, Any] | None:
    return _parse(_text(path), path) if path.exists() else None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [_parse(line, path) for line in _text(path).splitlines()]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from error
