"""`make soak`, or `PYTHONPATH=src:tests python -m soak`: see docs/reliability.md."""

import argparse
import datetime
import hashlib
import json
import math
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from training_runs import processes

from inline_attention.environment import describe_environment

from . import supervisor
from .images import Images
from .kills import Kills
from .op import Op
from .page import Page
from .part import Part
from .record import State, as_record, as_text, write_into_page
from .weights import Weights

PARTS: dict[str, type[Part]] = {part.name: part for part in (Kills, Page, Weights, Images, Op)}
ROOT = Path(__file__).parents[2]
SHOWN = 20  # failures on the terminal
RECORD, PAGE = ROOT / "docs" / "results" / "soak.json", ROOT / "docs" / "reliability.md"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description="Tries to break the package, and counts. Linux only.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts, such as 0.05 for a short soak")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--case", type=int, help="run this case of one part alone, in this process")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "soak", help="of the state, to continue from")
    parser.add_argument("--fresh", action="store_true", help="delete the state and start again")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} and the table into docs/")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    if args.record and args.parts:
        parser.error("--record writes the table of all parts; name none")
    chosen = [PARTS[name] for name in args.parts or PARTS]
    if args.case is not None:
        if len(chosen) != 1:
            parser.error("--case belongs to one part; name it")
        return run_case(chosen[0], seed=args.seed, case=args.case)

    processes.set_forkserver_preload(
        ["inline_attention.training.loop", "sklearn.datasets", "torch._dynamo", "soak.__main__"]
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    code = digest()
    parts = []
    for part in chosen:
        if args.fresh:
            (args.folder / f"{part.name}.json").unlink(missing_ok=True)
        cases = max(math.ceil(part.count * args.share / part.per_case), 1)
        parts.append((part, State.load(args.folder, part=part.name, seed=args.seed, cases=cases, code=code)))
    print(f"seed {args.seed}; {', '.join(f'{s.cases * p.per_case:,} {p.name}' for p, s in parts)}", flush=True)
    if any(state.chunks_done for _, state in parts):
        print(f"going on from {args.folder}; --fresh starts anew", flush=True)
    try:
        supervisor.run(parts, folder=args.folder, jobs=args.jobs, show=Progress(parts))
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {args.folder}")
        return 130

    made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    record = as_record(parts, environment=describe_environment(), made=made)
    path = RECORD if args.record else args.folder.with_suffix(".json")
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if args.record:
        write_into_page(PAGE, as_text(record))
    show_record(record)
    print(f"wrote {path}")
    failures = [(part, state, failure) for part, state in parts for failure in state.failures]
    for part, state, failure in failures[:SHOWN]:
        print(f"{part.name}, case {failure.case}: {failure.last_line}")
        print(f"  again: make soak PART={part.name} ARGS='--seed {state.seed} --case {failure.case}'")
    if len(failures) > SHOWN:
        print(f"and {len(failures) - SHOWN} more in {path}")
    return 1 if failures else 0


def run_case(part: type[Part], *, seed: int, case: int) -> int:
    """Runs one case in this process, so that an error keeps its traceback."""
    with tempfile.TemporaryDirectory(prefix=f"soak-{part.name}-") as folder:
        trial = part(seed, Path(folder))
        try:
            print(dict(trial.run(case)))
        finally:
            trial.close()
    return 0


def digest() -> str:
    """A hash of the code. A state is valid only for the code that made it."""
    files = [path for top in ("src", "tests") for path in sorted((ROOT / top).rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


class Progress:
    """Updates one line on a terminal, and prints a line every half minute into a log."""

    def __init__(self, parts: list[tuple[type[Part], State]]) -> None:
        self.parts, self.shown, self.begin = parts, 0.0, time.monotonic()

    def __call__(self, done: dict[str, int]) -> None:
        interactive = sys.stderr.isatty()
        now = time.monotonic()
        if now - self.shown < (0.5 if interactive else 30):
            return
        self.shown = now
        counts = (
            f"{part.name} {done[part.name] * part.per_case:,}/{state.cases * part.per_case:,}"
            for part, state in self.parts
        )
        line = f"{(now - self.begin) / 60:.1f} min  {'  '.join(counts)}"
        print(f"\r{line}\x1b[K" if interactive else line, end="" if interactive else "\n", file=sys.stderr, flush=True)


def show_record(record: dict) -> None:
    shown = Table("part", "what", "times", "failed", "seconds", title="soak")
    for name, row in record["parts"].items():
        shown.add_row(name, row["what"], f"{row['count']:,}", str(len(row["failures"])), str(row["seconds"]))
        for outcome, count in row["outcomes"].items():
            shown.add_row("", f"  {outcome}", f"{count:,}", "", "")
        for what, value in row["measured"].items():
            shown.add_row("", f"  {what}", f"{value:g}", "", "")
    Console().print(shown)


if __name__ == "__main__":
    sys.exit(main())
