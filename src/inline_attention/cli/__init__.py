"""The command `inline`. Each command is a file with `configure(parser)` and `run(args)`, which parse, call and print.

`inline_command`, beside this package, lists the commands and starts one. Command modules import most of the library
inside `run`, so that `--help` and usage errors are fast.
"""

import argparse
import difflib
import importlib
import io
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inline_attention.printing import printable, say, say_text
from inline_command import COMMANDS, main

BROKEN_PIPE = 141  # exit status of a program that SIGPIPE ends: 128 + 13

__all__ = ["COMMANDS", "CommandParser", "build_parser", "main", "parse", "run_command", "run_parser"]


class CommandParser(argparse.ArgumentParser):
    """Stores itself in the parsed arguments as `parser`.

    The parser of a subcommand replaces that of its command. An error can therefore show the right usage.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)  # docstrings keep their lines
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)
        self.more_help: Callable[[], str] | None = None  # builds text that is appended to the help
        self.settings: Callable[[], list[str]] = list  # the names that `key=value` may have

    def format_help(self) -> str:
        if self.more_help is not None:
            self.epilog = self.more_help()
        return super().format_help()


class _LogHandler(logging.StreamHandler):  # Python 3.10 does not accept a type argument
    """Prints the log of the library, such as the names of unreadable images, to standard error."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{record.levelname.lower()}: {super().format(record)}"
        return "\n".join(map(printable, text.split("\n")))


def build_parser(command: str) -> CommandParser:
    module = importlib.import_module(f"inline_attention.cli.{command}")
    parser = CommandParser(prog=f"inline {command}", description=module.__doc__)
    module.configure(parser)
    parser.set_defaults(run=module.run)
    return parser


def run_command(command: str, argv: Sequence[str]) -> int:
    return run_parser(lambda: build_parser(command), argv, name=f"inline {command}")


def run_parser(build: Callable[[], CommandParser], argv: Sequence[str], *, name: str) -> int:
    """Parse and run. The exit status is that of `main`. `INLINE_TRACEBACK=1` shows the traceback of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(handlers=[_LogHandler()], format="%(message)s")
    try:
        args = parse(build(), argv)
        return args.run(args) or 0
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return BROKEN_PIPE
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("INLINE_TRACEBACK") or not (message := _message(error)):
            raise
        say_text(f"{name}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say(f"{name}: interrupted", file=sys.stderr)
        return 130


def _reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as in `inline models | head`."""
    if sys.platform == "win32":
        return True
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # 0: errors only
    return bool(output.poll(0))


def _message(error: Exception) -> str | None:
    """The line for the user. None for an error that is a bug, and needs its traceback."""
    if isinstance(error, RuntimeError):
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        return "out of memory: use smaller images or fewer of them at a time" if out_of_memory else None
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        name = os.fsdecode(error.filename)
        exists = isinstance(error, FileExistsError)  # of mkdir
        return f"{name} is a file; expected a folder" if exists else f"{name}: {error.strerror}"
    return str(error)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse arguments and options in any order.

    argparse ends a list of arguments at the first option. If a command calls its list `arguments`, the words after the
    option are added to it.
    """
    args, rest = parser.parse_known_args(argv)
    if rest and ("arguments" not in args or any(word.startswith("-") for word in rest)):
        close = [name for word in rest if word.startswith("-") and (name := _nearest(word, args.parser))]
        meant = f"; did you mean {', '.join(close)}?" if close else ""
        unknown = [word for word in rest if word.startswith("-")] if "arguments" in args else rest
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    if rest:
        args.arguments = [*args.arguments, *rest]
    return args


def _nearest(word: str, parser: CommandParser) -> str | None:
    """What an unknown option should be: the setting of that name, or the option of the closest spelling."""
    option = word.partition("=")[0]
    name = option.lstrip("-").replace("-", "_")
    same = [key for key in parser.settings() if key.rpartition(".")[2] == name.rpartition(".")[2]]
    if same:
        return f"{name if name in same else same[0]}=…"
    options = [known for known in parser._option_string_actions if known.startswith("--")]
    return next(iter(difflib.get_close_matches(option, options, n=1)), None)
