"""Pictures of model benchmarks: speed over resolution, and bars of time and memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .contenders import CONTENDERS, counterpart
from .model import best_of, describe_size, fastest_peers, row_of
from .record import fastest

COLOURS = {"fused": "C0", "reference": "C2", "textbook": "C4", "peer": "C1", "peer_sdpa": "C3", "peer_math": "C5",
           "free": "0.6", "peer_optimized": "C6", "student": "k", "tangent": "C8", "inline": "C9"}  # fmt: skip


def check_picture(path: Path) -> None:
    """Fail before the work starts if matplotlib is missing or does not know the format."""
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ValueError(f"--picture {path}: expected a name that ends in one of {', '.join(formats)}")


def draw_sweep(results: Sequence[dict], path: Path) -> None:
    """Images a second against the size, a panel for each task. Each size shows our ratio to the fastest counterpart.

    Of several batches of one size, the fastest is drawn.
    """
    from matplotlib.figure import Figure

    best = [r for r in best_of(results) if r["images_per_second"]]
    peers = fastest_peers(best)
    panels = list(dict.fromkeys((r["model"], r["task"]) for r in best if r["batch"] > 1))
    if not panels:
        raise ValueError("nothing to draw: no measurement of more than one image at a time succeeded")
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    for axes, (model, task) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        speeds: dict[str, dict[int, float]] = {}
        of_panel = [r for r in best if (r["model"], r["task"]) == (model, task) and r["batch"] > 1]
        shown = sorted(fastest(of_panel, lambda r: (r["img_size"],)), key=lambda r: r["img_size"])
        for r in shown:
            speeds.setdefault(r["contender"], {})[r["img_size"]] = r["images_per_second"]
        for contender, speed in speeds.items():
            style = dict(color=COLOURS[contender], linestyle="--" if contender == "free" else "-", marker="o")
            label = CONTENDERS[contender].title.replace("counterpart", counterpart(model) or "counterpart")
            axes.loglog(list(speed), list(speed.values()), label=label, **style)
        for r in shown:
            if r["contender"] == "fused" and (peer := peers.get(row_of(r))):
                ours = r["images_per_second"]
                axes.annotate(f"{ours / peer['images_per_second']:.2f}×", (r["img_size"], ours), xytext=(0, 9),
                              textcoords="offset points", ha="center", fontsize=9, color=COLOURS["fused"])  # fmt: skip
        sizes = sorted({size for speed in speeds.values() for size in speed})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.margins(x=0.09, y=0.15)  # room for the ratios
        axes.set(title=f"{model}: {'training' if task == 'train' else 'inference'}", xlabel="side of the image, pixels")
        axes.set_ylabel("images a second")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.savefig(path, dpi=180)


def draw_bars(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Milliseconds an image and, if it was measured, peak memory: a group of bars for each model and task."""
    from matplotlib.figure import Figure

    best = [r for r in best_of(results) if r["timing"] is not None]
    if not best:
        raise ValueError("nothing to draw: no measurement succeeded")
    groups = list(dict.fromkeys(row_of(r) for r in best))
    shown = [contender for contender in CONTENDERS if any(r["contender"] == contender for r in best)]
    figure = Figure(figsize=(11, 1.4 + 0.35 * len(groups) * len(shown)), layout="constrained")
    measures: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("milliseconds an image", lambda r: 1e3 / r["images_per_second"])
    ]
    if all(r["peak_bytes"] is not None for r in best):
        measures.append(("peak memory, GiB", lambda r: r["peak_bytes"] / 2**30))
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    height = 0.8 / len(shown)
    for axes, (label, value) in zip(panels, measures, strict=True):
        for number, contender in enumerate(shown):
            of_group = {groups.index(row_of(r)): value(r) for r in best if r["contender"] == contender}
            places = [i + (number - (len(shown) - 1) / 2) * height for i in of_group]
            bars = axes.barh(places, list(of_group.values()), height, label=CONTENDERS[contender].title)
            axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        axes.set_xlabel(label)
        axes.margins(x=0.12)  # room for the numbers beside the bars
        axes.grid(axis="x", alpha=0.3)
    names = [f"{model}\n{task}, {batch} × {describe_size(size)}" for model, size, batch, task in groups]
    panels[0].set_yticks(range(len(groups)), names)
    panels[0].invert_yaxis()  # the first on top
    panels[-1].legend()
    figure.savefig(path, dpi=150)
