"""Ctrl-C while the command `inline` starts: importing PyTorch takes seconds, and a traceback from there helps nobody.

Importing this module lets SIGINT end the process without a traceback, if the process is the command and nothing else
handles the signal. `handle_again` undoes that.
"""

import signal
import sys
import threading
from pathlib import Path
from typing import Any


def _replace_handler(before: object, after: Any) -> None:
    """Python sets handlers in the main thread alone."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)


def handle_again() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, which the command catches."""
    _replace_handler(signal.SIG_DFL, signal.default_int_handler)


# While Python imports the package for `python -m inline_attention`, argv[0] is "-m".
if sys.argv and (sys.argv[0] == "-m" or Path(sys.argv[0]).name in ("inline", "inline.exe")):
    _replace_handler(signal.default_int_handler, signal.SIG_DFL)
