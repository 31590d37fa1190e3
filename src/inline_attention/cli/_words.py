"""The words that shells complete: actions and options of every command, from their parsers.

`inline completion` must not load PyTorch, and parsers do. So the words are in a file, and a test compares both.
`python -m inline_attention.cli._words` writes the file again.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from inline_attention.cli import COMMANDS, build_parser

FILE = Path(__file__).with_name("words.json")


def words() -> dict[str, list[str]]:
    """Command, such as "segment train" → its actions and options"""
    return {name: found for command in COMMANDS for name, found in _words_of(build_parser(command), command)}


def _words_of(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, list[str]]]:
    actions: dict[str, argparse.ArgumentParser] = {}
    options = []
    for argument in parser._actions:  # argparse has no public list of its arguments
        if isinstance(argument, argparse._SubParsersAction):
            actions |= argument.choices
        elif argument.option_strings:
            options.append(max(argument.option_strings, key=len))
    yield name, [*actions, *options]
    for action, below in actions.items():
        yield from _words_of(below, f"{name} {action}")


def as_text() -> str:
    """JSON, a line for each command"""
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in words().items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_text())
