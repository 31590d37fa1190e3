"""The confusion matrix as a figure. Import this module only to draw, because matplotlib is optional."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from inline_attention.printing import printable
from inline_attention.training.plots import save_figure


def draw_confusion(counts: torch.Tensor, class_names: Sequence[str], path: Path) -> None:
    """counts (true class, predicted class). Colours show shares of the true class; small matrices also show counts."""
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
    figure.draw_without_rendering()  # computes the width of the names
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
    save_figure(figure, path)


def _label(name: str) -> str:
    """A class name for a figure: at most 24 characters, none of them a control character."""
    text = printable(name)
    return text if len(text) <= 24 else f"{text[:23]}…"
