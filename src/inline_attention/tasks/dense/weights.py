"""Whole models, backbone and heads: built from a configuration, loaded from weights files."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from inline_attention.data import LoaderConfig
from inline_attention.models._checkpoint import Checkpoint, WeightsError, errors_name, open_checkpoint
from inline_attention.models._download import local_path
from inline_attention.models.schema import (
    Description,
    annotations_of,
    check_model,
    check_values,
    read_description,
)
from inline_attention.models.weights import build_fitting, fit
from inline_attention.tasks.dense.config import HeadedConfig
from inline_attention.training.task import weights_source

ModelT = TypeVar("ModelT", bound=nn.Module)
ConfigT = TypeVar("ConfigT", bound=HeadedConfig)
DataT = TypeVar("DataT", bound=LoaderConfig)


@dataclass(frozen=True)
class TrainedModel(Generic[ModelT, DataT]):
    """A model from a weights file, in evaluation mode, with what the file says about it."""

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
        create: builds a model from its configuration, its number of classes and the weights of its backbone.
        title: name of a model in reports.
        model: default configuration of a model.
        data: default configuration of the data.
        arguments: settings of the model that a file stores, beside the backbone's.
        preparation: settings of the data that a file stores.
        check: further checks of a model's configuration from a file; raises ValueError.
    """

    task: str
    command: str
    create: Callable[[ConfigT, int, str | None], ModelT]
    title: Callable[[ConfigT], str]
    model: ConfigT
    data: DataT
    arguments: tuple[str, ...]
    preparation: tuple[str, ...]
    check: Callable[[ConfigT], None] = lambda config: None

    def arguments_of(self, model: ConfigT) -> dict[str, Any]:
        """The settings that a weights file stores under "config", to build the model again"""
        return {name: getattr(model, name) for name in ("kwargs", *self.arguments)}

    def preparation_of(self, data: DataT) -> str:
        """The settings that a weights file stores under "preprocessing", as JSON"""
        return json.dumps({name: getattr(data, name) for name in self.preparation})

    def build(self, config: ConfigT, *, num_classes: int) -> ModelT:
        """Build a model and load the weights that its configuration names, of a whole model or of a backbone."""
        weights, whole = config.weights, None
        if weights is not None and weights != "pretrained":
            weights = weights_source(weights)
            whole = task_file(weights, self.task)
        model = self.create(config, num_classes, None if whole is not None else weights)
        if whole is not None:
            load_whole(model, whole, backbone_only=config.reset_head)
        return model

    def load(self, weights: str) -> TrainedModel[ModelT, DataT]:
        """A model from a weights file (or its URL) that the command wrote; WeightsError for anything else."""
        file = task_file(weights, self.task)
        if file is None:
            raise ValueError(f"{weights!r} is no weights file of `{self.command}`")
        with errors_name(file.path):
            config, data = self._read(file.said)
        class_names = file.said.class_names
        if not class_names:
            raise WeightsError(f"{file.path} does not name its classes")
        origin = str(file.path)
        model = build_fitting(lambda: self.create(config, len(class_names), None), file.checkpoint, origin=origin)
        model.load_state_dict(fit(model, file.checkpoint, origin=origin))
        return TrainedModel(model.eval(), self.title(config), class_names, data)

    def _read(self, said: Description) -> tuple[ConfigT, DataT]:
        """The configurations that a file describes. WeightsError for a setting that it must not change."""
        given = dict(said.arguments)
        for name in ("kwargs", "head_kwargs"):
            if not isinstance(given.get(name, {}), dict):
                raise WeightsError(f"gives {name} that are not a mapping")
        check_model(said.architecture, given.pop("kwargs", {}))
        plain = {name: value for name, value in given.items() if name != "head_kwargs" or name not in self.arguments}
        check_values(annotations_of(type(self.model), self.arguments), plain)
        prepared = {key: said.preprocessing[key] for key in self.preparation if key in said.preprocessing}
        check_values(annotations_of(type(self.data), self.preparation), prepared)
        data = replace(self.data, **prepared)
        data.validate()
        model = replace(self.model, name=said.architecture, **said.arguments)
        self.check(model)
        return model, data


class TaskFile(NamedTuple):
    """A file of a whole model, open."""

    path: Path
    checkpoint: Checkpoint
    said: Description


def task_file(source: str, task: str) -> TaskFile | None:
    """Opens a file (downloaded first, if `source` is a URL); None if it does not hold a whole model of that task."""
    path = local_path(source)
    checkpoint = open_checkpoint(path)
    with errors_name(path):
        said = read_description(checkpoint.info)
    return TaskFile(path, checkpoint, said) if said is not None and said.task == task else None


def load_whole(model: nn.Module, file: TaskFile, *, backbone_only: bool = False) -> None:
    """Loads a file of such a model, or its `backbone` alone. An error leaves the model as it was."""
    found = file.checkpoint.state_dict
    target = model
    if backbone_only:
        target = model.get_submodule("backbone")
        found = {name.removeprefix("backbone."): v for name, v in found.items() if name.startswith("backbone.")}
    own = target.state_dict()
    misfits = sorted(name for name in own.keys() | found.keys() if _shape(own.get(name)) != _shape(found.get(name)))
    if misfits:
        hint = "" if backbone_only else "; for other classes or another head set model.reset_head=true"
        raise WeightsError(
            f"{file.path} does not fit the model: {len(misfits)} tensors differ, such as {misfits[0]}{hint}"
        )
    target.load_state_dict(found)


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
