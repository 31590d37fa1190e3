"""Whole models, backbone and heads, from weights files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

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
from inline_attention.training.config import BackboneConfig
from inline_attention.training.task import weights_source

ModelT = TypeVar("ModelT", bound=nn.Module)
ConfigT = TypeVar("ConfigT", bound=BackboneConfig)
DataT = TypeVar("DataT", bound=LoaderConfig)


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


def read_configuration(
    file: TaskFile, model: ConfigT, data: DataT, *, arguments: Sequence[str], preparation: Sequence[str]
) -> tuple[ConfigT, DataT]:
    """What a file says about its model and its images, as configurations; WeightsError for anything else.

    Args:
        model: the task's default; the file may set the backbone's name and `kwargs`, and `arguments`.
        data: the task's default, of which the file may set `preparation`.
    """
    said = file.said
    with errors_name(file.path):
        given = dict(said.arguments)
        for name in ("kwargs", "head_kwargs"):
            if not isinstance(given.get(name, {}), dict):
                raise WeightsError(f"gives {name} that are not a mapping")
        check_model(said.architecture, given.pop("kwargs", {}))
        plain = {name: value for name, value in given.items() if name != "head_kwargs" or name not in arguments}
        check_values(annotations_of(type(model), arguments), plain)
        prepared = {key: said.preprocessing[key] for key in preparation if key in said.preprocessing}
        check_values(annotations_of(type(data), preparation), prepared)
        data = replace(data, **prepared)
        data.validate()
        return replace(model, name=said.architecture, **said.arguments), data


def restore_whole(file: TaskFile, build: Callable[[int], ModelT]) -> tuple[ModelT, list[str]]:
    """Builds the model of a file and loads it. Returns it with the names of its classes.

    Args:
        build: makes the model for a number of classes, without weights.
    """
    class_names = file.said.class_names
    if not class_names:
        raise WeightsError(f"{file.path} does not name its classes")
    model = build_fitting(lambda: build(len(class_names)), file.checkpoint, origin=str(file.path))
    model.load_state_dict(fit(model, file.checkpoint, origin=str(file.path)))
    return model.eval(), class_names


def find_weights(weights: str | None, task: str) -> tuple[TaskFile | None, str | None]:
    """What `model.weights` names: the file of a whole model of that task, or where the weights of a backbone are."""
    if weights is None or weights == "pretrained":
        return None, weights
    source = weights_source(weights)
    whole = task_file(source, task)
    return (None, source) if whole is None else (whole, None)


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
