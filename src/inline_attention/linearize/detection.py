"""Whether the code of a module computes attention, for modules whose class is not known and not named so.

The code is read and not run, so no input is needed. What `forward` calls is read too: methods of the module, and
functions of other files. Other modules are read by themselves.
"""

import dis
import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

# Names of functions that are attention as a whole, in PyTorch and in the usual packages.
_WHOLE = re.compile(
    "scaled_dot_product_attention|multi_head_attention_forward|flex_attention|memory_efficient_attention|flash_attn.*"
)
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_MATRIX_PRODUCTS = ("BINARY_MATRIX_MULTIPLY", "INPLACE_MATRIX_MULTIPLY")  # of Python 3.10; later ones say "@"
_SOFTMAX = "softmax"


class _Words(NamedTuple):
    """What a function's code says."""

    names: frozenset[str]  # of globals, attributes and methods
    multiplies: bool  # a @ b


def computes_attention(module: nn.Module) -> bool:
    """Whether `forward` reaches a function that is attention, or multiplies matrices beside a softmax.

    A softmax alone is no attention: classifiers have one, and gates.
    """
    if type(module).__module__.startswith("torch.nn.modules."):
        return False
    start = getattr(module.forward, "__func__", module.forward)
    words = [_words(function.__code__) for function in _reached(start, module)]
    names = frozenset().union(*(found.names for found in words))
    if any(map(_WHOLE.fullmatch, names)):
        return True
    has_softmax = _SOFTMAX in names or any(isinstance(child, nn.Softmax) for child in module.children())
    return has_softmax and (not names.isdisjoint(_PRODUCTS) or any(found.multiplies for found in words))


def _reached(start: Any, module: nn.Module) -> Iterator[FunctionType]:
    """The functions that a call of `start` may reach, without those of PyTorch."""
    seen: set[FunctionType] = set()
    waiting = [start]
    while waiting:
        function = _unwrapped(waiting.pop())
        if not isinstance(function, FunctionType) or function in seen:
            continue
        if (function.__module__ or "").partition(".")[0] == "torch":
            continue
        seen.add(function)
        yield function
        names = _words(function.__code__).names
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        for name in names:
            waiting.append(inspect.getattr_static(module, name, None))
            waiting.append(function.__globals__.get(name))
            if "super" in names:
                waiting += [vars(cls).get(name) for cls in type(module).__mro__]
        for other in (*cells, *(function.__globals__.get(name) for name in names)):
            if isinstance(other, ModuleType) and not other.__name__.startswith("torch"):
                waiting += [vars(other).get(name) for name in names]
            else:
                waiting.append(other)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return False
    return True


def _unwrapped(value: Any) -> Any:
    """The function behind a static or class method, a property, a partial or a decorator."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        value = value.forward
    value = getattr(value, "__func__", value) if isinstance(value, staticmethod | classmethod) else value
    return inspect.unwrap(value) if isinstance(value, FunctionType) else value


@functools.cache
def _words(code: CodeType) -> _Words:
    names, multiplies = set(code.co_names), False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _MATRIX_PRODUCTS or instruction.argrepr in ("@", "@="):
            multiplies = True
    for constant in code.co_consts:  # the code of lambdas and inner functions
        if isinstance(constant, CodeType):
            inner = _words(constant)
            names |= inner.names
            multiplies |= inner.multiplies
    return _Words(frozenset(names), multiplies)
