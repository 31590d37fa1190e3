"""What a soak writes: its state on the disk, the record (JSON), and the table in docs/reliability.md."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .part import Part


@dataclass
class Failure:
    case: int
    text: str

    @property
    def last_line(self) -> str:
        return self.text.strip().splitlines()[-1]


@dataclass
class State:
    """The progress of one part. With another seed, another count or other code, the part starts again."""

    part: str
    seed: int
    cases: int
    code: str  # a digest of the sources
    chunks_done: list[int] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    measured: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    cases_done: int = 0
    seconds: float = 0.0  # of all processes together

    def save(self, folder: Path) -> None:
        path = folder / f"{self.part}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self, default=vars))
        os.replace(partial, path)

    @classmethod
    def load(cls, folder: Path, *, part: str, seed: int, cases: int, code: str) -> "State":
        fresh = cls(part, seed, cases, code)
        try:
            saved = json.loads((folder / f"{part}.json").read_text())
        except FileNotFoundError:
            return fresh
        if (saved["seed"], saved["cases"], saved["code"]) != (seed, cases, code):
            return fresh
        saved |= dict(outcomes=Counter(saved["outcomes"]), failures=[Failure(**entry) for entry in saved["failures"]])
        return cls(**saved)

    def add(self, *, outcomes: Mapping[str, int], measured: Mapping[str, float], failures: Iterable[Failure]) -> None:
        self.outcomes.update(outcomes)
        self.failures.extend(failures)
        for name, value in measured.items():
            self.measured[name] = max(value, self.measured.get(name, value))


def as_record(
    parts: Iterable[tuple[type[Part], State]], *, environment: Mapping[str, str], made: str
) -> dict[str, Any]:
    rows = {
        part.name: {
            "what": part.what,
            "promise": part.promise,
            "count": state.cases_done * part.per_case,
            "failures": [{"case": failure.case, "error": failure.last_line} for failure in state.failures],
            "outcomes": dict(sorted(state.outcomes.items())),
            "measured": {name: round(value, 1) for name, value in state.measured.items()},
            "seed": state.seed,
            "seconds": round(state.seconds),
        }
        for part, state in parts
    }
    return {"made": made, "environment": dict(environment), "parts": rows}


def as_text(record: Mapping[str, Any]) -> str:
    """The record as docs/reliability.md shows it."""
    lines = [f"Made on {record['made']} with inline-attention {record['environment']['inline-attention']}."]
    lines += ["", "| part | what was tried | times | failed | what must hold |", "|---|---|---:|---:|---|"]
    lines += [
        f"| {name} | {row['what']} | {row['count']:,} | {len(row['failures'])} | {row['promise']} |"
        for name, row in record["parts"].items()
    ]
    return "\n".join(lines)


def read_from_page(page: Path, *, mark: str = "soak") -> str:
    """The text between the lines <!-- MARK: begin --> and <!-- MARK: end -->."""
    return _split(page, mark)[1].strip()


def write_into_page(page: Path, text: str, *, mark: str = "soak") -> None:
    before, _, after = _split(page, mark)
    page.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


def _split(page: Path, mark: str) -> tuple[str, str, str]:
    """The page up to the first mark, the text between the marks, and the rest. The outer parts include the marks."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, found_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    between, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page} has no lines {begin} and {end} for the table to go between")
    return before + begin, between, end + after
