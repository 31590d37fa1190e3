"""Checks the metadata of a weights file. A file is not trusted, because it may come from anywhere.

Its metadata may name a model of this library and give arguments of its constructor, with their types and within bounds.
The model may be one of timm's registry, with numbers as arguments. The metadata may also say that the model was
converted in a way that this library knows. No value is used as a path, a URL or the name of a module.
"""

import collections.abc
import inspect
import json
import math
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Union

import timm
from torch import nn

from ._checkpoint import WeightsError, one_line
from .registry import find_family

LIBRARY, ARCHITECTURE, ARGUMENTS, CHANGES = "library", "architecture", "config", "changes"
TASK, CLASS_NAMES, PREPROCESSING = "task", "class_names", "preprocessing"
MULTI_LABEL = "multi_label"
CLASSIFICATION = "classification"  # the default task of a file
_COMMANDS = {CLASSIFICATION: "inline predict", "segmentation": "inline segment", "detection": "inline detect"}

_MAX_JSON = 16 << 20  # characters
_MAX_ITEMS = 1000  # items of a list
_MAX_TEXT = 200  # characters
_MAX_NUMBER = 2**16
_MAX_CLASSES = 2**20


class Conversion(NamedTuple):
    """A change of a model after it was built. A package that defines one adds it to CONVERSIONS."""

    describe: Callable[[nn.Module], dict[str, str]]  # the metadata of a converted model; empty for any other
    apply: Callable[..., object]  # (model, **arguments): repeats the change on a new model. The keywords have types


CONVERSIONS: dict[str, Conversion] = {}  # by the key of their arguments in the metadata


class Description(NamedTuple):
    """The metadata of a file about its model, checked as far as possible without the model."""

    task: str
    architecture: str
    arguments: dict[str, Any]  # of the constructor, or of the task's builder
    changes: dict[str, Any]  # of the model since it was built; see `VisionModel.changes`
    class_names: list[str] | None
    preprocessing: dict[str, Any]
    multi_label: bool  # each output of the classifier is a decision of its own, by the sigmoid
    conversions: dict[str, dict[str, Any]]  # the arguments of each of CONVERSIONS that the model went through


def read_description(info: Mapping[str, Any]) -> Description | None:
    """The description in the metadata of a file of this library. None for any other file."""
    if not str(info.get(LIBRARY, "")).startswith("inline_attention") or ARCHITECTURE not in info:
        return None
    class_names = _read_json(info, CLASS_NAMES, None)
    if class_names is not None and not (
        isinstance(class_names, list) and all(isinstance(name, str) for name in class_names)
    ):
        raise WeightsError(f"has class names that are not a list of strings: {_shown(class_names)}")
    multi_label = _read_json(info, MULTI_LABEL, False)
    if not isinstance(multi_label, bool):
        raise WeightsError(f"has metadata {MULTI_LABEL!r} that is neither true nor false: {_shown(multi_label)}")
    return Description(
        task=str(info.get(TASK, CLASSIFICATION)),
        architecture=str(info[ARCHITECTURE]),
        arguments=_read_mapping(info, ARGUMENTS),
        changes=_read_mapping(info, CHANGES),
        class_names=class_names,
        preprocessing=_read_mapping(info, PREPROCESSING),
        multi_label=multi_label,
        conversions={key: _read_mapping(info, key) for key in CONVERSIONS if key in info},
    )


def check_task(description: Description | None, task: str) -> None:
    """WeightsError if a file says that it is of another task. The message names the command for that task."""
    if description is not None and description.task != task:
        command = _COMMANDS.get(description.task)
        hint = "" if command is None else f"; use it with `{command}`"
        raise WeightsError(f"holds a model for {one_line(description.task)}, not for {task}{hint}")


def check_model(architecture: str, arguments: Mapping[str, Any]) -> None:
    """WeightsError unless the model in a file is one of ours with valid arguments, or one of timm's with plain ones.

    This function alone decides which models a file may name.
    """
    family = find_family(architecture)
    if family is not None:
        check_arguments(family, arguments)
    elif is_timms(architecture):
        check_foreign_arguments(arguments)
    else:
        raise WeightsError(
            f"asks for the model {_shown(architecture)}, which neither this library nor timm has: build it and "
            "call load_model(path, model=…)"
        )


def is_timms(name: str) -> bool:
    """Whether timm has a model of that name, perhaps with a tag, and this library has not."""
    return ":" not in name and timm.is_model(name) and find_family(name.partition(".")[0]) is None  # ":" is an address


def check_foreign_arguments(arguments: Mapping[str, Any]) -> None:
    """WeightsError unless the arguments for a model of timm are plain numbers, and its pooling one that timm has.

    timm has many constructors, and their types are not checked. Numbers can only change the size of a model, which the
    comparison of shapes detects. Arguments of `timm.create_model` itself are refused: they could make it open files.
    """
    reserved = inspect.signature(timm.create_model).parameters
    for name in arguments:
        if name in reserved:
            raise WeightsError(f"gives {_shown(name)}, which is not an argument of a model")
    number = bool | int | float | None
    expected: dict[str, Any] = dict.fromkeys(arguments, number | list[number])
    if "global_pool" in expected:
        expected["global_pool"] = Literal["", "avg", "avgmax", "max", "token", "map"]
    check_values(expected, arguments)


def check_arguments(build: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    """WeightsError unless `arguments` have names of parameters of `build` and values of the annotated types."""
    function = build.__init__ if inspect.isclass(build) else build
    types_of = typing.get_type_hints(function)
    known = [name for name in inspect.signature(build).parameters if name in types_of]
    check_values({name: types_of[name] for name in known}, arguments)


def check_values(expected: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """WeightsError unless every value has a name in `expected` and its type."""
    for name, value in values.items():
        if name not in expected:
            raise WeightsError(f"gives {_shown(name)}, which is not one of {', '.join(expected)}")
        largest = _MAX_CLASSES if name == "num_classes" else _MAX_NUMBER
        if not _has_type(value, expected[name], largest):
            raise WeightsError(f"gives {name}={_shown(value)}; expected {_name(expected[name])} up to {largest}")


def _has_type(value: Any, expected: Any, largest: int) -> bool:
    origin, parameters = typing.get_origin(expected), typing.get_args(expected)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, option, largest) for option in parameters)
    if origin is Literal:
        return value in parameters
    if origin in (list, tuple, collections.abc.Sequence):
        return (
            isinstance(value, list | tuple)
            and len(value) <= _MAX_ITEMS
            and all(_has_type(item, parameters[0], largest) for item in value)
        )
    if expected is type(None):
        return value is None
    if expected is str:
        return isinstance(value, str) and len(value) <= _MAX_TEXT
    if expected is bool:
        return isinstance(value, bool)
    if expected is int:
        return type(value) is int and 0 <= value <= largest
    if expected is float:
        return type(value) in (int, float) and math.isfinite(value) and abs(value) <= largest
    return False


def _name(expected: Any) -> str:
    plain = inspect.isclass(expected) and not typing.get_args(expected)  # list[float] is a class on Python 3.10
    return expected.__name__ if plain else str(expected).replace("typing.", "")


def _read_json(info: Mapping[str, Any], key: str, default: Any) -> Any:
    text = info.get(key)
    if text is None:
        return default
    try:
        if not isinstance(text, str) or len(text) > _MAX_JSON:
            raise ValueError("too long")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"has metadata {key!r} that is not JSON: {_shown(text)}") from error


def _read_mapping(info: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = _read_json(info, key, {})
    if not isinstance(value, dict):
        raise WeightsError(f"has metadata {key!r} that is not a mapping: {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return one_line(reprlib.repr(value))


def annotations_of(cls: type, names: Iterable[str]) -> dict[str, Any]:
    """The types of some fields of a dataclass, for `check_values`."""
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in names}
