"""Dataclasses from YAML and from `section.key=value`, with checked types and no unknown keys.

The declared type of a setting decides how its text is read: a folder called 0123 or 12:30 keeps its name. YAML's own
rules apply if no type is declared, as in `model.kwargs`.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import yaml

Settings = TypeVar("Settings")

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULLS = ("null", "~", "")


class Text(str):
    """Unquoted text that has no type yet: a scalar of a YAML file, or the value of `key=value`."""

    __slots__ = ()


class _TextLoader(yaml.SafeLoader):
    """Reads unquoted scalars as `Text` and quoted ones as strings. Anchors, merge keys and tags work as usual."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        return super().construct_object(node, deep=True)  # refuses a collection that contains itself


def _construct_text(_: _TextLoader, node: Any) -> str:
    return Text(node.value) if node.style is None else node.value


_TextLoader.yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # merge keys alone
_TextLoader.add_constructor("tag:yaml.org,2002:str", _construct_text)


def parse_yaml(text: str) -> Any:
    """Mappings and lists of `Text` and strings. yaml.YAMLError if the text is not YAML."""
    return yaml.load(text, Loader=_TextLoader)


def update(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """A copy of `settings` (a dataclass of dataclasses) with the nested `values`, converted to the declared types.

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
        if isinstance(value, Text) and (dataclasses.is_dataclass(current) or isinstance(current, dict)):
            value = _structure(value)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                first = dataclasses.fields(current)[0].name
                raise ValueError(f"{name} is a section: set one of its keys, such as {name}.{first}=…")
            changes[key] = _update(current, value, prefix=f"{name}.", known=known)
        elif isinstance(current, dict) and isinstance(value, Mapping):
            changes[key] = {**current, **convert(value, hints[key], name=name)}
        else:
            changes[key] = convert(value, hints[key], name=name)
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]  # a dataclass, see the docstring


def drop_unknown(settings: Any, values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """`values` without the keys that `settings` does not have, and the dotted names of those keys."""
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in values.items():
        section = getattr(settings, key, None)
        if key not in {field.name for field in dataclasses.fields(settings)}:
            unknown.append(f"{prefix}{key}")
        elif dataclasses.is_dataclass(section) and isinstance(value, Mapping):
            known[key], more = drop_unknown(section, value, f"{prefix}{key}.")
            unknown += more
        else:
            known[key] = value
    return known, unknown


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`["optim.lr=1e-3", …]` as nested dictionaries of `Text`; the last of two equal keys wins."""
    nested: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ValueError(f"expected key=value, such as optim.lr=1e-3, got {override!r}")
        *parents, last = path.strip().split(".")
        level = nested
        for parent in parents:
            if isinstance(level.get(parent), Text):  # such as model.kwargs={depth: 3} before model.kwargs.embed_dim=64
                level[parent] = _structure(level[parent])
            level = level.setdefault(parent, {})
            if not isinstance(level, dict):
                raise ValueError(f"{override!r}: {parent} was given a value before")
        level[last] = Text(text)
    return nested


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of nested values, and of the sections around them."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        value = _structure(value) if isinstance(value, Text) else value
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"optim.lr": 1e-3, …}` as nested dictionaries."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        level = sections
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return sections


def to_yaml(settings: Any) -> str:
    return yaml.safe_dump(to_mapping(settings), sort_keys=False, allow_unicode=True)


def to_mapping(settings: Any) -> dict[str, Any]:
    """Plain dictionaries, lists and scalars, as YAML and JSON hold them."""
    return {key: _plain(value) for key, value in dataclasses.asdict(settings).items()}


def comments(settings: Any, prefix: str = "") -> dict[str, str]:
    """Key → the comment after the field in its class, or ""."""
    found: dict[str, str] = {}
    for base in reversed(type(settings).__mro__):
        if dataclasses.is_dataclass(base):
            found |= _field_comments(base)
    described: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            described |= comments(value, f"{prefix}{field.name}.")
        else:
            described[f"{prefix}{field.name}"] = found.get(field.name, "")
    return described


def _field_comments(section: type) -> dict[str, str]:
    try:
        lines = inspect.getsource(section).splitlines(keepends=True)
    except OSError:  # an installation without sources
        return {}
    names = {field.lineno: field.target.id for field in _fields_in_source("".join(lines))}
    tokens = tokenize.generate_tokens(iter(lines).__next__)
    return {
        names[token.start[0]]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT and token.start[0] in names
    }


def _fields_in_source(source: str) -> list[Any]:
    (section,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(section, ast.ClassDef)
    return [node for node in section.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


def keys(settings: Any, prefix: str = "") -> list[str]:
    """Every dotted key below a dataclass."""
    found = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        name = f"{prefix}{field.name}"
        found += keys(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return found


def convert(value: Any, hint: Any, *, name: str) -> Any:
    """`value` as the type `hint`: `Text` is read as that type, a value of another type is a ValueError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _untyped(value)
    if origin in (typing.Union, types.UnionType):
        is_null = value is None or (isinstance(value, Text) and value.strip() in _NULLS)
        if is_null and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        if isinstance(value, Text) and isinstance(_structure(value), list):
            options.sort(key=lambda option: option is str)  # "[a, b]" is a list, if the setting can be one
        for option in options[:-1]:
            with contextlib.suppress(ValueError):
                return convert(value, option, name=name)
        return convert(value, options[-1], name=name)
    if origin is typing.Literal:
        for option in arguments:
            if value == option or (isinstance(value, Text) and value == str(option)):
                return option
        raise ValueError(f"{name}={_shown(value)}: expected one of {', '.join(map(str, arguments))}")
    if origin in (list, tuple):
        if isinstance(value, Text):
            structure = _structure(value)
            value = [Text(item) for item in value.split(",")] if isinstance(structure, str) else structure
        if not isinstance(value, list | tuple):
            raise _wrong(name, value, hint)
        if origin is tuple and arguments[-1:] != (Ellipsis,):
            if len(value) != len(arguments):
                raise ValueError(f"{name}={_shown(value)}: expected {len(arguments)} values")
            return tuple(convert(v, a, name=name) for v, a in zip(value, arguments, strict=True))
        return origin(convert(v, arguments[0], name=name) for v in value)
    if origin is dict or hint is dict:
        if isinstance(value, Text):
            value = _structure(value)
        if not isinstance(value, Mapping):
            raise _wrong(name, value, hint)
        return {str(key): _untyped(item) for key, item in value.items()}
    if hint is str:
        if isinstance(value, Text):
            return _unquoted(value)
        if isinstance(value, str):
            return value
    elif hint is bool:
        if isinstance(value, Text):
            value = _BOOLEANS.get(value.strip().lower(), value)
        if isinstance(value, bool):
            return value
    elif hint in (int, float) and not isinstance(value, bool):
        return _number(value, hint, name=name)
    raise _wrong(name, value, hint)


def _number(value: Any, hint: type, *, name: str) -> int | float:
    if not isinstance(value, int | float | str):
        raise _wrong(name, value, hint)
    if hint is int and not isinstance(value, float):
        with contextlib.suppress(ValueError):
            return int(value)  # exact; a float would round
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _wrong(name, value, hint) from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={_shown(value)}: expected a finite number")
    if hint is int and not number.is_integer():
        raise _wrong(name, value, hint)
    return hint(number)


def _structure(text: Text) -> Any:
    """A list or mapping that is written as text, such as `[1, 2]` or `{depth: 4}`; other text as it is."""
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, list | dict) else text


def _unquoted(text: Text) -> str:
    """Remove quotes that the shell has kept, as YAML does: data.path="'a: b'"."""
    if text[:1] in ("'", '"'):
        with contextlib.suppress(yaml.YAMLError):
            value = parse_yaml(text)
            if isinstance(value, str):
                return str(value)
    return str(text)


def _untyped(value: Any) -> Any:
    """The value by YAML's own rules, for settings without a declared type."""
    if isinstance(value, Text):
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            return str(value)
    if isinstance(value, Mapping):
        return {str(key): _untyped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untyped(item) for item in value]
    return value


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
    return ValueError(f"{name}={_shown(value)}: expected {wanted.replace('NoneType', 'None')}")


def _shown(value: Any) -> str:
    """The value as the user wrote it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, Text) else repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
