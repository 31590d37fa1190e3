"""Images a second against the resolution."""

from collections.abc import Sequence
from pathlib import Path

from .model import CONTENDERS, best_of, peer_speeds, row_of

COLOURS = {"fused": "C0", "reference": "C2", "textbook": "C4", "peer": "C1", "peer_sdpa": "C3", "free": "0.6"}


def check_picture(path: Path) -> None:
    """An error now for what could not be drawn after hours of work: no matplotlib, or a format that it has not."""
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ValueError(f"--picture {path}: expected a name that ends in one of {', '.join(formats)}")


def draw_sweep(results: Sequence[dict], path: Path) -> None:
    """A panel a task, both axes logarithmic, our speed over the faster counterpart's written at each size."""
    from matplotlib.figure import Figure

    best = [r for r in best_of(results) if r["images_per_second"]]
    peers = peer_speeds(best)
    panels = list(dict.fromkeys((r["model"], r["task"]) for r in best if r["batch"] > 1))
    if not panels:
        raise ValueError("nothing to draw: no measurement of more than one image at a time succeeded")
    figure = Figure(figsize=(5.6 * len(panels), 4.4), layout="constrained")
    for axes, (model, task) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        speeds: dict[str, dict[int, float]] = {}
        shown = [r for r in best if (r["model"], r["task"]) == (model, task) and r["batch"] > 1]
        for r in shown:
            speeds.setdefault(r["contender"], {})[r["img_size"]] = r["images_per_second"]
        for contender, speed in speeds.items():
            style = dict(color=COLOURS[contender], linestyle="--" if contender == "free" else "-", marker="o")
            axes.loglog(list(speed), list(speed.values()), label=CONTENDERS[contender].title, **style)
        for r in shown:
            if r["contender"] == "fused" and (peer := peers.get(row_of(r))):
                ours = r["images_per_second"]
                axes.annotate(f"{ours / peer:.2f}×", (r["img_size"], ours), xytext=(0, 9),
                              textcoords="offset points", ha="center", fontsize=8, color=COLOURS["fused"])  # fmt: skip
        sizes = sorted({size for speed in speeds.values() for size in speed})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.margins(y=0.1)  # for what is written above the highest point
        axes.set(title=f"{model}: {'training' if task == 'train' else 'inference'}", xlabel="side of the image, pixels")
        axes.set_ylabel("images a second")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
