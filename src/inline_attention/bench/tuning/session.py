"""What `inline bench tune` does: measures what is missing in the file of this GPU, and keeps each result at once."""

import datetime
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inline_attention.bench.timing import describe_error
from inline_attention.ops import fused_mlp, tuned
from inline_attention.training.files import write_atomically

from . import one_launch, steps, tiles
from .candidates import workers

LONGEST = 600  # seconds to compile a kernel; a process that crashed never answers

Rows = Mapping[Any, Mapping[str, Any]]  # item → what was measured


@dataclass(frozen=True)
class Part:
    """Measurements of one kind. `device` and `dtype` are further arguments of `shares`, `compile` and `time`."""

    items: Callable[[], Sequence[Any]]
    shares: Callable[..., Sequence[Any]]  # of an item: what can be compiled ahead, in other processes
    compile: Callable[[Any], str | None]
    time: Callable[..., dict[str, Any]]  # of an item
    group: Callable[[Any], object]  # an entry of a table needs all items of its group
    entries: Callable[[Rows], dict[str, dict[str, list[Any]]]]  # of a group: section → key → rows of the table
    describe: Callable[[Mapping[str, Any]], str]


def _tiles(use: fused_mlp.Use) -> Part:
    return Part(
        items=partial(tiles.halves_of, use),
        shares=partial(tiles.shares_of, use=use),
        compile=tiles.compile_one,
        time=partial(tiles.time_one, use=use),
        group=lambda half: half[1:],
        entries=lambda rows: tiles.entries_of(use, rows.values()),
        describe=tiles.describe,
    )


# In this order, because later parts are timed beside what earlier ones have found.
PARTS: dict[str, Part] = {
    "steps": Part(
        items=steps.groups,
        shares=steps.shares_of,
        compile=steps.compile_one,
        time=steps.time_group,
        group=lambda group: group,
        entries=steps.entries_of,
        describe=steps.describe,
    ),
    "short": Part(
        items=one_launch.sizes_to_tune,
        shares=one_launch.shares_of,
        compile=one_launch.compile_one,
        time=one_launch.time_one,
        group=lambda sizes: sizes.head_dim,
        entries=lambda rows: one_launch.entries_of(rows.values()),
        describe=one_launch.describe,
    ),
    **{use: _tiles(use) for use in ("inference", "projected", "normed", "training")},
}
DEFAULT = tuple(name for name in PARTS if name != "training")  # which is slow to compile, and won nowhere on the H200


def open_file(device: torch.device, *, again: bool, log: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The file of this GPU, and what it holds so far."""
    card = tuned.card_of(device)
    if card is None:
        raise ValueError(f"--device {device}: expected an NVIDIA GPU, because the kernels are Triton's")
    path = tuned.place_of(card)
    try:
        content = tuned.read(path, card)
    except FileNotFoundError:
        content = None
    except tuned.NotUsable as error:
        if not error.outdated:
            raise ValueError(
                f"{path} cannot be used: {error}; remove it, or name another in {tuned.VARIABLE}"
            ) from error
        log(f"{path} is measured again: {error}")
        content = None
    if content is None or again or "measured" not in content:
        content = dict(facts=tuned.facts_of(card), tables={}, measured={})
    return path, content


def save(path: Path, content: dict[str, Any]) -> None:
    """The old file or the new one is there at any time."""
    content["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, ensure_ascii=False) + "\n").encode())
    tuned.tables_of.cache_clear()  # what follows is measured with it


def compile_share(work: tuple[Callable[[Any], str | None], Any]) -> str | None:
    """In another process, which has to look at the file again."""
    tuned.tables_of.cache_clear()
    compile_one, share = work
    try:
        return compile_one(share)
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the process that measures


def tune(
    names: Iterable[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    jobs: int = 1,
    minutes: float = float("inf"),
    again: bool = False,
    log: Callable[[str], None],
) -> tuple[Path, dict[str, Any]]:
    """Measures the parts of these names. What the file already has is not measured again.

    An interruption leaves a file with all that was measured before.

    Args:
        jobs: processes that compile the kernels.
        minutes: no measurement begins after this time.
        again: begin anew.
        log: called with lines of text.

    Returns:
        The file and its content. Measurements that are missing in it: `missing`.
    """
    names = list(names)
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"there is no part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    until = time.monotonic() + 60 * minutes
    path, content = open_file(device, again=again, log=log)
    log(f"file: {path}")
    if not content["measured"]:
        save(path, content)  # or all would be measured in vain where it cannot be written
    options = dict(device=device, dtype=dtype)
    left = missing(content, names)
    total, number = sum(map(len, left.values())), 0
    if total == 0:
        return path, content
    with workers(jobs, longest=LONGEST) as mapped:
        for name, items in left.items():
            part, measured = PARTS[name], content["measured"].setdefault(name, {})
            groups: dict[object, list[Any]] = {}
            for item in items:
                groups.setdefault(part.group(item), []).append(item)
            for group in groups.values():
                if jobs > 1 and time.monotonic() < until:
                    shares = dict.fromkeys(share for item in group for share in part.shares(item, **options))
                    log(f"{name}: compiles {len(shares)} kernels")
                    try:
                        list(mapped(compile_share, [(part.compile, share) for share in shares]))
                    except multiprocessing.TimeoutError:
                        log(f"{name}: a kernel was not compiled in {LONGEST} s, and is left to the measurement")
                for item in group:
                    if time.monotonic() >= until:
                        return path, content
                    number += 1
                    measured[name_of(item)] = row = _time(part, item, **options)
                    text = f"failed: {row['error']}" if "error" in row else part.describe(row)
                    log(f"[{number}/{total}] {name} {name_of(item)}: {text}")
                    content["tables"] = _as_read(tables_of(content))
                    save(path, content)
                    if "crashed" in row:
                        raise ValueError(f"{text}; no more can be measured in this process; the same command goes on")
    return path, content


def name_of(item: Sequence[object]) -> str:
    return tuned.key_of(*item)


def _time(part: Part, item: Any, **options: Any) -> dict[str, Any]:
    """What was measured. Or the error, and whether it was the last of this process: an illegal access breaks CUDA."""
    row: dict[str, Any]
    try:
        row = _as_read(part.time(item, **options))
    except Exception as error:  # such as out of memory; the other measurements go on
        row = dict(error=describe_error(error))
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return dict(error=describe_error(error), crashed=True)
    return row


def _as_read(value: Any) -> Any:
    """The value as it is when the file is read: with lists instead of tuples."""
    return json.loads(json.dumps(value))


def missing(content: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[Any]]:
    """What has not been measured yet, or failed, in the order of `PARTS`. What crashed is not tried again."""

    def is_missing(name: str, item: Any) -> bool:
        row = content["measured"].get(name, {}).get(name_of(item))
        return row is None or ("error" in row and "crashed" not in row)

    return {
        name: [item for item in part.items() if is_missing(name, item)] for name, part in PARTS.items() if name in names
    }


def tables_of(content: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """The tables, from everything measured. A group of which something is missing or failed has no entry."""
    tables: dict[str, dict[str, list[Any]]] = {}
    for name, measured in content["measured"].items():
        part = PARTS[name]
        groups: dict[object, dict[Any, Any]] = {}
        for item in part.items():
            groups.setdefault(part.group(item), {})[item] = measured.get(name_of(item))
        for rows in groups.values():
            if any(row is None or "error" in row for row in rows.values()):
                continue
            for section, entries in part.entries(rows).items():
                tables.setdefault(section, {}).update(entries)
    return tables
