"""Text from files and names, on a terminal."""

import sys
from typing import TextIO


def printable(text: object) -> str:
    """The text with everything that a terminal would act on written as an escape: `\\x1b` for an escape character.

    File names, class names and metadata come from other people. Their control characters could move the cursor, set
    the window's title or reverse the direction of writing; names that are not UTF-8 could not be printed at all.
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))


def say(*lines: object, file: TextIO | None = None) -> None:
    """Print each line, made printable, at once. A line feed inside a line is escaped too."""
    for line in lines:
        print(printable(line), file=file or sys.stdout, flush=True)


def say_text(text: str, *, file: TextIO | None = None) -> None:
    """`say` for text of several lines."""
    say(*text.split("\n"), file=file)
