"""Helpers for the figures of all analyses. Imports matplotlib, which is optional: import this module only to draw."""

import itertools
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .divergence import DIVERGED_MASS

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'inline-attention[train]'") from error

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860", "#da8bc3", "#8c8c8c")


def save(figure: Figure, path: Path) -> None:
    """PNG, and SVG beside it."""
    figure.savefig(path.with_suffix(".png"), dpi=110)
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
