"""Which implementation of an operation runs, how a user chooses one, and why the kernels cannot run somewhere."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .tracing import needs_plain_operations

# Imported here and not where they are used: torch.compile cannot trace an import that registers operators.
fused: Any
fused_local_weight: Any
fused_mlp: Any
fused_norm_linear: Any
gpu: Any
tuned: Any
try:
    from . import fused, fused_local_weight, fused_mlp, fused_norm_linear, gpu, tuned
except ImportError:  # no Triton
    fused = fused_local_weight = fused_mlp = fused_norm_linear = gpu = tuned = None

HAS_TRITON = fused is not None
Backend = Literal["auto", "reference", "triton"]
BACKENDS = get_args(Backend)

_default: Backend = "auto"  # what backend="auto" stands for


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; expected one of {', '.join(BACKENDS)}")


def get_backend() -> Backend:
    """The backend that `set_backend` or `use_backend` has set; "auto" by default."""
    return _default


def set_backend(backend: Backend) -> None:
    """Sets the backend of every call and module in this process whose own `backend` is "auto".

    Args:
        backend: "reference", plain PyTorch everywhere; "triton", the kernels, and an error where they cannot run;
            "auto", the kernels where they can run and the reference elsewhere.
    """
    global _default
    check_backend(backend)
    _default = backend


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """`set_backend` for the calls inside a `with` block. Backward passes take the backend of their forward pass."""
    before = get_backend()
    set_backend(backend)
    try:
        yield
    finally:
        set_backend(before)


def resolve(backend: str) -> str:
    """`backend`, or the one that `set_backend` has set if it is "auto"."""
    check_backend(backend)
    return _default if backend == "auto" else backend


def choose(backend: str, x: Tensor, *, why_not: Callable[[], str | None] = lambda: None) -> str:
    """The backend to run, "reference" or "triton".

    Args:
        backend: what the caller asked for.
        x: one of the inputs.
        why_not: returns the operation's own reason why its kernels cannot run, or None. It is called last.
    """
    backend = resolve(backend)
    if backend == "reference" or (backend == "auto" and not x.is_cuda):
        return "reference"
    reason = _why_not_triton(x) or why_not()
    if reason is None:
        return "triton"
    if backend == "auto":
        if HAS_TRITON and (of_the_gpu := gpu.why_not(x.device)):
            _warn_once(of_the_gpu)
        return "reference"
    raise ValueError(f"backend='triton' cannot run here: {reason}; use backend='auto' or 'reference'")


_warned: set[str] = set()


@torch.compiler.assume_constant_result  # torch.compile calls it while it traces
def _warn_once(reason: str) -> None:
    """Warn that the kernels do not support this GPU, once for each reason."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"attention runs in plain PyTorch: {reason}; set_backend('reference') hides this", stacklevel=3)


def _why_not_triton(x: Tensor) -> str | None:
    if needs_plain_operations():
        return "exported programs and the transforms of torch.func take PyTorch's own operations only"
    if not HAS_TRITON:
        return "Triton is not installed"
    reason: str | None = fused.why_not(x)
    return reason
