"""Launch settings that `inline bench tune` measured on a GPU: where the file is, and what it says. Needs Triton.

Where it says something, it is used in the place of the tables that come with the library. A process reads it once, for
its first launch, and torch.compile never asks again. So all processes that start later compute with the same settings.
"""

import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from .._version import __version__
from . import gpu

VARIABLE = "INLINE_TUNED"  # names the file, or the folder that it is in
FORMAT = 1

# A row of a table: bounds within which the settings hold, if there are any, and the settings.
Row = tuple[Any, ...]  # (*bounds, tuple of settings)
Tables = Mapping[str, Mapping[str, tuple[Row, ...]]]


class Card(NamedTuple):
    """What settings are measured for. GPUs of one name differ too, if one is a slice of another."""

    name: str
    capability: str
    multiprocessors: int
    shared_memory: int  # most bytes of one program


class Shape(NamedTuple):
    """What a row of a table has."""

    bounds: int
    powers: int  # of the settings, the first so many are powers of two
    settings: int
    limits: int = 0  # of the settings, the last so many may be zero


_TILES = Shape(bounds=2, powers=3, settings=5)  # least and most rows; the fields of `fused_mlp.Tile`
SHAPES = {
    "steps": Shape(bounds=0, powers=2, settings=4, limits=1),  # the fields of `fused.config.Steps`
    "inference": _TILES,
    "projected": _TILES,
    "training": _TILES,
    "normed": _TILES,
    "short": Shape(bounds=4, powers=3, settings=5),  # the bounds of `fused.short.Win`; the fields of its `Tile`
}


def card_of(device: torch.device) -> Card | None:
    """None: no kernel runs on such a device."""
    if gpu.INTERPRETED:
        return Card("Triton's interpreter", "none", *gpu.INTERPRETER)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(device)
    return Card(found.name, f"{found.major}.{found.minor}", *gpu.limits_of(device))


def facts_of(card: Card) -> dict[str, Any]:
    """What a file says about the GPU, and about what its settings are for."""
    versions = {"format": FORMAT, "inline-attention": __version__, "triton": triton.__version__}
    return versions | card._asdict()


def place_of(card: Card) -> Path:
    """The file for a GPU, whether it exists or not."""
    named = os.environ.get(VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    path = Path(os.path.expanduser(named or os.path.join(cache, "inline_attention")))
    if path.suffix == ".json":
        return path
    words = (card.name, card.capability, card.multiprocessors, card.shared_memory // 1024)
    return path / (re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(map(str, words))) + ".json")


class NotUsable(ValueError):
    """Why a file is not used. If it is `outdated`, it is of this GPU, and measuring again replaces it."""

    def __init__(self, reason: str, *, outdated: bool = False) -> None:
        super().__init__(reason)
        self.outdated = outdated


def read(path: Path, card: Card) -> dict[str, Any]:
    """The content of a file for this GPU. FileNotFoundError if there is none, `NotUsable` if it is not such a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        facts, expected = content["facts"], facts_of(card)
        for name in Card._fields:
            if facts[name] != expected[name]:
                raise NotUsable(f"it is of {facts['name']} ({name} {facts[name]}), and this is {card.name}")
        for name, value in expected.items():
            if facts[name] != value:
                raise NotUsable(f"it was measured with {name} {facts[name]}, and this is {value}", outdated=True)
        _tables_in(content)
    except NotUsable:
        raise
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotUsable(f"it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotUsable("it is damaged, or no file of `inline bench tune`") from error
    found: dict[str, Any] = content
    return found


def _tables_in(content: dict[str, Any]) -> Tables:
    """The tables, checked: a number that no table holds could fail much later, in a compiler."""
    tables = {}
    for section, entries in content["tables"].items():
        shape = SHAPES[section]
        tables[section] = {key: tuple(_row_of(row, shape) for row in rows) for key, rows in entries.items()}
    return tables


def _row_of(row: Any, shape: Shape) -> Row:
    *bounds, settings = row
    numbers = [*bounds, *settings]
    if (len(bounds), len(settings)) != (shape.bounds, shape.settings):
        raise ValueError(f"{row} has another length")
    positive = settings[: shape.settings - shape.limits]
    if not all(type(n) is int and n >= 0 for n in numbers) or max(settings) > 1024 or not all(positive):
        raise ValueError(f"{row} holds what is no setting")
    if any(n & (n - 1) for n in settings[: shape.powers]):
        raise ValueError(f"{row} holds no power of two")
    return (*bounds, tuple(settings))


@functools.cache
def tables_of(device: torch.device) -> Tables:
    """Those of the file, which is read once. Empty if there is none for this GPU."""
    card = card_of(device)
    if card is None:
        return {}
    path = place_of(card)
    try:
        return _tables_in(read(path, card))
    except FileNotFoundError:
        if path != Path(os.environ.get(VARIABLE, "")).expanduser():
            return {}  # nobody has measured this GPU
        reason, remedy = "it does not exist", f"correct {VARIABLE}"
    except NotUsable as error:
        reason = str(error)
        remedy = "run `inline bench tune`" if error.outdated else "remove it, and run `inline bench tune`"
    warnings.warn(
        f"the launch settings in {path} are not used, because {reason}; {remedy}, or the library's own settings apply",
        stacklevel=2,
    )
    return {}


def source_of(device: torch.device) -> str:
    """Where the launch settings on a device come from, for records of measurements."""
    return "measured on this GPU" if any(tables_of(device).values()) else "the library's"


_tried: dict[tuple[str, str], tuple[Row, ...]] = {}  # by `trying`


def key_of(*names: object) -> str:
    """The key of a table's entry, as JSON can have it."""
    return " ".join(map(str, names))


def rows(device: torch.device, section: str, *key: object) -> tuple[Row, ...] | None:
    """What was measured for a key of a table, or None if nothing was. Empty: the kernel never won.

    This is Python that torch.compile does not trace: callers are operators, or constants for it.
    """
    tables = tables_of(device)
    if not (tables or _tried):
        return None
    name = key_of(*key)
    found = _tried.get((section, name))
    return tables.get(section, {}).get(name) if found is None else found


@contextmanager
def trying(section: str, entries: Mapping[str, tuple[Row, ...]]) -> Iterator[None]:
    """Other entries of a table, to measure with them."""
    before = dict(_tried)
    _tried.update({(section, name): found for name, found in entries.items()})
    try:
        yield
    finally:
        _tried.clear()
        _tried.update(before)


@torch.compiler.assume_constant_result
def digest(device: torch.device) -> str:
    """Tells the steps of the attention's kernels from others: "" for the library's own.

    torch.compile keeps on disk what it compiled, and looks at an operator's arguments to find it again. It does not see
    which steps the operator chose.
    """
    steps = tables_of(device).get("steps")
    return hashlib.sha256(repr(sorted(steps.items())).encode()).hexdigest()[:16] if steps else ""
