"""The analyses by name, over several models at once: numbers, a table and a picture of each."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from . import confusion, injectivity, locality, maps, masking, rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fewer images than this, and a number says more about them than about the model.
LEAST_IMAGES = {"confusion": 20, "locality": 20, "masking": 100, "rank": 10}
ANALYSES = ("injectivity", "confusion", "locality", "maps", "masking", "rank")
Batches = Iterable[tuple[Tensor, Tensor | None]]  # images (B, C, H, W), normalised, and their labels
Table = tuple[Sequence[str], Sequence[Sequence[object]]]  # header and lines
Progress = Callable[[str], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Subject:
    """A model and the images it is looked at with."""

    model: nn.Module
    batches: Callable[[], Batches]  # anew each time
    mean: tuple[float, ...]  # that the images were normalised with, by channel
    std: tuple[float, ...]
    facts: dict[str, Any]  # for the record: model, weights, attention, images, …
    label: str = ""

    def images(self) -> Iterable[Tensor]:
        return (images for images, _ in self.batches())

    def picture(self, image: Tensor) -> np.ndarray:
        """An image (C, H, W) as it can be shown: (H, W) or (H, W, 3) in 0 … 1"""
        pixels = image.cpu().numpy().transpose(1, 2, 0) * np.array(self.std) + np.array(self.mean)
        return np.clip(pixels, 0, 1).squeeze()


def label_subjects(subjects: Sequence[Subject], labels: Sequence[str] | None) -> list[Subject]:
    """With the labels given, or with their models' names, told apart by attention or by number where two are equal."""
    if labels is not None and len(labels) != len(subjects):
        raise ValueError(f"there are {len(subjects)} models and {len(labels)} labels")
    names = list(labels or (subject.facts["model"] for subject in subjects))
    if len(set(names)) < len(names):
        names = [f"{name} ({subject.facts['attention']})" for name, subject in zip(names, subjects, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} #{i}" for i, name in enumerate(names, start=1)]
    return [replace(subject, label=name) for subject, name in zip(subjects, names, strict=True)]


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open, and what to look at."""

    taus: tuple[float, ...] = confusion.TAUS
    rhos: tuple[float, ...] = confusion.RHOS
    side: int = locality.SIDE
    sides: tuple[int, ...] = masking.SIDES
    seed: int = 0
    query: tuple[float, float] = (0.5, 0.5)
    head: int | None = None
    map_images: int = 2
    layers: tuple[str | int, ...] | None = None


@dataclass(frozen=True)
class Analysis:
    name: str
    parameters: dict[str, Any]
    results: dict[str, Any]  # by label
    summaries: dict[str, dict[str, Any]]  # by label: the numbers worth a table
    table: Table
    figure: "Figure"
    warning: str | None = None  # why the numbers are not to be relied on


def analyse(name: str, subjects: Sequence[Subject], settings: Settings, *, progress: Progress) -> Analysis:
    """Run one of `ANALYSES`; all but injectivity need subjects."""
    plots = _plots()
    if name == "injectivity":
        return _injectivity()
    if name == "maps":
        return _maps(subjects, settings, progress)
    if name not in _MEASURES:
        raise ValueError(f"there is no analysis {name!r}; expected one of {', '.join(ANALYSES)}")
    measure, tabulate, read = _MEASURES[name]
    parameters = read(settings)
    results = {}
    for subject in subjects:
        images: Any = subject.batches() if name == "masking" else subject.images()
        with progress(f"{name} {subject.label}") as on_images:
            results[subject.label] = measure(subject.model, images, on_images=on_images, **parameters)
    summaries = {label: result.summary() for label, result in results.items()}
    figure = getattr(plots, f"draw_{name}")(results)
    warning = warn_of_few(name, min(summary["images"] for summary in summaries.values()))
    return Analysis(name, parameters, results, summaries, tabulate(results), figure, warning)


def warn_of_few(name: str, images: int) -> str | None:
    """What to tell a user whose images are too few for an analysis; None where they are enough."""
    least = LEAST_IMAGES[name]
    if images >= least:
        return None
    counted = "1 image is" if images == 1 else f"{images} images are"
    share = f" (each is {100 / images:.3g} points)" if name == "masking" else ""
    return f"{counted} too few for {name}{share}: give at least {least} before relying on its numbers"


class _Measure(NamedTuple):
    """An analysis that runs model by model: its functions, and what of the settings it takes."""

    measure: Callable[..., Any]
    table: Callable[[Any], Table]
    parameters: Callable[[Settings], dict[str, Any]]


_MEASURES = {
    "confusion": _Measure(
        confusion.measure_confusion, confusion.table, lambda s: dict(taus=s.taus, rhos=s.rhos, layers=s.layers)
    ),
    "locality": _Measure(locality.measure_locality, locality.table, lambda s: dict(side=s.side, layers=s.layers)),
    "masking": _Measure(masking.measure_masking, masking.table, lambda s: dict(sides=s.sides, seed=s.seed)),
    "rank": _Measure(rank.measure_rank, rank.table, lambda s: dict(layers=s.layers)),
}


def _plots() -> Any:
    """The module of pictures, whose matplotlib is optional."""
    try:
        from . import plots
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'inline-attention[train]'") from error
    return plots


def _injectivity() -> Analysis:
    plots = _plots()
    result = injectivity.measure_injectivity()
    summaries = {
        f"φ = {panel.feature_map}, {kind}": dict(
            verdict=rows.verdict,
            smallest_difference=rows.smallest_difference,
            largest_difference=rows.largest_difference,
        )
        for panel in result.panels
        for kind, rows in panel.rows.items()
    }
    parameters = dict(tolerance=result.tolerance, **result.parameters)
    table, figure = injectivity.table(result), plots.draw_injectivity(result)
    return Analysis("injectivity", parameters, dict(plane=result), summaries, table, figure)


def _maps(subjects: Sequence[Subject], settings: Settings, progress: Progress) -> Analysis:
    plots = _plots()
    parameters: dict[str, Any] = dict(query=settings.query, layers=settings.layers)
    results: dict[str, list[maps.MapsResult]] = {}
    panels: list[tuple[int, np.ndarray, str, maps.MapsResult]] = []
    for subject in subjects:
        found = results.setdefault(subject.label, [])
        with progress(f"maps {subject.label}") as on_images:
            for number, image in enumerate(_first(subject.images(), settings.map_images)):
                found.append(maps.attention_maps(subject.model, image, **parameters))
                panels.append((number, subject.picture(image), subject.label, found[-1]))
                on_images(1)
        if not found:
            raise ValueError("there are no images to draw maps of")
    heads = min(len(layer.weights) for found in results.values() for layer in found[0].layers)
    if settings.head is not None and not 0 <= settings.head < heads:
        raise ValueError(f"head {settings.head} is not in every layer; expected 0 to {heads - 1}")
    panels.sort(key=lambda panel: panel[0])  # the models side by side, image by image
    summaries = {label: dict(images=len(found), layers=len(found[0].layers)) for label, found in results.items()}
    table = maps.table({f"{label}, image {n}": r for label, found in results.items() for n, r in enumerate(found)})
    figure = plots.draw_maps([panel[1:] for panel in panels], head=settings.head)
    return Analysis("maps", parameters | dict(head=settings.head), results, summaries, table, figure)


def _first(batches: Iterable[Tensor], count: int) -> Iterable[Tensor]:
    return itertools.islice((image for batch in batches for image in batch), count)
