"""Models of backbone and heads: built from a configuration, or loaded from a weights file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from inline_attention.data import LoaderConfig
from inline_attention.models._checkpoint import Checkpoint, WeightsError, errors_name, one_line, open_checkpoint
from inline_attention.models._download import local_path
from inline_attention.models.schema import (
    CLASSIFICATION,
    Description,
    annotations_of,
    check_model,
    check_task,
    check_values,
    read_description,
)
from inline_attention.models.weights import build_fitting, fit, load_checkpoint
from inline_attention.tasks.dense.backbone import HeadedModel
from inline_attention.tasks.dense.config import HeadedConfig
from inline_attention.training.task import weights_source

ModelT = TypeVar("ModelT", bound=HeadedModel)
ConfigT = TypeVar("ConfigT", bound=HeadedConfig)
DataT = TypeVar("DataT", bound=LoaderConfig)


@dataclass(frozen=True)
class TrainedModel(Generic[ModelT, DataT]):
    """A model from a weights file, in evaluation mode, with the metadata of the file."""

    model: ModelT
    title: str
    class_names: list[str]
    data: DataT  # how images are prepared


@dataclass(frozen=True)
class TaskModels(Generic[ModelT, ConfigT, DataT]):
    """How the models of one task are built, and which settings their weights files store.

    Args:
        task: name of the task in the metadata of a file.
        command: the command that writes such files, for messages.
        create: builds a model, such as `create_segmenter`.
        heads: the heads by name; the first entry of each is its title.
        model: default configuration of a model.
        data: default configuration of the data.
        arguments: settings of the head that a file stores.
        unstored: further settings of the head, which matter in training only.
        preparation: settings of the data that a file stores.
        check: further checks of a model's configuration from a file; raises ValueError.
    """

    task: str
    command: str
    create: Callable[..., ModelT]
    heads: Mapping[str, tuple[Any, ...]]
    model: ConfigT
    data: DataT
    arguments: tuple[str, ...]
    preparation: tuple[str, ...]
    unstored: tuple[str, ...] = ()
    check: Callable[[ConfigT], None] = lambda config: None

    def title(self, config: ConfigT) -> str:
        """The name of a model in reports."""
        return f"{config.name} + {self.heads[config.head][0]}"

    def _create(self, config: ConfigT, num_classes: int, weights: str | None) -> ModelT:
        """weights: those of the backbone."""
        return self.create(
            config.name,
            config.head,
            num_classes=num_classes,
            weights=weights,
            drop_path=config.drop_path,
            kwargs=config.kwargs,
            **{name: getattr(config, name) for name in (*self.arguments, *self.unstored)},
        )

    def arguments_of(self, model: ConfigT) -> dict[str, Any]:
        """The settings that a weights file stores under "config", to build the model again"""
        return {name: getattr(model, name) for name in ("kwargs", "head", *self.arguments)}

    def preparation_of(self, data: DataT) -> str:
        """The settings that a weights file stores under "preprocessing", as JSON"""
        return json.dumps({name: getattr(data, name) for name in self.preparation})

    def build(self, config: ConfigT, *, num_classes: int) -> ModelT:
        """Build a model and load the weights that its configuration names, of a whole model or of a backbone."""
        weights = config.weights
        if weights is None or weights == "pretrained":
            return self._create(config, num_classes, weights)
        weights = weights_source(weights)
        file = open_task_file(weights)
        described = file.description
        if described is None or described.task == CLASSIFICATION:
            return self._create(config, num_classes, weights)
        if described.architecture != config.name:
            raise WeightsError(f"{file.path} holds weights of {one_line(described.architecture)}, not of {config.name}")
        model = self._create(config, num_classes, None)
        if config.reset_head:
            load_backbone(model, file)
            return model
        try:
            with errors_name(file.path):
                check_task(described, self.task)
            load_checkpoint(model, file.checkpoint, origin=str(file.path))
        except WeightsError as error:
            raise WeightsError(f"{error}; set model.reset_head=true to load only its backbone") from error
        return model

    def load(self, weights: str) -> TrainedModel[ModelT, DataT]:
        """A model from a weights file (or its URL) that the command wrote. ValueError for any other file."""
        file = open_task_file(weights)
        described = file.description
        if described is None:
            raise ValueError(f"{weights!r} is not a weights file of `{self.command}`; give one that it wrote")
        with errors_name(file.path):
            check_task(described, self.task)
            config, data = self._read(described)
        class_names = described.class_names
        if not class_names:
            raise WeightsError(f"{file.path} does not name its classes")
        origin = str(file.path)
        model = build_fitting(lambda: self._create(config, len(class_names), None), file.checkpoint, origin=origin)
        model.load_state_dict(fit(model, file.checkpoint, origin=origin))
        return TrainedModel(model.eval(), self.title(config), class_names, data)

    def _read(self, description: Description) -> tuple[ConfigT, DataT]:
        """The configurations in the metadata of a file. WeightsError for a setting that a file must not contain."""
        arguments = dict(description.arguments)
        for name in ("kwargs", "head_kwargs"):
            if not isinstance(arguments.get(name, {}), dict):
                raise WeightsError(f"gives {name} that are not a mapping")
        check_model(description.architecture, arguments.pop("kwargs", {}))
        if "head_kwargs" in self.arguments:  # `check` knows their types
            arguments.pop("head_kwargs", None)
        check_values(annotations_of(type(self.model), ("head", *self.arguments)), arguments)
        prepared = {key: description.preprocessing[key] for key in self.preparation if key in description.preprocessing}
        check_values(annotations_of(type(self.data), self.preparation), prepared)
        data = replace(self.data, **prepared)
        data.validate()
        model = replace(self.model, name=description.architecture, **description.arguments)
        self.check(model)
        return model, data


class TaskFile(NamedTuple):
    """An open weights file."""

    path: Path
    checkpoint: Checkpoint
    description: Description | None  # None: not a file of this library


def open_task_file(source: str) -> TaskFile:
    """Open a file, or download it if `source` is a URL."""
    path = local_path(source)
    checkpoint = open_checkpoint(path)
    with errors_name(path):
        return TaskFile(path, checkpoint, read_description(checkpoint.info))


def load_backbone(model: HeadedModel, file: TaskFile) -> None:
    """Load only the backbone from the file of a whole model. An error leaves the model unchanged."""
    found = file.checkpoint.state_dict
    own = {name.removeprefix("backbone."): v for name, v in found.items() if name.startswith("backbone.")}
    load_checkpoint(model.backbone, replace(file.checkpoint, state_dict=own), origin=str(file.path))
