"""Figures 3 and 4 of the paper: the attention of one query on the token map, layer by layer."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn

from inline_attention.analysis.base import LayerAnalysis, OnImages, Subject, Table, option
from inline_attention.analysis.hooks import capture
from inline_attention.analysis.report import NOT_IN_JSON

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CENTRE = (0.5, 0.5)


@dataclass(frozen=True)
class LayerMap:
    name: str
    kind: str
    query: tuple[int, int]  # (row, column) on the layer's token map
    grid: tuple[int, int]  # of that map
    weights: np.ndarray  # (heads, height, width) of the keys' map; NaN outside the query's window; may be negative
    with_local: np.ndarray | None  # the same and the local terms, averaged over the channels of a head; None: none


@dataclass(frozen=True)
class MapsResult:
    """The attention of one query of one image, layer by layer."""

    query: tuple[float, float]  # from the top and the left, 0 to 1
    layers: list[LayerMap]
    picture: np.ndarray | None = field(default=None, metadata=NOT_IN_JSON)  # (H, W) or (H, W, 3) in 0 … 1


def attention_maps(
    model: nn.Module,
    image: Tensor,
    *,
    query: tuple[float, float] = CENTRE,
    layers: Sequence[str | int] | None = None,
    picture: np.ndarray | None = None,
) -> MapsResult:
    """The weights of the query at a position of the image (C, H, W), over the whole image.

    Args:
        query: (from the top, from the left), each in 0 … 1.
        layers: names or indices; None for all.
        picture: the image to draw, stored with the result.
    """
    if not all(0 <= place <= 1 for place in query):
        raise ValueError(f"query {query[0]}, {query[1]}; expected two numbers from 0 (top, left) to 1 (bottom, right)")
    found = []
    for record in capture(model, image[None], layers=layers):
        height, width = record.map_grid
        place = (min(int(query[0] * height), height - 1), min(int(query[1] * width), width - 1))
        local = record.row(0, place, local=True).cpu().numpy() if record.local else None
        weights = record.row(0, place).cpu().numpy()
        found.append(LayerMap(record.name, record.kind, place, record.map_grid, weights, local))
    return MapsResult(query, found, picture)


@dataclass(frozen=True, kw_only=True)
class Maps(LayerAnalysis):
    """What does one query attend to? Its weights over the token map, layer by layer. InLine's weights may be negative.
    The local residual is linear in v too: its taps, averaged over channels, are added in the second line.
    """

    images: ClassVar[int] = 2
    drawn_layers: ClassVar[int] = 4  # evenly spaced; the JSON file has all of them

    query: tuple[float, float] = option(CENTRE, "position from the top and the left, 0 to 1", type=float, nargs=2)
    head: int | None = option(None, "one head (default: the mean of all)", type=int)

    def count(self, images: int) -> int:
        return min(images, self.images)

    def measure(self, subject: Subject, on_images: OnImages) -> list[MapsResult]:
        found = []
        for image in itertools.islice((image for batch in subject.images() for image in batch), self.images):
            picture = subject.picture(image)
            result = attention_maps(subject.model, image, query=self.query, layers=self.layers, picture=picture)
            heads = min(len(layer.weights) for layer in result.layers)
            if self.head is not None and not 0 <= self.head < heads:
                raise ValueError(f"head {self.head} is not in every layer; expected 0 to {heads - 1}")
            found.append(result)
            on_images(1)
        if not found:
            raise ValueError("there are no images to draw maps of")
        return found

    def summarise(self, result: list[MapsResult]) -> dict[str, Any]:
        return dict(images=len(result), layers=len(result[0].layers))

    def table(self, results: Mapping[str, list[MapsResult]]) -> Table:
        """The range of the weights for each layer and head."""
        lines = [
            (f"{label}, image {n}", layer.name, layer.kind, head, *_range(weights))
            for label, found in results.items()
            for n, result in enumerate(found)
            for layer in result.layers
            for head, weights in enumerate(layer.weights)
        ]
        return ("model", "layer", "attention", "head", "smallest_weight", "largest_weight", "sum_on_map"), lines

    def draw(self, results: Mapping[str, list[MapsResult]]) -> "Figure":
        """The images side by side. Each has a line of maps for every model, and a second line with local terms."""
        from inline_attention.analysis import figures

        count = max(map(len, results.values()))
        by_image = [
            [line for label, found in results.items() if n < len(found) for line in self._lines(label, found[n])]
            for n in range(count)
        ]
        rows = max(map(len, by_image))
        columns = 1 + max(len(line.maps) for lines in by_image for line in lines)
        figure = figures.new_figure(max(4.0, columns * count), max(2.8, 1.3 * rows + 0.8))
        for part, lines in zip(figure.subfigures(1, count, squeeze=False)[0], by_image, strict=True):
            for row, line in enumerate(lines):
                first, *places = (
                    part.add_subplot(rows, columns, row * columns + column, xticks=[], yticks=[])
                    for column in range(1, 2 + len(line.maps))
                )
                _draw_picture(first, line)
                for place, (layer, weights) in zip(places, line.maps, strict=True):
                    _draw_map(place, layer, weights.mean(0) if self.head is None else weights[self.head])
        what = "mean of all heads" if self.head is None else f"head {self.head}"
        figures.add_caption(
            figure,
            f"Weights of the query (cross), {what}. Where some are negative: blue negative, white zero, red positive; "
            "else from the smallest (white) to the largest (red). Below: the range of each map, in %. "
            "Grey: outside the query's window. Local terms: their taps averaged over channels.",
        )
        return figure

    def _lines(self, label: str, result: MapsResult) -> list["_Line"]:
        count = len(result.layers)
        places = np.unique(np.linspace(0, count - 1, min(self.drawn_layers, count)).round().astype(int))
        chosen = [result.layers[i] for i in places]
        lines = [_Line(label, result, [(layer, layer.weights) for layer in chosen])]
        if any(layer.with_local is not None for layer in chosen):
            both = [(layer, layer.weights if layer.with_local is None else layer.with_local) for layer in chosen]
            lines.append(_Line(f"{label}\nwith local terms", result, both))
        return lines


@dataclass(frozen=True)
class _Line:
    label: str
    result: MapsResult
    maps: list[tuple[LayerMap, np.ndarray]]


def _range(weights: np.ndarray) -> tuple[float, float, float]:
    return float(np.nanmin(weights)), float(np.nanmax(weights)), float(np.nansum(weights))


def _range_text(weights: np.ndarray) -> str:
    """The smallest and the largest weight in per cent, with two digits of the one further from zero"""
    ends = 100 * np.nanmin(weights), 100 * np.nanmax(weights)
    digits = max(0, 1 - math.floor(math.log10(max(*map(abs, ends), 1e-9))))
    return " to ".join(f"{round(float(end), digits) + 0.0:.{digits}f}" for end in ends).replace("-", "−")  # no −0


def _draw_picture(axes: Any, line: _Line) -> None:
    picture, query = line.result.picture, line.result.query
    assert picture is not None
    axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
    at = (query[1] * picture.shape[1] - 0.5, query[0] * picture.shape[0] - 0.5)
    for colour, width in (("white", 5), ("red", 2.5)):  # visible on any picture
        axes.plot(*at, "+", color=colour, markersize=12 + width, markeredgewidth=width)
    axes.set_ylabel(line.label, fontsize=9)


def _draw_map(axes: Any, layer: LayerMap, weights: np.ndarray) -> None:
    from matplotlib.patches import Rectangle

    axes.set_facecolor("0.85")
    if np.nanmin(weights) < 0:
        bound = float(np.nanmax(np.abs(weights)))
        colours: dict[str, Any] = dict(cmap="RdBu_r", vmin=-bound, vmax=bound)
    else:
        colours = dict(cmap="Reds")
    axes.imshow(weights, interpolation="nearest", **colours)
    y, x = (place * n / size for place, n, size in zip(layer.query, weights.shape, layer.grid, strict=True))
    axes.add_patch(Rectangle((int(x) - 0.5, int(y) - 0.5), 1, 1, fill=False, edgecolor="k", linewidth=1.2))
    axes.set_xlabel(_range_text(weights), fontsize=8)
    axes.set_title(layer.name.removesuffix(".attn"), fontsize=9)
