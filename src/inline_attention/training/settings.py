"""Dataclasses from YAML and from `section.key=value`: typed, nothing unknown accepted. Knows no particular setting."""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import yaml

Settings = TypeVar("Settings")


def update(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """A copy of `settings` (a dataclass of dataclasses) with the nested `values` in it, as the declared types.

    An unknown key is a ValueError that names the nearest known one.
    """
    return _update(settings, values, prefix="", known=keys(settings))


def _update(settings: Settings, values: Mapping[str, Any], *, prefix: str, known: list[str]) -> Settings:
    hints = typing.get_type_hints(type(settings))
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in hints:
            raise ValueError(_unknown(name, value, known))
        current = getattr(settings, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                first = dataclasses.fields(current)[0].name
                raise ValueError(f"{name} is a section: set one of its keys, such as {name}.{first}=…")
            changes[key] = _update(current, value, prefix=f"{name}.", known=known)
        elif isinstance(current, dict) and isinstance(value, Mapping):
            changes[key] = {**current, **value}
        else:
            changes[key] = convert(value, hints[key], name=name)
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]  # a dataclass, see the docstring


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`["optim.lr=1e-3", …]` as nested dictionaries; values are YAML, the last of two equal keys wins."""
    nested: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ValueError(f"expected key=value, such as optim.lr=1e-3, got {override!r}")
        try:
            value = yaml.safe_load(text) if text else None
        except yaml.YAMLError:
            value = text
        *parents, last = path.strip().split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
            if not isinstance(level, dict):
                raise ValueError(f"{override!r}: {parent} was given a value before")
        level[last] = value
    return nested


def to_yaml(settings: Any) -> str:
    return yaml.safe_dump(to_mapping(settings), sort_keys=False, allow_unicode=True)


def to_mapping(settings: Any) -> dict[str, Any]:
    """Plain dictionaries, lists and scalars, as YAML and JSON hold them."""
    return {key: _plain(value) for key, value in dataclasses.asdict(settings).items()}


def keys(settings: Any, prefix: str = "") -> list[str]:
    """Every dotted key below a dataclass."""
    found = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        name = f"{prefix}{field.name}"
        found += keys(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return found


def convert(value: Any, hint: Any, *, name: str) -> Any:
    """`value` (from YAML) as the type `hint`. YAML reads 1e-3 as text: a number is accepted in either form."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        for option in options[:-1]:
            with contextlib.suppress(ValueError):
                return convert(value, option, name=name)
        return convert(value, options[-1], name=name)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, arguments))}")
    if origin in (list, tuple):
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list | tuple):
            raise _wrong(name, value, hint)
        if origin is tuple and arguments[-1:] != (Ellipsis,):
            if len(value) != len(arguments):
                raise ValueError(f"{name}={value!r}: expected {len(arguments)} values")
            return tuple(convert(v, a, name=name) for v, a in zip(value, arguments, strict=True))
        return origin(convert(v, arguments[0], name=name) for v in value)
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise _wrong(name, value, hint)
        return dict(value)
    if hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                number = float(value)
            except (ValueError, OverflowError):
                raise _wrong(name, value, hint) from None
            if math.isfinite(number):
                return number
            raise ValueError(f"{name}={value}: expected a finite number")
    elif hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)  # a folder called 2024
    raise _wrong(name, value, hint)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known dotted key that was probably meant: same last part first, then the closest spelling."""
    known = list(known)
    last = name.rpartition(".")[2]
    same_last = [key for key in known if key.rpartition(".")[2] == last]
    by_last = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    close_last = [by_last[match] for match in difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)]
    return next(iter([*same_last, *close, *close_last]), None)


def _unknown(name: str, value: Any, known: list[str]) -> str:
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    guess = nearest(name, known)
    meant = f"; did you mean {guess}?" if guess else ""
    return f"unknown setting {name}{meant} (--print-config lists all)"


def _wrong(name: str, value: Any, hint: Any) -> ValueError:
    wanted = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
    return ValueError(f"{name}={value!r}: expected {wanted.replace('NoneType', 'None')}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
