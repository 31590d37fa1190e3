"""Figures of the study. This module imports matplotlib, which is optional: import it only to draw."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from study.intervals import Effect
from study.measures import masking_drops, uniform_over_chance

WIDTH = 8.0  # inches: text of 9 points is legible where the page shows a figure 800 pixels wide
SMALL = 9
GREY, LIGHT = "0.35", "0.65"
# Okabe and Ito's colours, which colour-blind people tell apart. Each model has the same one in every figure, and a
# marker of its own.
_STYLES = {
    "softmax": ("#0072B2", "o"), "linear": ("#E69F00", "s"), "InLine": ("#009E73", "^"),
    "linear with residual": ("#D55E00", "D"), "InLine with residual": ("#CC79A7", "v"),
    "softmax with residual": ("#56B4E9", "P"),
}  # fmt: skip


def style(title: str) -> tuple[str, str]:
    """Colour and marker of a model, by its title in the grid or its name in the probes. Others are grey."""
    kind = next((kind for kind in ("softmax", "linear", "InLine") if title.startswith(kind)), "")
    has_residual = "residual" in title and "without" not in title
    return _STYLES.get(f"{kind} with residual" if has_residual else kind, (LIGHT, "o"))


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _caption(figure: Figure, text: str) -> None:
    figure.supxlabel(textwrap.fill(text, 110), fontsize=SMALL, color=GREY)


def draw_probes(content: Mapping[str, Any]) -> Figure:
    """The three probes of probes.json side by side, with bounds and chance."""
    figure = _figure(8.4)
    panels = figure.subplot_mosaic("aa;bc", height_ratios=(1.7, 1))
    length, local, mean = (panels[name] for name in "abc")
    variants = {"bare": ("nothing else", "0.25"), "bias": ("with a bias", "0.55"), "skip": ("with a skip", "0.8")}
    names = list(content["length"]["bare"])
    places = np.arange(len(names))[::-1]
    for i, (variant, (title, colour)) in enumerate(variants.items()):
        scores = content["length"][variant]
        at = places + 0.27 * (1 - i)
        values, errors = ([scores[name][key] for name in names] for key in ("mean", "std"))
        length.barh(at, values, 0.25, xerr=errors, color=colour, label=title, error_kw={"lw": 1, "ecolor": "black"})
    bounds = [content["length"]["bare"][name]["bound"] for name in names]
    length.plot(
        bounds, places + 0.27, "|", color="#D55E00", markersize=9, markeredgewidth=2.5, label="bound, nothing else"
    )
    length.set_yticks(places, names)
    length.set(title=f"a  Queries of one direction, {len(content['lengths'])} lengths")
    figure.legend(fontsize=SMALL, loc="outside upper center", ncols=4)
    for axes, what, title in (
        (local, "local", "b  Brightest neighbour"),
        (mean, "mean", "c  Mean brightness"),
    ):
        scores = content[what]
        places = np.arange(len(scores))[::-1]
        colours = [style(name)[0] for name in scores]
        values, errors = ([score[key] for score in scores.values()] for key in ("mean", "std"))
        bars = axes.barh(places, values, 0.7, xerr=errors, color=colours, error_kw={"lw": 1})
        axes.bar_label(bars, fmt="%.1f", padding=-32, color="black", fontsize=SMALL)
        axes.set_yticks(places, list(scores) if axes is local else [""] * len(scores))
        axes.set(title=title)
    for axes in (length, local, mean):
        axes.axvline(content["chance"], linestyle=":", color=GREY)
        axes.set(xlim=(0, 104), xlabel="test accuracy (%)")
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    effort = content["effort"]
    caption = (
        f"Mean ± standard deviation of {effort['seeds']} seeds, {effort['steps']} updates. Patches of two photographs; "
        "tested on parts of them not trained on. "
        "Dotted: chance. Bound: what no readout of the layer's outputs can exceed."
    )
    _caption(figure, caption)
    return figure


def draw_answer(
    accuracies: Mapping[int, Mapping[str, Sequence[float]]],
    effects: Sequence[tuple[str, Effect, float, str]],
    *,
    caption: str,
) -> Figure:
    """Above: top-1 of each row by length of training, a point for each seed. Below: effects with intervals and limits.

    An effect is (claim, effect, limit, verdict).
    """
    figure = _figure(3.2 + 0.55 * len(effects))
    above, below = figure.subplots(2, 1, height_ratios=(2.4, max(1, 0.5 * len(effects))))
    rows = list(dict.fromkeys(title for by_row in accuracies.values() for title in by_row))
    for i, row in enumerate(rows):
        for epochs, by_row in accuracies.items():
            values = by_row.get(row, [])
            at = len(rows) - 1 - i
            above.plot(values, [at] * len(values), style(row)[1], color=style(row)[0], alpha=0.8)
            if values and i == 0:
                above.annotate(
                    f"{epochs} epochs", (statistics.fmean(values), at), (0, 14), textcoords="offset points",
                    ha="center", fontsize=SMALL, color=GREY,
                )  # fmt: skip
    above.set_yticks(range(len(rows)), rows[::-1])
    above.set(title="Accuracy", xlabel="validation top-1 (%)", ylim=(-0.6, len(rows) - 0.1))
    for i, (_, effect, limit, verdict) in enumerate(effects):
        at = len(effects) - 1 - i
        below.vlines(limit, at - 0.5, at + 0.5, linestyle=":", color=GREY)
        # Full and black where the interval decides: the verdict is written beside it.
        colour, inside = (GREY, "white") if verdict == "inconclusive" else ("black", "black")
        below.errorbar(effect.mean, at, xerr=effect.margin, marker="o", color=colour, mfc=inside, capsize=3)
    names = [textwrap.fill(f"{claim}: {verdict}", 46) for claim, *_, verdict in effects]
    below.set_yticks(range(len(effects)), names[::-1], fontsize=SMALL)
    below.set(title="Claims", xlabel="points", ylim=(-0.5, max(len(effects), 1) - 0.5))
    for axes in (above, below):
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    _caption(figure, caption)
    return figure


def draw_curves(curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]], *, title: str) -> Figure:
    """Validation top-1 over epochs. Each row has a curve (epoch, per cent) for each seed."""
    figure = _figure(4.8)
    axes = figure.subplots()
    for row, seeds in curves.items():
        for j, curve in enumerate(seeds):
            epochs, values = zip(*curve, strict=True)
            colour, marker = style(row)
            axes.plot(epochs, values, color=colour, marker=marker, ms=4, lw=1.2, label=None if j else row)
    return _finish(figure, axes, title=title, xlabel="epoch", ylabel="validation top-1 (%)")


def draw_scaling(
    series: Mapping[str, Sequence[tuple[float, float, float | None]]], *, title: str, xlabel: str, caption: str
) -> Figure:
    """Final top-1 of each row over epochs or tokens, on a logarithmic axis.

    A point is (length, mean, standard deviation). The deviation is None for one seed.
    """
    figure = _figure(4.8)
    _caption(figure, caption)
    axes = figure.subplots()
    for row, points in series.items():
        xs, ys, stds = zip(*sorted(points), strict=True)
        colour, marker = style(row)
        axes.errorbar(xs, ys, yerr=[std or 0 for std in stds], marker=marker, color=colour, capsize=3, label=row)
    ticks = sorted({point[0] for points in series.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    return _finish(figure, axes, title=title, xlabel=xlabel, ylabel="validation top-1 (%)")


def draw_variants(
    *,
    maps: Mapping[str, Mapping[str, float]],
    attentions: Mapping[str, float],
    windows: Mapping[str, Mapping[int, float]],
    caption: str,
) -> Figure:
    """Top-1 by feature map and attention, by attention, and by window size. Panels without data are left out."""
    drawn = [
        draw
        for content, draw in (
            (maps, lambda axes: _draw_maps(axes, maps)),
            (attentions, lambda axes: _draw_attentions(axes, attentions)),
            (windows, lambda axes: _draw_windows(axes, windows)),
        )
        if content
    ]
    figure = _figure(0.4 + 3.7 * len(drawn))
    for draw, axes in zip(drawn, figure.subplots(len(drawn), 1, squeeze=False)[:, 0], strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    _caption(figure, caption)
    return figure


def _draw_maps(axes: Axes, maps: Mapping[str, Mapping[str, float]]) -> None:
    places = np.arange(len(maps))[::-1]
    for i, kind in enumerate(("softmax", "linear", "InLine")):
        values = {place: by_kind[kind] for place, by_kind in zip(places, maps.values(), strict=True) if kind in by_kind}
        if values:
            at = np.array(list(values)) + 0.27 * (1 - i)
            bars = axes.barh(at, list(values.values()), 0.25, color=style(kind)[0], label=kind)
            axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=SMALL)
    axes.set_yticks(places, list(maps))
    axes.margins(x=0.12)
    axes.legend(fontsize=SMALL, loc="upper left", bbox_to_anchor=(1, 1))  # bars fill the axes
    axes.set(title="Feature maps, without residual", xlabel="validation top-1 (%)")


def _draw_attentions(axes: Axes, attentions: Mapping[str, float]) -> None:
    places = np.arange(len(attentions))[::-1]
    bars = axes.barh(places, list(attentions.values()), 0.7, color=[style(title)[0] for title in attentions])
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=SMALL)
    axes.set_yticks(places, list(attentions))
    axes.margins(x=0.12)
    axes.set(title="Attentions", xlabel="validation top-1 (%)")


def _draw_windows(axes: Axes, windows: Mapping[str, Mapping[int, float]]) -> None:
    for title, by_size in windows.items():
        colour, marker = style(f"InLine {title}")
        axes.plot(list(by_size), list(by_size.values()), marker=marker, color=colour, label=title)
    ticks = sorted({size for by_size in windows.values() for size in by_size})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.legend(fontsize=SMALL)
    axes.set(title="InLine-Swin", xlabel="side of a window, tokens (16: the whole map)", ylabel="validation top-1 (%)")


def draw_speed(points: Sequence[Mapping[str, Any]], *, caption: str) -> Figure:
    """Accuracy over the time of an image, in training and in inference.

    A point has title, top1, std (None for one seed), train and infer (images a second).
    """
    figure = _figure(4.9)
    panels = dict(zip(("train", "infer"), figure.subplots(1, 2), strict=True))
    for what, axes in panels.items():
        for point in points:
            if point.get(what) is None:
                continue
            colour, marker = style(point["title"])
            axes.errorbar(
                1e6 / point[what], point["top1"], yerr=point["std"], marker=marker, color=colour, capsize=3,
                label=point["title"],
            )  # fmt: skip
        title = "Training" if what == "train" else "Inference"
        _finish(figure, axes, title=title, xlabel="µs an image", ylabel="validation top-1 (%)", legend=False)
    handles = panels["infer"].get_legend_handles_labels()
    figure.legend(*handles, fontsize=SMALL, loc="outside upper center", ncols=3)
    _caption(figure, caption)
    return figure


def draw_causes(models: Sequence[tuple[str, Mapping[str, Any]]], *, title: str) -> Figure:
    """For each model: confused pairs, attention to the neighbourhood by layer, loss by masking, and effective rank."""
    figure = _figure(7.4)
    (confusion, locality), (masking, rank) = figure.subplots(2, 2)
    counted = all("confused" in found for _, found in models)  # early runs used another definition
    for name, found in models:
        colour, marker = style(name)
        over_chance = np.array(found["locality"]["by_layer"]) / np.array(found["locality"]["chance"])
        lines = [(locality, over_chance), (rank, found["rank"]["by_layer"])]
        if counted:
            _draw_confused(confusion, found["confused"], colour, marker)
        for axes, values in lines:
            axes.plot(range(1, len(values) + 1), values, marker=marker, color=colour, label=name)
        drops = masking_drops(found["masking"])
        for what, line, mark in (("local", "-", marker), ("random", ":", "x")):
            tokens, points = zip(*sorted(drops[what].items()), strict=True)
            masking.plot(tokens, points, marker=mark, linestyle=line, color=colour)
    first = models[0][1]
    locality.axhline(1, linestyle=":", color=GREY)
    locality.axhline(uniform_over_chance(first["locality"]), linestyle="-.", color=GREY, lw=1)
    if counted:
        confusion.set_yscale("symlog", linthresh=1)
        confusion.set_ylim(bottom=-0.1)
        labels = [f"{pair['tau']:g}, {pair['rho']:g}" for pair in first["confused"]]
        confusion.set_xticks(range(len(labels)), labels)
        _finish(figure, confusion, title="Confused pairs of queries", xlabel="thresholds τ, ρ",
                ylabel="pairs in a million", legend=False)  # fmt: skip
    else:
        confusion.set_axis_off()
        confusion.text(0.5, 0.5, "confused pairs: not measured", transform=confusion.transAxes, ha="center", color=GREY)
    what = "Attention to the 3×3 neighbourhood"
    _finish(figure, locality, title=what, xlabel="layer", ylabel="times chance", legend=False)
    what = "Top-1 lost by masking"
    _finish(figure, masking, title=what, xlabel="tokens masked for each query", ylabel="points", legend=False)
    _finish(figure, rank, title="Rank of the attention matrices", xlabel="layer", ylabel="effective rank", legend=False)
    figure.legend(*rank.get_legend_handles_labels(), fontsize=SMALL, loc="outside upper center", ncols=3)
    random = "as many random tokens" if counted else "as many random tokens, and more at borders"
    caption = (
        f"{title}; first seed's weights, {first['images']} validation images ({first['rank']['images']} for the rank): "
        f"one image is {100 / first['masking']['images']:g} points. Neighbourhood: ··· chance, -·- attention that is "
        f"spread evenly. Masking: — is the local window, ··· {random}"
    )
    _caption(figure, caption)
    return figure


def _draw_confused(axes: Axes, confused: Sequence[Mapping[str, Any]], colour: str, marker: str) -> None:
    """Pairs in a million by thresholds, with their intervals over images."""
    shares = 1e6 * np.array([pair["share_of_pairs"] for pair in confused])
    low, high = 1e6 * np.array([pair.get("interval", [pair["share_of_pairs"]] * 2) for pair in confused]).T
    errors = np.maximum([shares - low, high - shares], 0)
    axes.errorbar(range(len(shares)), shares, yerr=errors, marker=marker, color=colour, capsize=3)


def _finish(figure: Figure, axes: Axes, *, title: str, xlabel: str, ylabel: str, legend: bool = True) -> Figure:
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if legend:
        axes.legend(fontsize=SMALL)
    if xlabel == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
