"""Figures of the study. This module imports matplotlib, which is optional: import it only to draw."""

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

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860", "#da8bc3", "#8c8c8c")
GREY = "0.35"


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_probes(content: Mapping[str, Any]) -> Figure:
    """The three probes of probes.json side by side, with bounds and chance."""
    figure = _figure(13, 5.2)
    length, local, mean = figure.subplots(1, 3, width_ratios=(2.2, 1, 1), sharey=False)
    variants = {"bare": "nothing else", "bias": "with a bias", "skip": "with a skip"}
    names = list(content["length"]["bare"])
    places = np.arange(len(names))[::-1]
    for i, (variant, title) in enumerate(variants.items()):
        scores = content["length"][variant]
        at = places + 0.27 * (1 - i)
        values, errors = ([scores[name][key] for name in names] for key in ("mean", "std"))
        length.barh(at, values, 0.25, xerr=errors, color=COLOURS[i], label=title, error_kw={"lw": 1})
    bounds = [content["length"]["bare"][name]["bound"] for name in names]
    length.plot(bounds, places + 0.27, "|", color="black", markersize=9, markeredgewidth=2, label="bound, nothing else")
    length.set_yticks(places, names)
    length.set(title=f"a  Queries of one direction, {len(content['lengths'])} lengths")
    figure.legend(fontsize=8, loc="outside upper left", ncols=4)
    for axes, what, title in (
        (local, "local", "b  Brightest neighbour"),
        (mean, "mean", "c  Mean brightness"),
    ):
        scores = content[what]
        places = np.arange(len(scores))[::-1]
        colours = [COLOURS[2] if "residual" in name else COLOURS[0] for name in scores]
        values, errors = ([score[key] for score in scores.values()] for key in ("mean", "std"))
        bars = axes.barh(places, values, 0.7, xerr=errors, color=colours, error_kw={"lw": 1})
        axes.bar_label(bars, fmt="%.1f", label_type="center", color="white", fontsize=8)
        axes.set_yticks(places, list(scores), fontsize=8)
        axes.set(title=title)
    for axes in (length, local, mean):
        axes.axvline(content["chance"], linestyle=":", color=GREY)
        axes.set(xlim=(0, 104), xlabel="test accuracy (%)")
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    effort = content["effort"]
    caption = (
        f"Mean ± standard deviation of {effort['seeds']} seeds, {effort['steps']} updates. Patches of two photographs; "
        "tested on parts of them not trained on.\n"
        "Dotted: chance. Bound: what no readout of the layer's outputs can exceed."
    )
    figure.supxlabel(caption, fontsize=8, color=GREY)
    return figure


def draw_answer(
    accuracies: Mapping[int, Mapping[str, Sequence[float]]],
    effects: Sequence[tuple[str, Effect, str]],
    *,
    caption: str,
) -> Figure:
    """Left: top-1 of each row by length of training, a point for each seed. Right: effects with intervals."""
    figure = _figure(13, 5.4)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    rows = list(dict.fromkeys(title for by_row in accuracies.values() for title in by_row))
    for i, row in enumerate(rows):
        for j, (epochs, by_row) in enumerate(accuracies.items()):
            values = by_row.get(row, [])
            at = len(rows) - 1 - i + 0.15 * (len(accuracies) - 1 - 2 * j)
            label = f"{epochs} epochs" if i == 0 else None
            left.plot(values, [at] * len(values), "o", color=COLOURS[j], alpha=0.8, label=label)
    left.set_yticks(range(len(rows)), rows[::-1])
    left.legend(fontsize=8)
    left.set(title="Accuracy", xlabel="validation top-1 (%)", ylim=(-0.6, len(rows) - 0.4))
    for i, (_, effect, verdict) in enumerate(effects):
        place = len(effects) - 1 - i
        colour = {"supported": COLOURS[2], "contradicted": COLOURS[4]}.get(verdict, GREY)
        right.errorbar(effect.mean, place, xerr=effect.margin, marker="o", color=colour, capsize=3)
    names = [textwrap.fill(f"{claim}: {verdict}", 48) for claim, _, verdict in effects]
    right.set_yticks(range(len(effects)), names[::-1], fontsize=7)
    right.axvline(0, linestyle=":", color=GREY)
    right.set(title="Claims", xlabel="points")
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    figure.supxlabel(caption, fontsize=8, color=GREY)
    return figure


def draw_curves(curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]], *, title: str) -> Figure:
    """Validation top-1 over epochs. Each row has a curve (epoch, per cent) for each seed."""
    figure = _figure(8, 4.6)
    axes = figure.subplots()
    for i, (row, seeds) in enumerate(curves.items()):
        for j, curve in enumerate(seeds):
            epochs, values = zip(*curve, strict=True)
            axes.plot(epochs, values, color=COLOURS[i % len(COLOURS)], alpha=0.8, lw=1.4, label=None if j else row)
    return _finish(figure, axes, title=title, xlabel="epoch", ylabel="validation top-1 (%)")


def draw_scaling(
    series: Mapping[str, Sequence[tuple[float, float, float | None]]], *, title: str, xlabel: str, caption: str
) -> Figure:
    """Final top-1 of each row over epochs or tokens, on a logarithmic axis.

    A point is (length, mean, standard deviation). The deviation is None for one seed.
    """
    figure = _figure(7, 4.6)
    figure.supxlabel(caption, fontsize=8, color=GREY)
    axes = figure.subplots()
    for i, (row, points) in enumerate(series.items()):
        xs, ys, stds = zip(*sorted(points), strict=True)
        axes.errorbar(
            xs, ys, yerr=[std or 0 for std in stds], marker="o", color=COLOURS[i % len(COLOURS)], capsize=3, label=row
        )
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
    figure = _figure(4.7 * len(drawn), 4.9)
    for draw, axes in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.supxlabel(caption, fontsize=8, color=GREY)
    return figure


def _draw_maps(axes: Axes, maps: Mapping[str, Mapping[str, float]]) -> None:
    places = np.arange(len(maps))[::-1]
    for i, kind in enumerate(("softmax", "linear", "InLine")):
        values = {place: by_kind[kind] for place, by_kind in zip(places, maps.values(), strict=True) if kind in by_kind}
        if values:
            at = np.array(list(values)) + 0.27 * (1 - i)
            bars = axes.barh(at, list(values.values()), 0.25, color=COLOURS[i], label=kind)
            axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_yticks(places, list(maps))
    axes.margins(x=0.12)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)  # bars fill the axes
    axes.set(title="Feature maps, without residual", xlabel="validation top-1 (%)")


def _draw_attentions(axes: Axes, attentions: Mapping[str, float]) -> None:
    places = np.arange(len(attentions))[::-1]
    bars = axes.barh(places, list(attentions.values()), 0.7, color=COLOURS[0])
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_yticks(places, list(attentions), fontsize=8)
    axes.margins(x=0.12)
    axes.set(title="Attentions", xlabel="validation top-1 (%)")


def _draw_windows(axes: Axes, windows: Mapping[str, Mapping[int, float]]) -> None:
    for i, (title, by_size) in enumerate(windows.items()):
        colour = COLOURS[2 + 2 * i]  # the colour of InLine in other figures
        axes.plot(list(by_size), list(by_size.values()), marker="o", color=colour, label=title)
    ticks = sorted({size for by_size in windows.values() for size in by_size})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.legend(fontsize=8)
    axes.set(title="InLine-Swin", xlabel="side of a window, tokens (16: the whole map)", ylabel="validation top-1 (%)")


def draw_speed(points: Sequence[Mapping[str, Any]], *, caption: str) -> Figure:
    """Accuracy over the time of an image, in training and in inference.

    A point has title, top1, std (None for one seed), train and infer (images a second).
    """
    figure = _figure(11, 4.9)
    panels = dict(zip(("train", "infer"), figure.subplots(1, 2), strict=True))
    for what, axes in panels.items():
        for i, point in enumerate(points):
            if point.get(what) is None:
                continue
            micro = 1e6 / point[what]
            axes.errorbar(
                micro, point["top1"], yerr=point["std"], marker="o", color=COLOURS[i % len(COLOURS)], capsize=3,
                label=point["title"],
            )  # fmt: skip
        title = f"Accuracy against {'training step' if what == 'train' else 'inference'}"
        _finish(figure, axes, title=title, xlabel="µs an image", ylabel="validation top-1 (%)", legend=False)
    handles = panels["infer"].get_legend_handles_labels()
    figure.legend(*handles, fontsize=8, loc="outside upper center", ncols=5)
    figure.supxlabel(caption, fontsize=8, color=GREY)
    return figure


def draw_causes(models: Sequence[tuple[str, Mapping[str, Any]]], *, title: str) -> Figure:
    """For each model: confused pairs, attention to the neighbourhood by layer, loss by masking, and effective rank."""
    figure = _figure(13, 8.3)
    (confusion, locality), (masking, rank) = figure.subplots(2, 2)
    counted = all("confused" in found for _, found in models)  # early runs used another definition
    for i, (name, found) in enumerate(models):
        colour = COLOURS[i % len(COLOURS)]
        over_chance = np.array(found["locality"]["by_layer"]) / np.array(found["locality"]["chance"])
        lines = [(locality, over_chance), (rank, found["rank"]["by_layer"])]
        if counted:
            _draw_confused(confusion, found["confused"], colour)
        for axes, values in lines:
            axes.plot(range(1, len(values) + 1), values, marker="o", color=colour, label=name)
        drops = masking_drops(found["masking"])
        for what, marker, line in (("local", "o", "-"), ("random", "x", ":")):
            tokens, points = zip(*sorted(drops[what].items()), strict=True)
            masking.plot(tokens, points, marker=marker, linestyle=line, color=colour)
    first = models[0][1]
    confusion.set_yscale("symlog", linthresh=1)
    confusion.set_ylim(bottom=-0.1)
    locality.axhline(1, linestyle=":", color=GREY)
    locality.axhline(uniform_over_chance(first["locality"]), linestyle="-.", color=GREY, lw=1)
    what = "Confused pairs of queries at every pair of thresholds"
    if counted:
        labels = [f"τ = {pair['tau']:g}, ρ = {pair['rho']:g}" for pair in first["confused"]]
        confusion.set_xticks(range(len(labels)), labels, fontsize=8)
    else:
        confusion.text(0.5, 0.5, "not measured", transform=confusion.transAxes, ha="center", color=GREY)
    _finish(figure, confusion, title=what, xlabel="rows closer than τ, queries further than ρ, times their medians",
            ylabel="pairs in a million", legend=False)  # fmt: skip
    what = "Attention to the 3×3 neighbourhood (···: chance, -·-: spread evenly)"
    _finish(figure, locality, title=what, xlabel="layer", ylabel="times chance", legend=False)
    what = "Top-1 lost by masking: local window (—), random tokens (···)"
    _finish(figure, masking, title=what, xlabel="tokens masked for each query", ylabel="points", legend=False)
    _finish(figure, rank, title="Rank of the attention matrices", xlabel="layer", ylabel="effective rank", legend=False)
    figure.legend(*rank.get_legend_handles_labels(), fontsize=9, loc="outside upper center", ncols=len(models))
    caption = (
        f"{title}; first seed's weights, {first['images']} validation images ({first['rank']['images']} for the rank): "
        f"one image is {100 / first['masking']['images']:g} points"
    )
    figure.supxlabel(caption, fontsize=8, color=GREY)
    return figure


def _draw_confused(axes: Axes, confused: Sequence[Mapping[str, Any]], colour: str) -> None:
    """Pairs in a million by thresholds, with their intervals over images."""
    shares = 1e6 * np.array([pair["share_of_pairs"] for pair in confused])
    low, high = 1e6 * np.array([pair.get("interval", [pair["share_of_pairs"]] * 2) for pair in confused]).T
    errors = np.maximum([shares - low, high - shares], 0)
    axes.errorbar(range(len(shares)), shares, yerr=errors, marker="o", color=colour, capsize=3)


def _finish(figure: Figure, axes: Axes, *, title: str, xlabel: str, ylabel: str, legend: bool = True) -> Figure:
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if legend:
        axes.legend(fontsize=8)
    if xlabel == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
