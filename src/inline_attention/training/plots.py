"""Figures of a run. This module imports matplotlib, which is optional: import it only to draw."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from inline_attention.training.files import write_atomically
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
    save_figure(figure, path)


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    chosen = [record for record in records if record.get(key) is not None]
    return [record["epoch"] for record in chosen], [record[key] for record in chosen]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG file. An existing file is replaced atomically."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(path, picture.getvalue())
