"""The part of the command `inline` that does not need PyTorch: the list of commands, the version, and Ctrl-C.

This module is beside the package, not inside it. Importing anything below `inline_attention` imports PyTorch and
registers the models with timm. That takes seconds, and `inline --help` should not wait for it.
"""

import argparse
import difflib
import importlib.util
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# name → what `inline --help` says. Each is a file inline_attention/cli/NAME.py.
COMMANDS = {
    "models": "table of the models",
    "info": "cost of a model by stage",
    "train": "train a model; without arguments a small one, in about a minute",
    "linearize": "turn a pretrained softmax transformer into a linear one",
    "eval": "evaluate a model on images with known classes",
    "predict": "classify images",
    "segment": "semantic segmentation: train, eval, predict, models",
    "detect": "detection and instance segmentation: train, eval, predict, models",
    "convert": "turn an official checkpoint into a safetensors file",
    "export": "write a model for ONNX, OpenVINO, Core ML, LiteRT, PyTorch or Hugging Face, and check the file",
    "bench": "speed and memory against peers",
    "analyze": "injectivity, confusion, locality, maps, masking and rank of attention",
    "explore": "explore attention in a browser",
    "env": "versions and hardware, for a bug report",
}


COMPLETION = {"completion": "script that makes bash, zsh or fish complete commands and options"}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a check failed, 2 bad input (one line, no traceback), 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = _parse_command(arguments[:1])
    if command in COMPLETION:
        return _complete(arguments[1:])
    with _interrupt_ends_at_once(command):
        from inline_attention.cli import run_command
    return run_command(command, arguments[1:])


def _parse_command(arguments: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(
        prog="inline",
        description="InLine attention for vision.",
        epilog="`inline COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("-V", "--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    known = COMMANDS | COMPLETION
    for name, text in known.items():
        commands.add_parser(name, help=text, add_help=False)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        close = difflib.get_close_matches(arguments[0], known, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else "; `inline --help` lists them"
        parser.error(f"there is no command {arguments[0]!r}{meant}")
    args = parser.parse_args(arguments)
    if args.version:
        print(f"inline-attention {_version()}")  # noqa: T201 (before `say` can be imported)
        parser.exit()
    if args.command is None:
        parser.error("name a command; `inline --help` lists them")
    return args.command


def _complete(arguments: Sequence[str]) -> int:
    from inline_completion import HOW, SHELLS, script

    parser = argparse.ArgumentParser(
        prog="inline completion",
        description="Print a script that makes a shell complete commands, recipes and options.",
        epilog=f"to use it in every new shell:\n{HOW}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(arguments).shell
    print(script(shell, _package(), COMMANDS | COMPLETION), end="")  # noqa: T201 (before `say` can be imported)
    return 0


def _version() -> str:
    return runpy.run_path(str(_package() / "_version.py"))["__version__"]


def _package() -> Path:
    """The folder of the package, which is found without importing it"""
    package = importlib.util.find_spec("inline_attention")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent


@contextmanager
def _interrupt_ends_at_once(command: str) -> Iterator[None]:
    """Ctrl-C ends the process with one line, for code that has nothing to save.

    Raising an exception is not enough. An extension module that is interrupted while it loads turns KeyboardInterrupt
    into an ImportError, which libraries catch.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"inline {command}: interrupted\n".encode())
        os._exit(130)

    # Only the main thread may set handlers. A handler other than Python's own belongs to a caller who wants the signal.
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
