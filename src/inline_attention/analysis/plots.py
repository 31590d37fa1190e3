"""Pictures of the results. Imports matplotlib, which is optional: import this module where a picture is drawn."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullLocator

from .confusion import ConfusionResult
from .divergence import DIVERGED_MASS
from .injectivity import InjectivityResult, Panel, Rows
from .locality import LocalityResult
from .maps import LayerMap, MapsResult
from .masking import MaskingResult
from .rank import RankResult

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860", "#da8bc3", "#8c8c8c")
QUERY_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")
TITLES = {"softmax": "softmax", "linear": "linear", "inline": "InLine"}


def save(figure: Figure, path: Path) -> None:
    """PNG, and SVG beside it."""
    figure.savefig(path.with_suffix(".png"), dpi=110)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _caption(figure: Figure, text: str) -> None:
    columns = int(16 * figure.get_figwidth())
    lines = itertools.chain.from_iterable(textwrap.wrap(line, columns) for line in text.splitlines())
    figure.supxlabel("\n".join(lines), fontsize=8, color="0.35")


def draw_injectivity(result: InjectivityResult) -> Figure:
    """A line for each φ: the plane, and the rows that each attention gives the four queries."""
    figure = _figure(13, 3.6 * len(result.panels) + 0.4)
    axes = figure.subplots(len(result.panels), 4, squeeze=False, width_ratios=(1.15, 1, 1, 1))
    for line, panel in zip(axes, result.panels, strict=True):
        _draw_plane(line[0], panel)
        for place, (kind, rows) in zip(line[1:], panel.rows.items(), strict=True):
            _draw_rows(place, kind, rows)
    weight, bias = result.parameters["affine_weight"], result.parameters["affine_bias"]
    _caption(
        figure,
        f"Softmax compares q and k as they are, linear and InLine attention φ(q) and φ(k); s = d^-½. "
        f"A = {list(map(list, weight))}, b = {list(bias)}.\n"
        f"Equal: no entry of two rows differs by {result.tolerance:g} or more.",
    )
    return figure


def _draw_plane(axes: Any, panel: Panel) -> None:
    for i, (x, y) in enumerate(panel.keys, start=1):
        axes.annotate("", (x, y), (0, 0), arrowprops=dict(arrowstyle="->", color="0.6"))
        axes.annotate(f"k{i}", (x, y), xytext=(4, 1), textcoords="offset points", color="0.35")
    for i, (x, y) in enumerate(panel.queries):
        colour = QUERY_COLOURS[i % len(QUERY_COLOURS)]
        axes.plot(x, y, "o", color=colour, markersize=6)
        axes.annotate(f"q{i + 1}", (x, y), xytext=(6, -4), textcoords="offset points", color=colour)
    axes.plot(*panel.queries.T, color="0.3", linewidth=0.8, linestyle=":")
    points = np.concatenate([panel.queries, panel.keys, [[0, 0]]])
    (left, bottom), (right, top) = points.min(0) - 0.1, points.max(0) + 0.25
    axes.set(xlim=(left, right), ylim=(bottom, top), title=f"φ(x) = {panel.feature_map}")
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    queries, keys = ("   ".join(f"({x:.2f}, {y:.2f})" for x, y in vectors) for vectors in (panel.queries, panel.keys))
    axes.set_xlabel(f"q: {queries}\nk: {keys}", fontsize=7)


def _draw_rows(axes: Any, kind: str, rows: Rows) -> None:
    weights = rows.weights
    darkest = max(0.55, weights.max())
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=darkest)
    for i, j in np.ndindex(*weights.shape):
        colour = "white" if weights[i, j] > 0.6 * darkest else "black"
        axes.text(j, i, f"{weights[i, j]:.2f}", ha="center", va="center", fontsize=10, color=colour)
    axes.set_xticks(range(weights.shape[1]), [f"k{j + 1}" for j in range(weights.shape[1])])
    axes.set_yticks(range(weights.shape[0]), [f"q{i + 1}" for i in range(weights.shape[0])])
    for i, label in enumerate(axes.get_yticklabels()):
        label.set_color(QUERY_COLOURS[i % 4])
    if rows.verdict == "all equal":
        detail = f"rows differ by at most {rows.largest_difference:.0e}"
    else:
        detail = f"rows differ by at least {rows.smallest_difference:.2g}"
    axes.set_title(f"{TITLES.get(kind, kind)}: {rows.verdict}\n({detail})", fontsize=10)


def draw_confusion(results: Mapping[str, ConfusionResult]) -> Figure:
    """Confused pairs against the thresholds; how many an image has, and in which layers they are."""
    figure = _figure(15, 4.4)
    over_thresholds, histogram, by_layer = figure.subplots(1, 3)
    first = next(iter(results.values()))
    most = max(int(result.count_by_image().max()) for result in results.values())
    edges = histogram_edges(most)
    labels = ["0", *(f"{a}–{b - 1}" if b > a + 1 else str(a) for a, b in itertools.pairwise(edges[1:]))]
    width = 0.8 / len(results)
    for i, (label, result) in enumerate(results.items()):
        colour = COLOURS[i % len(COLOURS)]
        for rho, style, counts in zip(result.rhos, itertools.cycle("-:"), result.per_million.T, strict=False):
            name = f"{label}, ρ = {rho:g}"
            over_thresholds.plot(result.taus, counts, marker="o", linestyle=style, color=colour, label=name)
        shares = np.histogram(result.count_by_image(), bins=edges)[0] / len(result.by_image)
        place = np.arange(len(shares)) + (i - (len(results) - 1) / 2) * width
        histogram.bar(place, 100 * shares, width, color=colour, label=label)
        share = 1e6 * result.share_by_layer(result.tau, result.rho)
        by_layer.plot(range(1, len(share) + 1), share, marker="o", color=colour, label=label)
    over_thresholds.set_xscale("log")
    over_thresholds.set_xticks(first.taus, [f"{tau:g}" for tau in first.taus])
    over_thresholds.xaxis.set_minor_locator(NullLocator())
    for axes in (over_thresholds, by_layer):
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=-0.1)
    over_thresholds.set(title="At every threshold", xlabel="τ", ylabel="confused pairs in a million")
    over_thresholds.legend(fontsize=7)
    at = f"τ = {first.tau:g}, ρ = {first.rho:g}"
    histogram.set_xticks(range(len(labels)), labels, rotation=45, ha="right", fontsize=8)
    histogram.set(title=f"By image, {at}", xlabel="confused pairs, all layers and heads", ylabel="% of images")
    by_layer.set(title=f"By layer, {at}", xlabel="layer", ylabel="confused pairs in a million")
    by_layer.legend(fontsize=8)
    _caption(
        figure,
        "A pair of queries is confused where its rows are closer than τ times the median distance of two rows, while "
        "its queries are further apart than ρ times the median distance of two queries. "
        + _images_and_divergence(results),
    )
    return _with_grid(figure)


def histogram_edges(most: int) -> np.ndarray:
    """Bins of counts up to `most`: 0 alone, then half a decade each: 1–3, 4–9, 10–31, 32–99, …"""
    edges = [0, 1]
    while edges[-1] <= most:
        edges.append(math.ceil(10 ** ((len(edges) - 1) / 2)))
    return np.array(edges)


def draw_locality(results: Mapping[str, LocalityResult]) -> Figure:
    """Attention to the neighbourhood by layer, with chance."""
    figure = _figure(8, 4.4)
    axes = figure.subplots()
    for i, (label, result) in enumerate(results.items()):
        colour, place = COLOURS[i % len(COLOURS)], range(1, len(result.layers) + 1)
        axes.plot(place, result.share, marker="o", color=colour, label=label)
        axes.plot(place, result.chance, linestyle=":", color=colour, linewidth=1.5)
        axes.plot(place, result.uniform, linestyle="-.", color=colour, linewidth=0.8)
        if any(len(heads) > 1 for heads in result.by_head):
            low, high = (np.array([f(heads) for heads in result.by_head]) for f in (np.min, np.max))
            axes.fill_between(place, low, high, color=colour, alpha=0.12, linewidth=0)
    side = next(iter(results.values())).side
    axes.set(
        title=f"Attention to the {side}×{side} neighbourhood of the query", xlabel="layer", ylabel="sum of weights"
    )
    axes.legend(fontsize=8)
    _caption(
        figure,
        f"Mean over queries and heads; bands: heads from lowest to highest; dotted: chance, {side**2}/N; dash-dotted: "
        "what weights of 1/N give, as borders have fewer neighbours. Local terms left out. "
        + _images_and_divergence(results),
    )
    return _with_grid(figure)


def draw_maps(
    panels: Sequence[tuple[np.ndarray, str, MapsResult]], *, head: int | None = None, most: int = 4
) -> Figure:
    """For each picture and model (a label) a line of maps, `most` layers evenly spaced; with local terms a second one.

    Pictures are (H, W) or (H, W, 3) in 0 … 1. head: one head; None for the mean of all.
    """
    lines: list[tuple[np.ndarray, str, tuple[float, float], list[tuple[LayerMap, np.ndarray]]]] = []
    for picture, label, result in panels:
        count = len(result.layers)
        chosen = [result.layers[i] for i in np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))]
        lines.append((picture, label, result.query, [(layer, layer.weights) for layer in chosen]))
        if any(layer.with_local is not None for layer in chosen):
            both = [(layer, layer.weights if layer.with_local is None else layer.with_local) for layer in chosen]
            lines.append((picture, f"{label}\nwith local terms", result.query, both))
    columns = 1 + max(len(maps) for *_, maps in lines)
    figure = _figure(2.6 * columns, 2.35 * len(lines) + 0.7)
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for line, (picture, label, query, maps) in zip(axes, lines, strict=True):
        line[0].imshow(picture, cmap="gray", vmin=0, vmax=1)
        at = (query[1] * picture.shape[1] - 0.5, query[0] * picture.shape[0] - 0.5)
        for colour, width in (("white", 5), ("red", 2.5)):  # visible on any picture
            line[0].plot(*at, "+", color=colour, markersize=12 + width, markeredgewidth=width)
        line[0].set_ylabel(label, fontsize=8)
        for place, (layer, weights) in zip(line[1:], maps, strict=False):
            _draw_map(figure, place, layer, weights.mean(0) if head is None else weights[head])
        for place in line[1 + len(maps) :]:
            place.set_visible(False)
    for place in axes.flat:
        place.set_xticks([])
        place.set_yticks([])
    what = "mean of all heads" if head is None else f"head {head}"
    _caption(
        figure,
        f"Weights of the query (cross), {what}. Where some are negative: blue negative, white zero, red positive; else "
        "from the smallest (white) to the largest (red). Grey: outside the query's window. Local terms: their taps "
        "averaged over channels.",
    )
    return figure


def _draw_map(figure: Figure, axes: Any, layer: LayerMap, weights: np.ndarray) -> None:
    axes.set_facecolor("0.85")
    if np.nanmin(weights) < 0:
        bound = float(np.nanmax(np.abs(weights)))
        colours: dict[str, Any] = dict(cmap="RdBu_r", vmin=-bound, vmax=bound)
    else:
        colours = dict(cmap="Reds")
    picture = axes.imshow(weights, interpolation="nearest", **colours)
    y, x = (place * n / size for place, n, size in zip(layer.query, weights.shape, layer.grid, strict=True))
    axes.add_patch(Rectangle((int(x) - 0.5, int(y) - 0.5), 1, 1, fill=False, edgecolor="k", linewidth=1.2))
    bar = figure.colorbar(picture, ax=axes, shrink=0.8)
    bar.ax.tick_params(labelsize=6)
    axes.set_title(layer.name.removesuffix(".attn"), fontsize=8)


def draw_masking(results: Mapping[str, MaskingResult]) -> Figure:
    """Accuracy, or agreement with the unmasked model, for each mask; hatched where local terms keep their taps."""
    labelled = all(result.top1 is not None for result in results.values())
    masks = list(dict.fromkeys((o.condition.what, o.condition.tokens) for r in results.values() for o in r.outcomes))
    series: dict[tuple[str, str], dict[int, float]] = {}
    for label, result in results.items():
        for outcome in result.outcomes:
            what, tokens, terms = outcome.condition
            value = outcome.top1 if labelled and outcome.top1 is not None else outcome.agreement
            # Without a mask there are no taps to keep.
            variants: tuple[str, ...] = ("zeroed", "kept") if what == "none" and _has_taps(result) else (terms,)
            for variant in variants:
                series.setdefault((label, variant), {})[masks.index((what, tokens))] = 100 * value
    figure = _figure(max(9.0, 0.3 * len(masks) * len(series) + 3), 4.6)
    axes = figure.subplots()
    width = 0.85 / len(series)
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(results)}
    for i, ((label, variant), values) in enumerate(series.items()):
        places = [place + (i - (len(series) - 1) / 2) * width for place in values]
        style: dict[str, Any] = dict(color=colours[label], edgecolor="white")
        if variant == "kept":
            style.update(hatch="////", alpha=0.75)
        name = label if variant == "none" else f"{label}, taps {variant}"
        bars = axes.bar(places, list(values.values()), width, label=name, **style)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(masks)), [what if what == "none" else f"{what} {tokens}" for what, tokens in masks])
    ylabel = "top-1 (%)" if labelled else "same prediction as unmasked (%)"
    axes.set(title="Tokens masked for each query", ylabel=ylabel)
    figure.legend(loc="outside right upper", fontsize=8)
    images = ", ".join(map(str, sorted({result.images for result in results.values()})))
    _caption(
        figure,
        "local n: the window of n tokens around each query, cut at borders; random n: as many random tokens of that "
        f"query; as if absent, in every layer. Taps: those of local terms on masked tokens. Images: {images}.",
    )
    return _with_grid(figure, axis="y")


def _has_taps(result: MaskingResult) -> bool:
    return any(outcome.condition.local_terms == "kept" for outcome in result.outcomes)


def draw_rank(results: Mapping[str, RankResult]) -> Figure:
    """Numerical and effective rank by layer."""
    figure = _figure(12, 4.2)
    for axes, what in zip(figure.subplots(1, 2), ("numerical", "effective"), strict=True):
        for i, (label, result) in enumerate(results.items()):
            colour, place = COLOURS[i % len(COLOURS)], range(1, len(result.layers) + 1)
            ranks: list[np.ndarray] = getattr(result, what)
            axes.plot(place, result.means(ranks), marker="o", color=colour, label=label)
            heads = [np.nanmean(layer, 0) for layer in ranks]
            axes.fill_between(
                place, [h.min() for h in heads], [h.max() for h in heads], color=colour, alpha=0.12, linewidth=0
            )
            if what == "numerical":
                axes.plot(place, result.tokens, linestyle=":", color=colour, linewidth=1.5)
        axes.set(title=f"{what.capitalize()} rank", xlabel="layer", ylim=(0, None))
        axes.legend(fontsize=8)
    _caption(
        figure,
        "Mean over images and heads; bands: heads from lowest to highest; dotted: N. Numerical: σ > N·ε·σ₁; effective: "
        f"exp of the entropy of σ/Σσ. {_images_and_divergence(results)}",
    )
    return _with_grid(figure)


def _images_and_divergence(results: Mapping[str, Any]) -> str:
    images = {result.summary()["images"] for result in results.values()}
    text = f"Images: {', '.join(map(str, sorted(images)))}."
    diverged = [f"{label} {r.diverged_rows}/{r.rows}" for label, r in results.items() if r.diverged_rows]
    if diverged:
        text += f"\nRows that a division by almost zero blew up (Σ|w| > {DIVERGED_MASS:g}): {', '.join(diverged)}."
    return text


def _with_grid(figure: Figure, *, axis: Any = "both") -> Figure:
    for axes in figure.axes:
        if axes.get_xlabel() == "layer":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3, axis=axis)
        axes.set_axisbelow(True)
    return figure
