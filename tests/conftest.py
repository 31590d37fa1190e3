"""Where there is no GPU, Triton's kernels run in its interpreter, which is chosen before Triton is imported first, and
tests marked `gpu` are skipped."""

import functools
import inspect
import os
from typing import Any

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


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    """Before each call of a device function, Triton's interpreter searches triton.language for the functions that it
    replaces. That is a quarter of the time of the kernels' tests. It always finds the same, so here it searches once.
    """
    if torch.cuda.is_available():
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        for name in names_of_builtins(package):
            member = getattr(package, name)
            if is_builtin(member):  # not replaced already by a call that this one is part of
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_builtin = patch_builtin
