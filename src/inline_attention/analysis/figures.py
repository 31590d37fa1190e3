"""Helpers for the figures of all analyses. Imports matplotlib, which is optional: import this module only to draw."""

import itertools
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .divergence import DIVERGED_MASS

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'inline-attention[train]'") from error

WIDTH = 9.0  # inches: text of 8 points and more stays legible where a page shows the figure 800 pixels wide
# Okabe and Ito's colours, which colour-blind people tell apart. Markers tell lines apart in print too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c8c8c")
MARKERS = "os^Dv<>P"


def styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each model, the same in every figure of a run."""
    pairs = itertools.cycle(zip(COLOURS, MARKERS, strict=True))
    return {label: dict(color=colour, marker=marker) for label, (colour, marker) in zip(labels, pairs, strict=False)}


def save(figure: Figure, path: Path) -> None:
    """PNG, and SVG beside it."""
    figure.savefig(path.with_suffix(".png"), dpi=150, pil_kwargs={"optimize": True})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def new_figure(width: float, height: float) -> Figure:
    """A figure of this width and height in inches. It needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_caption(figure: Figure, text: str) -> None:
    """Add a caption under a figure, wrapped to its width."""
    columns = int(16 * figure.get_figwidth())
    lines = itertools.chain.from_iterable(textwrap.wrap(line, columns) for line in text.splitlines())
    figure.supxlabel("\n".join(lines), fontsize=8, color="0.35")


def add_legend(figure: Figure, axes: Any) -> None:
    """One legend above all panels, of what is drawn in one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 3), fontsize=9, frameon=False)


def with_grid(figure: Figure, *, axis: Any = "both") -> Figure:
    """Add grid lines, and use whole numbers on axes that count layers."""
    for axes in figure.axes:
        if axes.get_xlabel() == "layer":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3, axis=axis)
        axes.set_axisbelow(True)
    return figure


def images_and_divergence(results: Mapping[str, Any]) -> str:
    """For captions: the number of images, and of rows that diverged."""
    images = {result.summary()["images"] for result in results.values()}
    text = f"Images: {', '.join(map(str, sorted(images)))}."
    diverged = [f"{label} {r.diverged_rows}/{r.rows}" for label, r in results.items() if r.diverged_rows]
    if diverged:
        text += f"\nRows that diverged in a division by almost zero (Σ|w| > {DIVERGED_MASS:g}): {', '.join(diverged)}."
    return text
