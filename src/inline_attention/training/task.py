"""What a task is to the loop: where its data come from, what it learns, how it is judged. And what tasks share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from inline_attention._version import __version__
from inline_attention.data import SkippedImage
from inline_attention.models.published import PUBLISHED
from inline_attention.models.shipped import shipped_weights
from inline_attention.models.weights import local_path
from inline_attention.training.config import BackboneConfig, LoopConfig
from inline_attention.training.distributed import Ranks


class TrainingBatch(Protocol):
    """Whatever a task's model and losses take; the loop itself reads nothing but whose samples they are."""

    sample_ids: Tensor  # (B,) int64 on the device, in the order in which the model sees the samples


class TrainSplit(Protocol):
    """Training batches, a function of (seed, epoch, step); `inline_attention.data.TrainLoader` is one."""

    batch_size: int  # of a rank; below data.batch_size where there are too few images for one batch
    steps_per_epoch: int  # the same on every rank
    waiting_seconds: float  # spent in waiting for batches since it was opened
    exact_resume: bool  # False: a resumed epoch starts again at its first sample

    @property
    def skipped(self) -> Iterable[SkippedImage]: ...

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[Any]: ...

    def close(self) -> None:
        """After the last epoch: ends the worker processes."""


class EvalSplit(Protocol):
    @property
    def skipped(self) -> Iterable[SkippedImage]: ...


class TaskData(Protocol):
    """Both splits, on the device of the rank they were opened for."""

    @property
    def train(self) -> TrainSplit: ...

    @property
    def val(self) -> EvalSplit: ...

    @property
    def class_names(self) -> list[str]: ...


@dataclass(frozen=True)
class Headline:
    """The figure of an evaluation, in per cent, that says which weights are the best: the highest."""

    key: str  # among the figures, in metrics.jsonl behind "val_", in the summary behind "best_"
    label: str  # for people


@dataclass(frozen=True)
class Evaluation:
    """The same on every rank."""

    figures: dict[str, float]  # by name; "loss" where there is one
    details: Any = None  # what the task makes its pictures and tables from


Writer = Callable[[Path], None]


class Task(ABC):
    """One per run and rank. The loop calls its methods in the order in which they stand here."""

    recipes: ClassVar[str]  # folder of its recipes below the package's; "": the recipes of classification
    default_recipe: ClassVar[str | None]  # None: the user must name one
    data_hint: ClassVar[str]  # how to name the data, for who has not
    headline: ClassVar[Headline]
    summary_figures: ClassVar[tuple[str, ...]]  # of the last evaluation, in summary.json
    fixed_shapes: ClassVar[bool]  # the model meets one size in training and one in evaluation: CUDA graphs suit it

    @staticmethod
    @abstractmethod
    def defaults() -> LoopConfig:
        """The configuration that recipes change."""

    def __init__(self, config: Any) -> None:
        """config: of the type of `defaults()`"""
        self.config = config

    @property
    def title(self) -> str:
        """What is trained, in a word or two."""
        return self.config.model.name

    @abstractmethod
    def open_data(self, ranks: Ranks) -> TaskData:
        """Open this rank's share of both splits on its device; what is wrong with the data is a ValueError here."""

    def fetch_weights(self) -> None:
        """Download what `model.weights` names, for every rank to find it in the cache. On rank 0 alone."""
        model: BackboneConfig = self.config.model
        name = model.name if model.weights == "pretrained" else model.weights
        if name not in PUBLISHED:
            return
        try:
            local_path(weights_source(name))
        except ConnectionError as error:
            raise ConnectionError(
                f"{error}. Or start from a file (model.weights=FILE) or from random weights (model.weights=null)"
            ) from error

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on the CPU, from weights that are a function of the seed or of a file."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """What goes into every weights file: enough to build the model again; see `describe`."""

    @abstractmethod
    def losses(self, forward: Callable[..., Any], batch: Any, *, epoch: int, step: int) -> dict[str, Tensor]:
        """The parts () of the loss of one batch by name; their sum is what is learnt.

        forward: calls the model, in the run's precision. Each part is a mean over the batch whose divisor does not
        depend on the rank, so that the mean over ranks is that of the global batch. Nothing may read from the device.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, *, device: torch.device, amp_dtype: torch.dtype | None) -> Evaluation:
        """Over the validation split of all ranks; called on every rank, leaves the model in the mode it found."""

    def leave_behind(self, evaluation: Evaluation) -> dict[str, Writer]:
        """Files for the run folder when the run is over: name → what writes it. ImportError: without that one."""
        return {}


def describe(
    config: LoopConfig, *, arguments: Mapping[str, Any], class_names: list[str], **more: str
) -> dict[str, str]:
    """The metadata of a weights file that `check_same_task` compares, and `more`."""
    return {
        "format": "pt",
        "library": f"inline_attention {__version__}",
        "architecture": config.model.name,
        "config": json.dumps(arguments),
        "class_names": json.dumps(class_names),
        **more,
        "recipe": config.recipe,
    }


def check_same_task(before: dict[str, str], now: Mapping[str, str], checkpoint: Path) -> None:
    """ValueError where the checkpoint is of another model or other classes than this run's."""
    if before["architecture"] != now["architecture"]:
        raise ValueError(f"{checkpoint} is of {before['architecture']}, this run trains {now['architecture']}")
    old_classes, new_classes = json.loads(before["class_names"]), json.loads(now["class_names"])
    if len(old_classes) != len(new_classes):
        raise ValueError(
            f"{checkpoint} has {len(old_classes)} classes, the data {len(new_classes)}: a run goes on with the classes "
            "it began with. For other classes start a new run with model.weights=… model.reset_head=true"
        )
    if old_classes != new_classes:
        old, new = next((a, b) for a, b in zip(old_classes, new_classes, strict=True) if a != b)
        raise ValueError(f"{checkpoint} knows other classes than the data: {old!r} there is {new!r} here")
    old_arguments, new_arguments = json.loads(before["config"]), json.loads(now["config"])
    for name in sorted(set(old_arguments | new_arguments) - {"drop_path_rate"}):
        if old_arguments.get(name) != new_arguments.get(name):
            raise ValueError(
                f"{checkpoint} was trained with {name}={old_arguments.get(name)}, "
                f"this run has {name}={new_arguments.get(name)}"
            )


def weights_source(weights: str) -> str:
    """The file or address of `model.weights`, which may be the name of a model with published or shipped weights."""
    if weights not in PUBLISHED:
        return str(shipped_weights(weights) or weights)
    if not PUBLISHED[weights].url:
        raise ValueError(f"model.weights={weights}: no weights of that model were published; give a file")
    return PUBLISHED[weights].url
