"""Settings from text: the declared type decides, and mistakes are named."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from inline_attention.training import settings


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    count: int = 3
    on: bool = False
    kind: Literal["a", "b"] = "a"
    pair: tuple[float, float] = (0.9, 0.99)
    sides: int | list[int] = 8
    note: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    seed: int = 0


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("inner.rate=1e-3", {"rate": 0.001}),
        ("inner.rate=2", {"rate": 2.0}),
        ("inner.count=1000.0", {"count": 1000}),
        ("inner.on=true", {"on": True}),
        ("inner.kind=b", {"kind": "b"}),
        ("inner.pair=[0.8, 1]", {"pair": (0.8, 1.0)}),
        ("inner.pair=0.8,0.95", {"pair": (0.8, 0.95)}),
        ("inner.sides=[4, 6]", {"sides": [4, 6]}),
        ("inner.sides=16", {"sides": 16}),
        ("inner.note=2024", {"note": "2024"}),
        ("inner.note=null", {"note": None}),
        ("inner.note=", {"note": None}),
        ("inner.note='null'", {"note": "null"}),
        ("inner.note=[draft]", {"note": "[draft]"}),
        ("inner.count=010", {"count": 10}),
        ("inner.count=1e3", {"count": 1000}),
        ("inner.on=off", {"on": False}),
        ("inner.extra.rate=0.5", {"extra": {"rate": 0.5}}),
        ("inner.extra.depth=4", {"extra": {"depth": 4}}),
        ("inner.extra={depth: 4, name: x}", {"extra": {"depth": 4, "name": "x"}}),
    ],
)
def test_values_become_the_declared_types(override: str, expected: dict[str, Any]) -> None:
    changed = settings.update(Outer(), settings.parse_overrides([override]))
    assert changed == Outer(inner=Inner(**expected))
    assert type(getattr(changed.inner, next(iter(expected)))) is type(next(iter(expected.values())))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.rate=fast", "inner.rate=fast: expected float"),
        ("inner.rate=true", "inner.rate=true: expected float"),
        ("inner.count=2.5", "inner.count=2.5: expected int"),
        ("inner.on=1", "inner.on=1: expected bool"),
        ("inner.kind=c", "inner.kind=c: expected one of a, b"),
        ("inner.pair=[1]", r"inner.pair=\[1\]: expected 2 values"),
        ("inner.sides=wide", "inner.sides"),
        ("inner=3", "inner is a section"),
        ("inner.rat=1", "unknown setting inner.rat; did you mean inner.rate?"),
        ("rate=1", "unknown setting rate; did you mean inner.rate?"),
        ("outer.rate=1", "unknown setting outer.rate; did you mean inner.rate?"),
        ("inner.seed=1", "unknown setting inner.seed; did you mean seed?"),
        ("inner.rate", "expected key=value, such as optim.lr=1e-3, got 'inner.rate'"),
    ],
)
def test_wrong_values_are_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.update(Outer(), settings.parse_overrides([override]))


def test_the_last_of_two_overrides_wins() -> None:
    assert settings.parse_overrides(["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": "3", "c": "2"}}
    overrides = settings.parse_overrides(["inner.extra={depth: 3}", "inner.extra.width=4", "inner.extra.depth=5"])
    assert settings.update(Outer(), overrides).inner.extra == {"depth": 5, "width": 4}
