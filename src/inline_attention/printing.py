"""Text on a terminal and in files: names made printable, tables, CSV and JSON."""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

NOT_UTF8 = "backslashreplace"  # for the bytes of a file name that are not UTF-8; in JSON, they read back unchanged
STANDARD_OUTPUT = "-"  # as the name of a result file


def printable(text: object) -> str:
    """The text with everything that a terminal would act on written as an escape: `\\x1b` for an escape character.

    File names, class names and metadata come from other people. Their control characters could move the cursor, set
    the window's title or reverse the direction of writing; names that are not UTF-8 could not be printed at all.
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))


def counted(number: float, noun: str) -> str:
    """The number and the noun: 1 epoch, 2.5 epochs"""
    return f"{number:.12g} {noun}{'' if number == 1 else 's'}"


def say(*lines: object, file: TextIO | None = None) -> None:
    """Print each line, made printable, at once. A line feed inside a line is escaped too."""
    for line in lines:
        print(printable(line), file=file or sys.stdout, flush=True)


def say_text(text: str, *, file: TextIO | None = None) -> None:
    """`say` for text of several lines."""
    say(*text.split("\n"), file=file)


def write_csv(path: str | Path, header: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    with open(path, "w", newline="", encoding="utf-8", errors=NOT_UTF8) as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON to a file. The path "-" prints it instead."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    if str(path) == STANDARD_OUTPUT:
        say_text(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8", errors=NOT_UTF8)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown that also reads well in a terminal."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([text[0], rule, *text[1:]])
