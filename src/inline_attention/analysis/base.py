"""The base class of analyses, and the models and images that they run on."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batches = Iterable[tuple[Tensor, Tensor | None]]  # images (B, C, H, W), normalised, and their labels
Table = tuple[Sequence[str], Sequence[Sequence[object]]]  # header and lines
OnImages = Callable[[int], None]  # called with the number of images done since the last call
Progress = Callable[[str], AbstractContextManager[OnImages]]


@dataclass(frozen=True)
class Subject:
    """A model and the images to analyse it on."""

    model: nn.Module
    batches: Callable[[], Batches]  # starts again at the first image
    mean: tuple[float, ...]  # of the normalisation, by channel
    std: tuple[float, ...]
    facts: dict[str, Any]  # for the record: model, weights, attention, images, …
    label: str = ""

    def images(self) -> Iterable[Tensor]:
        return (images for images, _ in self.batches())

    def picture(self, image: Tensor) -> np.ndarray:
        """A normalised image (C, H, W) → pixels to draw, (H, W) or (H, W, 3) in 0 … 1"""
        pixels = image.cpu().numpy().transpose(1, 2, 0) * np.array(self.std) + np.array(self.mean)
        return np.clip(pixels, 0, 1).squeeze()


def label_subjects(subjects: Sequence[Subject], labels: Sequence[str] | None) -> list[Subject]:
    """Subjects with these labels, or with the names of their models.

    Equal names get the attention as a suffix, or else a number.
    """
    if labels is not None and len(labels) != len(subjects):
        raise ValueError(f"there are {len(subjects)} models and {len(labels)} labels")
    names = list(labels or (subject.facts["model"] for subject in subjects))
    if len(set(names)) < len(names):
        names = [f"{name} ({subject.facts['attention']})" for name, subject in zip(names, subjects, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} #{i}" for i, name in enumerate(names, start=1)]
    return [replace(subject, label=name) for subject, name in zip(subjects, names, strict=True)]


@dataclass(frozen=True)
class Findings:
    """The findings of an analysis: results, summaries, table, figure."""

    name: str
    definition: str
    parameters: dict[str, Any]
    results: dict[str, Any]  # by label
    summaries: dict[str, dict[str, Any]]  # by label: the numbers worth a table
    table: Table
    figure: "Figure"
    warning: str | None = None  # why the numbers are not reliable


def option(default: Any, help: str, *, type: Callable[[str], Any], nargs: int | Literal["+"] | None = None) -> Any:
    """A field of an analysis that the command line sets. Several values make a tuple."""
    return dataclasses.field(default=default, metadata=dict(help=help, type=type, nargs=nargs))


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """One measurement of the paper, with all that belongs to it.

    A subclass is a file in `measures`. No other file has to change. Its docstring defines the measurement in the
    report. Its fields are its options. Its methods measure one subject, and tabulate and draw the results of
    several.
    """

    needs_models: ClassVar[bool] = True
    least_images: ClassVar[int] = 1  # with fewer, a number says more about the images than about the model

    @classmethod
    def name(cls) -> str:
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def definition(cls) -> str:
        return " ".join((inspect.getdoc(cls) or "").split())

    def count(self, images: int) -> int:
        """How many of the available images the analysis uses."""
        return images

    def measure(self, subject: Subject, on_images: OnImages) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define measure")

    def summarise(self, result: Any) -> dict[str, Any]:
        """The numbers of a result that are worth a table."""
        return result.summary()

    def table(self, results: Mapping[str, Any]) -> Table:
        """Header and lines of a CSV file."""
        raise NotImplementedError(f"{type(self).__name__} has no table")

    def draw(self, results: Mapping[str, Any]) -> "Figure":
        raise NotImplementedError(f"{type(self).__name__} has no picture")

    def run(self, subjects: Sequence[Subject], *, progress: Progress) -> Findings:
        from . import figures  # noqa: F401  # a missing matplotlib is an error before anything is measured

        results = {}
        for subject in subjects:
            with progress(f"{self.name()} {subject.label}") as on_images:
                results[subject.label] = self.measure(subject, on_images)
        return self.findings(results)

    def findings(self, results: dict[str, Any]) -> Findings:
        summaries = {label: self.summarise(result) for label, result in results.items()}
        counts = [summary["images"] for summary in summaries.values() if "images" in summary]
        return Findings(
            name=self.name(),
            definition=self.definition(),
            parameters=dataclasses.asdict(self),
            results=results,
            summaries=summaries,
            table=self.table(results),
            figure=self.draw(results),
            warning=self.warn_of_few(min(counts)) if counts else None,
        )

    def warn_of_few(self, images: int) -> str | None:
        """The warning about too few images. None: there are enough."""
        if images >= self.least_images:
            return None
        counted = "1 image is" if images == 1 else f"{images} images are"
        return f"{counted} too few for {self.name()}: give at least {self.least_images} before relying on its numbers"


def layer(text: str) -> int | str:
    """A layer from the command line: its name or its number, negative from the end."""
    return int(text) if text.lstrip("-").isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class LayerAnalysis(Analysis):
    """An analysis that can be limited to some layers."""

    layers: tuple[str | int, ...] | None = option(
        None, "names or numbers, -1 the last (default: all)", type=layer, nargs="+"
    )
