"""The picture of a linearisation. This module imports matplotlib, which is optional: import it only to draw."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from inline_attention.training.plots import save_figure

from .linearization import STUDENT, TEACHER, LinearizationReport, Speed

COLOURS = {TEACHER: "#dd8452", "carried over": "0.6", "matched": "#55a868", "distilled": "#4c72b0", STUDENT: "#4c72b0"}


def draw_report(report: LinearizationReport, path: Path) -> None:
    """Accuracy after each stage, training loss, speed and memory over the input size."""
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    (quality, loss), (speed, memory) = figure.subplots(2, 2)
    _draw_quality(quality, report)
    for stage, records in report.curves.items():
        shown = [(record["update"], record["loss"]) for record in records if record.get("loss") is not None]
        loss.plot(*zip(*shown, strict=True), color=COLOURS[stage], label=stage, marker="." if len(shown) < 30 else "")
    loss.set(title="Training loss of each stage", xlabel="updates", yscale="log")
    if report.curves:
        loss.legend()
    _draw_over_size(speed, report, lambda one: one.images_per_second)
    speed.set(title="Speed", ylabel="images a second")
    _draw_over_size(memory, report, lambda one: None if one.peak_bytes is None else one.peak_bytes / 2**20)
    memory.set(title="Peak memory", ylabel="MiB")
    for axes in (quality, loss, speed, memory):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    device = next((value for name, value in report.facts.items() if name.startswith("gpu")), report.facts["cpu"])
    figure.suptitle(f"{report.title}, linearised, on {device}, {report.facts['dtype']}")
    save_figure(figure, path)


def _draw_quality(axes: Axes, report: LinearizationReport) -> None:
    measure, title = next(
        (name, title)
        for name, title in (
            ("top1", "Top-1"),
            ("knn_top1", "k-NN top-1"),
            ("agreement", "The teacher's class"),
            ("cosine", "Cosine to the teacher"),
        )
        if getattr(report.quality[0], name) is not None
    )
    names = [one.model for one in report.quality]
    bars = axes.bar(names, [getattr(one, measure) for one in report.quality], color=[COLOURS[name] for name in names])
    axes.bar_label(bars, fmt="%.2f")
    axes.margins(y=0.12)  # room for the numbers above the bars
    axes.set(title=f"{title} (%) on {report.quality[0].images} validation images")


def _draw_over_size(axes: Axes, report: LinearizationReport, value: Callable[[Speed], float | None]) -> None:
    pairs = {teacher.img_size: (teacher, student) for teacher, student in report.pairs()}  # the largest batch of a size
    sides = [size[0] for size in pairs]
    for index, name in enumerate((TEACHER, STUDENT)):
        shown = [(pair[index].img_size[0], value(pair[index])) for pair in pairs.values()]
        if shown := [(side, found) for side, found in shown if found is not None]:
            axes.plot(*zip(*shown, strict=True), color=COLOURS[name], label=name, marker="o")
    for pair in pairs.values():  # the larger number above, the smaller one below
        numbers = [(number, one) for one in pair if (number := value(one)) is not None]
        for place, (number, one) in enumerate(sorted(numbers, key=lambda item: -item[0])):
            axes.annotate(f"{number:,.3g}", (one.img_size[0], number), xytext=(0, -13 if place else 6), fontsize=8,
                          textcoords="offset points", ha="center", color=COLOURS[one.model])  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="height of the image, pixels")
    axes.set_xticks(sides, [str(side) for side in sides])
    axes.minorticks_off()
    axes.margins(y=0.15)  # room for the numbers
    axes.legend()
