"""Triton's interpreter, at a third of its cost.

Most of its time goes into Python objects that are the same again and again: the patched functions of triton.language,
and the types and shapes of blocks. Each is made once here. The numbers that kernels compute do not change.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """The interpreter patches triton.language before each call of a device function. Patch it for good."""
    interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
    unchanged = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: unchanged


def skip_unused_checks() -> None:
    """Each sum of integers is computed again in 64 bits, for an assertion that only a debug build makes."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _is_pointer(dtype: Any) -> bool:
    return isinstance(dtype.scalar, tl.pointer_type)  # Triton gives these no hash


def cache_types() -> None:
    convert = interpreter._get_np_dtype
    cached_convert = functools.cache(convert)
    interpreter._get_np_dtype = lambda dtype: (convert if _is_pointer(dtype) else cached_convert)(dtype.scalar)

    make_type = tl.block_type.__init__

    @functools.cache
    def facts_of_type(element: Any, *shape: int) -> dict[str, Any]:
        block = object.__new__(tl.block_type)
        make_type(block, element, list(shape))
        return vars(block)

    def quick_type(self: Any, element: Any, shape: Any) -> None:
        if _is_pointer(element):
            make_type(self, element, shape)
        else:
            vars(self).update(facts_of_type(element, *(getattr(size, "value", size) for size in shape)))

    tl.block_type.__init__ = quick_type

    make_tensor = tl.tensor.__init__

    @functools.cache
    def facts_of_tensor(element: Any, *shape: int) -> dict[str, Any]:
        tensor = object.__new__(tl.tensor)
        make_tensor(tensor, None, tl.block_type(element, list(shape)) if shape else element)
        return vars(tensor)

    def quick_tensor(self: Any, handle: Any, dtype: Any) -> None:
        if _is_pointer(dtype):
            make_tensor(self, handle, dtype)
        else:
            shape = dtype.shape if dtype.is_block() else ()
            vars(self).update(facts_of_tensor(dtype.scalar, *shape), handle=handle, type=dtype)

    tl.tensor.__init__ = quick_tensor


def skip_what_changes_nothing() -> None:
    """Most operands have the same shape already, and most arguments are no constants of the compiler."""
    semantic = tl.semantic.TritonSemantic
    broadcast, unwrap = semantic.broadcast_impl_value, tl.core._unwrap_if_constexpr
    plain = {tl.tensor, int, float, bool, type(None)}

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        same = lhs.handle.data.shape == rhs.handle.data.shape and lhs.type.is_block() == rhs.type.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = quick_broadcast
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)


def install() -> None:
    skip_what_changes_nothing()
    patch_once()
    skip_unused_checks()
    cache_types()
