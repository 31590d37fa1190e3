"""Students of `softmax_deit_study`: linearised in several ways, and distilled for 0 to 40 epochs. Two are of a Swin.

Each run is an ordinary `inline linearize` with the recipe of that name. The Swin is trained first, by `inline train`. A
run is finished when its accuracy is written. A stopped run continues in the next call.
"""

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inline_attention.data import open_eval_data
from inline_attention.environment import describe_environment
from inline_attention.models.shipped import SHIPPED
from inline_attention.printing import table
from inline_attention.tasks.classification.classifier import load_classifier
from inline_attention.tasks.classification.evaluation import evaluate
from inline_attention.tasks.linearization.stages import DISTILL, MATCH, STUDENT
from inline_attention.training.files import write_atomically
from inline_attention.training.report import METRICS, SUMMARY
from study import grid
from study.compiling import CompileCache
from study.expansion import TEACHER, TEACHER_SHA256
from study.grid import SEEDS, command_line
from study.measures import weights_file

CARRIED = -1  # in the place of epochs: no training at all. With 0 epochs, the layers are matched
EPOCHS = (CARRIED, 0, 1, 5, 10, 20, 40)
VARIANT_EPOCHS = (CARRIED, 0, 20)
FIRST_EPOCHS = (5, 20)  # of the main rows, which are trained with all seeds before the others
LOG, ACCURACY, RESULTS, PICTURE = "log.txt", "accuracy.json", "linearization.json", "linearization.png"
# Pixels stay on the GPU and are augmented there, as in study.yaml. Only the last epoch is judged.
SHARED = (
    "data.in_memory=true",
    "data.augment_on_device=true",
    "run.compile=true",
    "log.tensorboard=false",
    "log.eval_epochs=40",
    "checkpoint.every_epochs=10",
)


@dataclass(frozen=True)
class Student:
    """One row of the table."""

    title: str
    settings: tuple[str, ...] = ()
    epochs: tuple[int, ...] = VARIANT_EPOCHS
    seeds: tuple[int, ...] = SEEDS[:1]
    transfer: str = "tiny_imagenet"  # the images that it learns from; it is always judged on Tiny ImageNet
    img_size: int = 64
    teacher: str = TEACHER  # of the package, or one of TEACHERS
    same: tuple[tuple[int, str], ...] = ()  # at these epochs it is the student of another row


# Trained here: rows of the grid.
TEACHERS = {"swin": grid.Run("tiny_imagenet", "softmax_swin_tiny", grid.MAIN_EPOCHS, seed=0, patch=4)}
INLINE, LINEAR, PLAIN = "model.attention=inline", "model.attention=linear", "model.local_residual=false"
# k-means and all anchors of all layers in one graph take minutes to compile.
MANY, UNCOMPILED = "model.anchors={}", "run.compile=false"
UNMATCHED, MATCHED, HALF_RATE = "match.steps=0", "match.steps=240", "optim.lr=4e-3"
RECIPES = ("matched", "half_rate")
MAIN = ("tangent", "inline")
# The residual starts at zero, and labels and images matter only to distillation. Layers are matched without labels.
AS_TANGENT, AS_INLINE, AS_LINEAR = (((CARRIED, row),) for row in ("tangent", "inline", "linear"))
STUDENTS = {
    "tangent": Student("tangent with residual", epochs=EPOCHS, seeds=SEEDS),
    "inline": Student("InLine with residual", (INLINE,), epochs=EPOCHS, seeds=SEEDS),
    "matched": Student("tangent, matched first", (MATCHED,), FIRST_EPOCHS, SEEDS),
    "half_rate": Student("tangent, half the rate", (HALF_RATE,), FIRST_EPOCHS, SEEDS),
    "tangent_4": Student("tangent, 4 anchors, with residual", (MANY.format(4), UNCOMPILED)),
    "tangent_16": Student("tangent, 16 anchors, with residual", (MANY.format(16), UNCOMPILED)),
    "tangent_plain": Student("tangent without residual", (PLAIN,), same=AS_TANGENT),
    "inline_plain": Student("InLine without residual", (INLINE, PLAIN), same=AS_INLINE),
    "inline_relu": Student("InLine with residual, φ = ReLU", (INLINE, "model.feature_map=relu")),
    "linear": Student("linear (ReLU) with residual", (LINEAR,)),
    "linear_plain": Student("linear (ReLU) without residual", (LINEAR, PLAIN), same=AS_LINEAR),
    **{
        f"hybrid_{count}": Student(f"tangent, {count} of 7 layers softmax", (f"model.keep_softmax=[auto:{count}]",))
        for count in (1, 2, 3)
    },
    # The control: the teacher itself, trained further by the same recipe.
    "softmax": Student("softmax, trained further", ("model.keep_softmax=[blocks.*]", PLAIN), (20,), SEEDS),
    "no_labels": Student("tangent, without labels", ("distill.labels=0",), same=((CARRIED, "tangent"), (0, "tangent"))),
    "imagenette": Student(
        "tangent, other images without labels", ("data.labels=false",), transfer="imagenette", same=AS_TANGENT
    ),
    "larger": Student("tangent, at 128 px", ("data.img_size=128",), img_size=128),
    "swin_tangent": Student("Swin-T: tangent with residual", teacher="swin"),
    "swin_inline": Student("Swin-T: InLine with residual", (INLINE,), teacher="swin"),
}


@dataclass(frozen=True)
class Run:
    row: str
    epochs: int
    seed: int

    @property
    def student(self) -> Student:
        return STUDENTS[self.row]

    @property
    def name(self) -> str:
        length = "carried" if self.epochs == CARRIED else f"e{self.epochs}"
        return f"{self.row}-{length}-s{self.seed}"

    @property
    def transfer(self) -> str:
        return self.student.transfer

    @property
    def img_size(self) -> int:
        return self.student.img_size

    @property
    def teacher(self) -> "TeacherRun | None":
        """None: it is in the package."""
        return TeacherRun(self.student.teacher) if self.student.teacher in TEACHERS else None

    def weights(self, out: Path) -> Path:
        """After the last epoch. STUDENT may hold an earlier one, chosen on the images that judge it."""
        folder = out / self.name
        if self.epochs == CARRIED:
            return folder / STUDENT
        return weights_file(folder / (DISTILL if self.epochs else MATCH))

    def arguments(self, paths: Mapping[str, str], out: Path, *, extra: Sequence[str] = ()) -> list[str]:
        """Arguments of `inline` that start or continue the run."""
        student, path = self.student, paths.get(self.transfer, self.transfer.upper())
        teacher = [TEACHER] if self.teacher is None else ["--weights", str(self.teacher.weights(out))]
        where = ["--data", path, "--output", str(out / self.name), "--resume", "auto"]
        length = ["--epochs", str(max(0, self.epochs)), "--seed", str(self.seed), "--no-report"]
        # These two lengths are not a matter of the row: one has no stage at all, and the other has the first alone.
        stages = {CARRIED: [UNMATCHED], 0: [MATCHED]}.get(self.epochs, [])
        settings = [*SHARED, *student.settings, *extra, *stages]
        return ["linearize", *teacher, *where, *length, *settings]


@dataclass(frozen=True)
class TeacherRun:
    """The training of a teacher that is not in the package."""

    row: str  # of TEACHERS
    transfer = "tiny_imagenet"
    img_size = 64
    teacher = None

    @property
    def name(self) -> str:
        return TEACHERS[self.row].name

    def weights(self, out: Path) -> Path:
        return weights_file(out / self.name)

    def arguments(self, paths: Mapping[str, str], out: Path, *, extra: Sequence[str] = ()) -> list[str]:
        """`extra` holds settings of every run; those that a training does not have are left out."""
        own = [setting for setting in extra if not setting.startswith(("match.", "distill.", "model."))]
        path = paths.get(self.transfer, self.transfer.upper())
        return TEACHERS[self.row].arguments(path, out, extra=own, recipe=grid.RECIPE)


def build_runs(rows: Sequence[str] | None = None, *, recorded: Collection[str] = ()) -> list[Run | TeacherRun]:
    """The runs that are not recorded, in the order of `_urgency`. A teacher comes right before its first student."""
    if unknown := sorted(set(rows or ()) - set(STUDENTS)):
        raise ValueError(f"there is no student {', '.join(unknown)}; expected some of {', '.join(STUDENTS)}")
    chosen = {name: student for name, student in STUDENTS.items() if rows is None or name in rows}
    runs = [run for name in chosen for run in runs_of(name)]
    ordered: list[Run | TeacherRun] = []
    for run in sorted((run for run in runs if run.name not in recorded), key=_urgency):
        if run.teacher is not None and run.teacher not in ordered:
            ordered.append(run.teacher)
        ordered.append(run)
    return ordered


def runs_of(row: str) -> list[Run]:
    """The runs of a row that are no other's. Without training all seeds are the same: the residual starts at zero."""
    student = STUDENTS[row]
    own = [epochs for epochs in student.epochs if epochs not in dict(student.same)]
    return [Run(row, n, seed) for seed in student.seeds for n in own if n != CARRIED or seed == student.seeds[0]]


def _urgency(run: Run) -> tuple[int, ...]:
    """First what the main rows need all seeds for, then the first seed of all rows, those of other teachers later.

    Of runs that are as urgent, the longest come first, so that the short ones fill the time at the end.
    """
    if run.row in MAIN and run.epochs in FIRST_EPOCHS:
        group = 0
    elif run.teacher is not None:
        group = 2
    elif run.row in RECIPES:
        group = 4
    else:
        group = 1 if run.seed == SEEDS[0] else 3
    return group, -run.epochs, run.seed


def make_runs(
    runs: Sequence[Run | TeacherRun],
    *,
    paths: Mapping[str, str],
    out: Path,
    device: torch.device,
    jobs: int = 1,
    minutes: float | None = None,
    extra: Sequence[str] = (),
    log: Callable[[str], None] = print,
) -> list[str]:
    """Train the runs that are not finished, and evaluate each. Returns the names of failed ones.

    jobs: runs at a time. Times of runs that share a device are no measurements.
    minutes: starts no further run after this time.
    """
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}; expected 1 or more")
    needed = {"tiny_imagenet", *(run.transfer for run in runs)}
    if missing := sorted(needed - paths.keys()):
        raise ValueError(f"no data for {', '.join(missing)}: give --data {missing[0]}=FOLDER (several: with commas)")
    start, judging, cache = time.monotonic(), threading.Lock(), CompileCache(out)
    done: dict[str, Future[bool]] = {}

    def make(run: Run | TeacherRun, number: int) -> bool:
        """Whether the run has not failed"""
        folder = out / run.name
        if (folder / ACCURACY).exists():
            return True
        if run.teacher is not None:
            done[run.teacher.name].result()  # it began before
        if minutes is not None and time.monotonic() - start > 60 * minutes:
            return True
        if run.teacher is not None and not (out / run.teacher.name / ACCURACY).exists():
            log(f"{run.name} is left out: its teacher {run.teacher.name} is not trained")
            return False
        arguments = run.arguments(paths, out, extra=extra)
        log(f"[{number}/{len(runs)}] {command_line(arguments)}")
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOG, "ab") as file:
            stage, words = run.weights(out).parents[1], [sys.executable, "-m", "inline_attention", *arguments]
            failed = cache.run(words, model=f"{run.row}-{stage.name}", metrics=stage / METRICS, log=file)
        if failed:
            log(f"{run.name} failed: see {folder / LOG}")
            return False
        version = describe_environment()["inline-attention"]
        result: dict[str, Any] = {"training_seconds": training_seconds(folder), "jobs": jobs, "version": version}
        with judging:
            result["top1"] = judge(run.weights(out), paths["tiny_imagenet"], run.img_size, device=device)
        write_atomically(folder / ACCURACY, json.dumps(result).encode())
        log(f"{run.name}: top-1 {result['top1']:.2f}% in {result['training_seconds']:.0f} s")
        return True

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for number, run in enumerate(runs, start=1):
                done[run.name] = pool.submit(make, run, number)
            failed = [name for name, future in done.items() if not future.result()]
        except BaseException:  # such as Ctrl-C, which reaches the running ones too: they save
            cache.closed = True
            pool.shutdown(cancel_futures=True)
            raise
    if left := sum(not (out / run.name / ACCURACY).exists() for run in runs) - len(failed):
        log(f"the time is up: the next call makes the other {left} runs")
    return failed


def training_seconds(folder: Path) -> float:
    """The time in the training loops of a run, of all its stages and calls."""
    return sum(json.loads(path.read_text())["seconds"] for path in folder.glob(f"**/{SUMMARY}"))


def judge(weights: Path | str, data: str, img_size: int | None = None, *, device: torch.device) -> float:
    """Top-1 on the validation images of Tiny ImageNet; `weights` is a file or the name of a model of the package."""
    name = None if isinstance(weights, Path) else weights
    size = None if img_size is None else (img_size, img_size)
    classifier = load_classifier(name, str(weights) if name is None else "pretrained", img_size=size)
    config = classifier.data
    config.path, config.batch_size = data, 256
    loader = open_eval_data(config, class_names=classifier.class_names)
    return evaluate(classifier.model.to(device), loader, device=device).top1


@dataclass(frozen=True)
class Result:
    """A finished run of a student."""

    row: str
    epochs: int
    seed: int
    top1: float
    seconds: float  # in the training loops of all its calls
    jobs: int  # runs at a time
    version: str = "not recorded"  # of this package

    @property
    def name(self) -> str:
        return Run(self.row, self.epochs, self.seed).name


def collect(out: Path, onto: Path | None = None) -> list[Result]:
    """The finished runs in a folder and, where it has none, those of a record. They are in the order of the table."""
    recorded = [] if onto is None else [Result(**entry) for entry in json.loads(onto.read_text())["students"]]
    known = {result.name: result for result in recorded}
    for row in STUDENTS:
        for run in runs_of(row):
            if (path := out / run.name / ACCURACY).exists():
                found = json.loads(path.read_text())
                seconds = found.pop("training_seconds")
                known[run.name] = Result(run.row, run.epochs, run.seed, seconds=seconds, **found)
    rows = list(STUDENTS)
    return sorted(known.values(), key=lambda result: (rows.index(result.row), result.epochs, result.seed))


def cells_of(results: Sequence[Result]) -> dict[tuple[str, int], list[float]]:
    """Top-1 of each seed, by row and epochs. Rows that are the same student at some epochs share the cell."""
    cells: dict[tuple[str, int], list[float]] = {}
    for result in results:
        cells.setdefault((result.row, result.epochs), []).append(result.top1)
    begun = {row for row, _ in cells}
    for row, student in STUDENTS.items():
        for epochs, other in student.same if row in begun else ():
            if (other, epochs) in cells:
                cells[row, epochs] = cells[other, epochs]
    return cells


def spread(top1: Sequence[float]) -> str:
    mean = f"{statistics.mean(top1):.2f}"
    return f"{mean} ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else mean


def write_results(out: Path, *, scratch: Mapping[str, float], onto: Path | None = None) -> str:
    """Write linearization.json and linearization.png. Returns the table as markdown.

    Args:
        scratch: top-1 of the package's models, which were trained from scratch.
        onto: an earlier linearization.json, whose runs are not in `out`.
    """
    results = collect(out, onto)
    teachers = {name: out / run.name / ACCURACY for name, run in TEACHERS.items()}
    trained = {name: json.loads(path.read_text()) for name, path in teachers.items() if path.exists()}
    before = {} if onto is None else json.loads(onto.read_text())
    teachers_of = {**before.get("teachers", {}), **trained}
    record = before | {"environment": describe_environment(), "teachers": teachers_of, "scratch": dict(scratch)}
    record["teacher"] = TEACHER_SHA256
    record["students"] = [vars(result) for result in results]
    write_atomically(out / RESULTS, json.dumps(record, indent=1).encode())
    cells = cells_of(results)
    draw(cells, scratch, out / PICTURE)
    rows = []
    for row in (row for row in STUDENTS if any((row, epochs) in cells for epochs in EPOCHS)):
        of_epochs = [spread(cells[row, epochs]) if (row, epochs) in cells else "" for epochs in EPOCHS]
        rows.append([STUDENTS[row].title, *of_epochs])
    text = table(["top-1 %, after epochs of distillation", *map(column, EPOCHS)], rows)
    lines = [f"{name}, a teacher trained here: {result['top1']:.2f}" for name, result in teachers_of.items()]
    return "\n\n".join([text, *lines])


def column(epochs: int) -> str:
    return {CARRIED: "carried over", 0: "matched"}.get(epochs, str(epochs))


def draw(cells: Mapping[tuple[str, int], Sequence[float]], scratch: Mapping[str, float], path: Path) -> None:
    """Accuracy against epochs, with a line for each model from scratch."""
    from matplotlib.figure import Figure

    from inline_attention.training.plots import save_figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for row in dict.fromkeys(row for row, _ in cells if STUDENTS[row].teacher == TEACHER):
        shown = [(epochs, statistics.mean(cells[row, epochs])) for epochs in EPOCHS if (row, epochs) in cells]
        axes.plot(*zip(*shown, strict=True), marker="o", label=STUDENTS[row].title)
    for number, (name, top1) in enumerate(scratch.items()):
        axes.axhline(top1, color="0.4", linestyle=("-", "--", ":")[number % 3], label=f"{name}, from scratch")
    axes.set(xlabel="epochs of distillation", ylabel="top-1 (%)", title=f"Students of {TEACHER}")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(EPOCHS, [column(epochs) for epochs in EPOCHS], fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    save_figure(figure, path)


def from_scratch(data: str, *, device: torch.device) -> dict[str, float]:
    return {name: judge(name, data, device=device) for name in SHIPPED}
