"""The command `inline`. One file a command: `HELP`, `configure(parser)` and `run(args)`; thin: parse, call, print.

Command modules import what they need inside `run`: `inline --help` waits for the package alone, not for every command.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from inline_attention._interrupt import handle_again
from inline_attention._version import __version__

COMMANDS: tuple[str, ...] = (
    "models",
    "info",
    "train",
    "eval",
    "predict",
    "segment",
    "detect",
    "convert",
    "export",
    "bench",
    "analyze",
    "study",
    "explore",
    "env",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inline", description="InLine attention for vision.")
    parser.add_argument("--version", action="version", version=f"inline-attention {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"inline_attention.cli.{name}")
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.__doc__)
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a check failed, 2 bad input (one line, no traceback), 130 interrupted.

    `INLINE_TRACEBACK=1` shows where an error came from.
    """
    command = "inline"
    try:
        handle_again()
        args = _parse(build_parser(), argv)
        command = f"inline {args.command}"
        return args.run(args) or 0
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("INLINE_TRACEBACK"):
            raise
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse ends a list of arguments at the first option; here what stands behind it goes on with the list."""
    args, rest = parser.parse_known_args(argv)
    if rest and ("arguments" not in args or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.arguments += rest
    return args
