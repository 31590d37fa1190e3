"""Students of one teacher: `softmax_deit_study` linearised in several ways, and distilled for 0 to 40 epochs.

Each run is an ordinary `inline linearize` with the recipe of that name. A run is finished when its student exists. A
stopped run continues in the next call.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inline_attention.data import open_eval_data
from inline_attention.models.shipped import SHIPPED
from inline_attention.printing import table
from inline_attention.tasks.classification.classifier import load_classifier
from inline_attention.tasks.classification.evaluation import evaluate
from inline_attention.tasks.linearization.stages import STUDENT
from inline_attention.training.run_folder import write_atomically
from study.expansion import TEACHER
from study.grid import SEEDS, command_line

EPOCHS = (0, 1, 5, 10, 20, 40)
VARIANT_EPOCHS = (0, 20)
LOG, ACCURACY, RESULTS, PICTURE = "log.txt", "accuracy.json", "linearization.json", "linearization.png"
# Pixels stay on the GPU and are augmented there, as in study.yaml.
SHARED = ("data.in_memory=true", "data.augment_on_device=true", "run.compile=true", "log.tensorboard=false")


@dataclass(frozen=True)
class Student:
    """One row of the table."""

    title: str
    settings: tuple[str, ...] = ()
    epochs: tuple[int, ...] = VARIANT_EPOCHS
    seeds: tuple[int, ...] = SEEDS[:1]
    transfer: str = "tiny_imagenet"  # the images that it learns from; it is always judged on Tiny ImageNet
    img_size: int = 64


INLINE, LINEAR, PLAIN = "model.attention=inline", "model.attention=linear", "model.local_residual=false"
STUDENTS = {
    "tangent": Student("tangent with residual", epochs=EPOCHS, seeds=SEEDS),
    "inline": Student("InLine with residual", (INLINE,), epochs=EPOCHS, seeds=SEEDS),
    "tangent_plain": Student("tangent without residual", (PLAIN,)),
    "inline_plain": Student("InLine without residual", (INLINE, PLAIN)),
    "inline_relu": Student("InLine with residual, φ = ReLU", (INLINE, "model.feature_map=relu")),
    "linear": Student("linear (ReLU) with residual", (LINEAR,)),
    "linear_plain": Student("linear (ReLU) without residual", (LINEAR, PLAIN)),
    **{
        f"hybrid_{count}": Student(f"tangent, {count} of 7 layers softmax", (f"model.keep_softmax=[auto:{count}]",))
        for count in (1, 2, 3)
    },
    "no_labels": Student("tangent, without labels", ("distill.labels=0",)),
    "imagenette": Student("tangent, other images without labels", ("data.labels=false",), transfer="imagenette"),
    "larger": Student("tangent, at 128 px", ("data.img_size=128",), img_size=128),
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
        return f"{self.row}-e{self.epochs}-s{self.seed}"

    def arguments(self, paths: Mapping[str, str], out: Path, *, extra: Sequence[str] = ()) -> list[str]:
        """Arguments of `inline` that start or continue the run."""
        transfer = self.student.transfer
        where = ["--data", paths.get(transfer, transfer.upper()), "--output", str(out / self.name), "--resume", "auto"]
        length = ["--epochs", str(self.epochs), "--seed", str(self.seed), "--no-report"]
        return ["linearize", TEACHER, *where, *length, *SHARED, *self.student.settings, *extra]


def build_runs(rows: Sequence[str] | None = None) -> list[Run]:
    """The first seed of all rows, the shortest runs first, then the other seeds."""
    if unknown := sorted(set(rows or ()) - set(STUDENTS)):
        raise ValueError(f"there is no student {', '.join(unknown)}; expected some of {', '.join(STUDENTS)}")
    chosen = {name: student for name, student in STUDENTS.items() if rows is None or name in rows}
    runs = [Run(name, n, seed) for name, student in chosen.items() for seed in student.seeds for n in student.epochs]
    return sorted(runs, key=lambda run: (run.seed, run.epochs))


def make_runs(
    runs: Sequence[Run],
    *,
    paths: Mapping[str, str],
    out: Path,
    device: torch.device,
    minutes: float | None = None,
    extra: Sequence[str] = (),
    log: Callable[[str], None] = print,
) -> list[str]:
    """Train the runs that are not finished, one after the other, and evaluate each. Returns the names of failed ones.

    minutes: starts no further run after this time.
    """
    needed = {"tiny_imagenet", *(run.student.transfer for run in runs)}
    if missing := sorted(needed - paths.keys()):
        raise ValueError(f"no data for {', '.join(missing)}: give --data {missing[0]}=FOLDER (several: with commas)")
    failed, start = [], time.monotonic()
    for number, run in enumerate(runs, start=1):
        folder = out / run.name
        if (folder / ACCURACY).exists():
            continue
        if minutes is not None and time.monotonic() - start > 60 * minutes:
            log("the time is up: the next call continues")
            break
        arguments = run.arguments(paths, out, extra=extra)
        log(f"[{number}/{len(runs)}] {command_line(arguments)}")
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        with open(folder / LOG, "ab") as file:
            done = subprocess.run([sys.executable, "-m", "inline_attention", *arguments], stdout=file, stderr=file)
        if done.returncode:
            failed.append(run.name)
            log(f"{run.name} failed: see {folder / LOG}")
            continue
        result: dict[str, Any] = {"top1": judge(folder / STUDENT, paths["tiny_imagenet"], run.student, device=device)}
        result["seconds"] = round(time.monotonic() - begun, 1)
        write_atomically(folder / ACCURACY, json.dumps(result).encode())
        log(f"{run.name}: top-1 {result['top1']:.2f}% in {result['seconds']:.0f} s")
    return failed


def judge(weights: Path | str, data: str, student: Student | None = None, *, device: torch.device) -> float:
    """Top-1 on the validation images of Tiny ImageNet; `weights` is a file or the name of a model of the package."""
    name = None if isinstance(weights, Path) else weights
    size = None if student is None else (student.img_size, student.img_size)
    classifier = load_classifier(name, str(weights) if name is None else "pretrained", img_size=size)
    config = classifier.data
    config.path, config.batch_size = data, 256
    loader = open_eval_data(config, class_names=classifier.class_names)
    return evaluate(classifier.model.to(device), loader, device=device).top1


@dataclass(frozen=True)
class Cell:
    """The runs of one row and length."""

    row: str
    epochs: int
    top1: list[float]  # of each seed

    def __str__(self) -> str:
        mean = f"{statistics.mean(self.top1):.2f}"
        return f"{mean} ± {statistics.stdev(self.top1):.2f}" if len(self.top1) > 1 else mean


def collect(out: Path) -> Iterator[Cell]:
    """The finished runs in a folder, in the order of the table."""
    for row, student in STUDENTS.items():
        for epochs in student.epochs:
            files = [out / Run(row, epochs, seed).name / ACCURACY for seed in student.seeds]
            found = [json.loads(path.read_text())["top1"] for path in files if path.exists()]
            if found:
                yield Cell(row, epochs, found)


def write_results(out: Path, *, scratch: Mapping[str, float]) -> str:
    """Write linearization.json and linearization.png. Returns the table as markdown.

    scratch: top-1 of the package's models, which were trained from scratch.
    """
    cells = list(collect(out))
    record = {"scratch": dict(scratch), "students": [vars(cell) for cell in cells]}
    write_atomically(out / RESULTS, json.dumps(record, indent=1).encode())
    draw(cells, scratch, out / PICTURE)
    rows = []
    for row in dict.fromkeys(cell.row for cell in cells):
        of_epochs = {cell.epochs: str(cell) for cell in cells if cell.row == row}
        rows.append([STUDENTS[row].title, *(of_epochs.get(epochs, "") for epochs in EPOCHS)])
    return table(["top-1 %, after epochs of distillation", *map(str, EPOCHS)], rows)


def draw(cells: Sequence[Cell], scratch: Mapping[str, float], path: Path) -> None:
    """Accuracy against epochs, with a line for each model from scratch."""
    from matplotlib.figure import Figure

    from inline_attention.training.plots import save_figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for row in dict.fromkeys(cell.row for cell in cells):
        shown = [(cell.epochs, statistics.mean(cell.top1)) for cell in cells if cell.row == row]
        axes.plot(*zip(*shown, strict=True), marker="o", label=STUDENTS[row].title)
    for number, (name, top1) in enumerate(scratch.items()):
        axes.axhline(top1, color="0.4", linestyle=("-", "--", ":")[number % 3], label=f"{name}, from scratch")
    axes.set(xlabel="epochs of distillation", ylabel="top-1 (%)", title=f"Students of {TEACHER}")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(EPOCHS, [str(epochs) for epochs in EPOCHS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    save_figure(figure, path)


def from_scratch(data: str, *, device: torch.device) -> dict[str, float]:
    return {name: judge(name, data, device=device) for name in SHIPPED}
