"""Without a GPU, Triton's kernels run in its interpreter, and tests marked `gpu` are skipped.

The interpreter has to be chosen before Triton is imported for the first time.
"""

import atexit
import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Modules live until the end. Not looking through them for garbage saves 7% of the tests' CPU time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report what outlives them


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    if torch.cuda.is_available():
        return
    try:
        import quick_interpreter
    except ImportError:
        return  # no Triton
    quick_interpreter.install()
