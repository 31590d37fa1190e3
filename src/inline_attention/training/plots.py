"""Pictures of a run. Imports matplotlib, which is optional: import this module where a picture is drawn."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from inline_attention.printing import printable
from inline_attention.training.run_folder import write_atomically
from inline_attention.training.task import Headline

TRAIN_COLOUR, EVAL_COLOUR, AVERAGE_COLOUR = "#4c72b0", "#c44e52", "#55a868"


def draw_curves(records: Sequence[Mapping[str, Any]], path: Path, *, headline: Headline) -> None:
    """Loss, the headline figure and learning rate over the epochs, from the lines of metrics.jsonl."""
    shown, averaged = f"val_{headline.key}", f"ema_{headline.key}"
    steps = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, rate = figure.subplots(1, 3)

    loss.plot(*_series(steps, "loss"), color=TRAIN_COLOUR, label="training")
    if any("val_loss" in record for record in evaluations):
        loss.plot(*_series(evaluations, "val_loss"), color=EVAL_COLOUR, marker=".", label="validation")
    loss.set(title="Loss", xlabel="epoch", ylim=(0, None))
    loss.legend()

    accuracy.plot(*_series(evaluations, shown), color=EVAL_COLOUR, marker=".", label="weights")
    if any(record.get(averaged) is not None for record in evaluations):
        accuracy.plot(*_series(evaluations, averaged), color=AVERAGE_COLOUR, marker=".", label="moving average")
        accuracy.legend()
    best = max(_series(evaluations, shown)[1], default=None)
    title = f"Validation {headline.label} (%)" + ("" if best is None else f", best {best:.2f}")
    accuracy.set(title=title, xlabel="epoch")

    rate.plot(*_series(steps, "lr"), color=TRAIN_COLOUR)
    rate.set(title="Learning rate", xlabel="epoch", ylim=(0, None))
    for axes in (loss, accuracy, rate):
        axes.grid(alpha=0.3)
    _save(figure, path)


def draw_confusion(counts: torch.Tensor, class_names: Sequence[str], path: Path) -> None:
    """counts (true class, predicted class): shares of each true class as colour, counts as text for few classes."""
    classes = len(counts)
    names = [_label(name) for name in class_names]
    side = 2.5 + 0.35 * classes + 0.08 * max(map(len, names))  # inches: the matrix and the names beside it
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    picture = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, ax=axes, label="share of the true class")
    axes.set(xlabel="predicted", ylabel="true", title=f"{int(counts.sum())} validation images")
    axes.set_xticks(range(classes), names, parse_math=False)  # a name may hold dollar signs
    axes.set_yticks(range(classes), names, parse_math=False)
    figure.draw_without_rendering()  # only now is the width of the names known
    labels = axes.get_xticklabels()
    boxes = [label.get_window_extent() for label in labels]
    if any(right.x0 - left.x1 < 4 for left, right in itertools.pairwise(boxes)):  # pixels
        for label in labels:
            label.set_rotation(90)
    if classes <= 20:
        for row in range(classes):
            for column in range(classes):
                if count := int(counts[row, column]):
                    colour = "white" if shares[row, column] > 0.5 else "black"
                    axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
    _save(figure, path)


def _label(name: str) -> str:
    """A class name for a figure: at most 24 characters, none of them a control character."""
    text = printable(name)
    return text if len(text) <= 24 else f"{text[:23]}…"


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    chosen = [record for record in records if record.get(key) is not None]
    return [record["epoch"] for record in chosen], [record[key] for record in chosen]


def _save(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(path, picture.getvalue())
