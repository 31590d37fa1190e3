"""The interface between the loop and a task: data, model, losses and evaluation. Also helpers that tasks share."""

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
    """A batch of the task's own type. The loop reads `sample_ids` and nothing else."""

    sample_ids: Tensor  # (B,) int64 on the device, in the order of the samples in the batch


class TrainSplit(Protocol):
    """Training batches as a function of (seed, epoch, step), such as `inline_attention.data.TrainLoader`."""

    batch_size: int  # of a rank; smaller than data.batch_size if there are too few images
    steps_per_epoch: int  # the same on every rank
    waiting_seconds: float  # time spent waiting for batches since the split was opened
    exact_resume: bool  # False: a resumed epoch starts again at its first sample

    @property
    def skipped(self) -> Iterable[SkippedImage]: ...

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[Any]: ...

    def close(self) -> None:
        """End the worker processes. Called after the last epoch."""


class EvalSplit(Protocol):
    @property
    def skipped(self) -> Iterable[SkippedImage]: ...


class TaskData(Protocol):
    """Both splits of a task, on the device of this rank."""

    @property
    def train(self) -> TrainSplit: ...

    @property
    def val(self) -> EvalSplit: ...

    @property
    def class_names(self) -> list[str]: ...


@dataclass(frozen=True)
class Headline:
    """The metric, in per cent, that ranks weights: higher is better."""

    key: str  # its name among the figures: val_<key> in metrics.jsonl, best_<key> in the summary
    label: str  # its name in messages and figures


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, the same on every rank."""

    figures: dict[str, float]  # metrics by name; "loss" if the task has one
    details: Any = None  # input of `Task.result_files`


Writer = Callable[[Path], None]


class Task(ABC):
    """A training task. Each rank has one instance per run; the loop calls its methods in the order below."""

    recipes: ClassVar[str]  # folder of its recipes in the package
    default_recipe: ClassVar[str | None]  # None: the user must name a recipe
    data_hint: ClassVar[str]  # error message for a run without data
    headline: Headline  # may depend on the data: the loop reads it after `open_data`
    summary_figures: tuple[str, ...]  # figures of the last evaluation that summary.json contains
    fixed_shapes: ClassVar[bool]  # one input shape in training and one in evaluation, as CUDA graphs need
    unused_parameters: bool = False  # whether some parameters get no gradient, which DDP must be told

    @staticmethod
    @abstractmethod
    def defaults() -> LoopConfig:
        """The default configuration, which recipes change."""

    @staticmethod
    def loop_settings(config: Any) -> LoopConfig:
        """The settings that the loop uses. A task overrides this if they differ from its configuration."""
        return config

    def __init__(self, config: Any) -> None:
        """config: an instance of the type of `defaults()`."""
        self.config = config
        self.resumed_run: Path | None = None  # folder of the run that is continued; set before `open_data`

    @property
    def title(self) -> str:
        """A short name of the model, for messages."""
        return self.config.model.name

    def choose_from_data(self, world_size: int) -> dict[str, Any]:
        """Values for the settings that `config.from_data` names, by name. Only rank 0 calls this.

        They are written to config.yaml, so that a resumed run does not choose again.
        """
        if self.config.from_data:
            raise ValueError(f"from_data={self.config.from_data[0]}: this task chooses nothing from the data")
        return {}

    @abstractmethod
    def open_data(self, ranks: Ranks) -> TaskData:
        """Open this rank's share of both splits on its device. Raises ValueError if they cannot be used."""

    def start_files(self) -> dict[str, bytes]:
        """Files to write when the run starts, by name: what a resumed run has to read again."""
        return {}

    def fetch_weights(self) -> None:
        """Download the weights that `model.weights` names into the cache. Only rank 0 calls this."""
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
        """Build the model on the CPU. Its weights are a function of the seed, or come from a file."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """The metadata of weights files, from which the model can be built again; see the function `describe`."""

    @abstractmethod
    def losses(self, forward: Callable[..., Any], batch: Any, *, epoch: int, step: int) -> dict[str, Tensor]:
        """The terms () of the loss of one batch, by name. The loss is their sum.

        forward: calls the model in the run's precision. Each term is a mean over the batch. Its divisor must be the
        same on every rank, so that the mean over ranks is the mean over the global batch. Nothing here may read from
        the device.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, *, device: torch.device, amp_dtype: torch.dtype | None) -> Evaluation:
        """Evaluate over the validation split of all ranks. Every rank calls this; the model's mode is restored."""

    def result_files(self, evaluation: Evaluation) -> dict[str, Writer]:
        """Files for the run folder at the end of the run: name → function that writes it.

        A file whose function raises ImportError is left out.
        """
        return {}


def describe(
    config: LoopConfig, *, arguments: Mapping[str, Any], class_names: list[str], **more: str
) -> dict[str, str]:
    """The metadata of a weights file: what `check_same_task` compares, and `more`."""
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
    """ValueError if the checkpoint has another model or other classes than this run."""
    if before["architecture"] != now["architecture"]:
        raise ValueError(
            f"{checkpoint} is of {before['architecture']}, this run trains {now['architecture']}; start a new run for "
            "another model"
        )
    old_classes, new_classes = json.loads(before["class_names"]), json.loads(now["class_names"])
    if len(old_classes) != len(new_classes):
        raise ValueError(
            f"{checkpoint} has {len(old_classes)} classes, the data {len(new_classes)}: a run continues with the "
            "classes it began with. For other classes start a new run with model.weights=… model.reset_head=true"
        )
    if old_classes != new_classes:
        old, new = next((a, b) for a, b in zip(old_classes, new_classes, strict=True) if a != b)
        raise ValueError(f"{checkpoint} has other classes than the data: {old!r} instead of {new!r}")
    old_arguments, new_arguments = json.loads(before["config"]), json.loads(now["config"])
    for name in sorted(set(old_arguments | new_arguments) - {"drop_path_rate"}):
        if old_arguments.get(name) != new_arguments.get(name):
            raise ValueError(
                f"{checkpoint} was trained with {name}={old_arguments.get(name)}, this run has "
                f"{name}={new_arguments.get(name)}; to change it, start a new run with model.weights=…"
            )


def weights_source(weights: str) -> str:
    """The file or address of `model.weights`, which may be the name of a model with published or shipped weights."""
    if weights not in PUBLISHED:
        return str(shipped_weights(weights) or weights)
    if not PUBLISHED[weights].url:
        raise ValueError(f"model.weights={weights}: no weights of that model were published; give a file")
    return PUBLISHED[weights].url
