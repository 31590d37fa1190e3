"""Which implementation runs, and why the kernels cannot where they cannot."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from .tracing import is_exporting

# Imported here and not where it is used: torch.compile cannot trace an import that registers operators.
fused: Any
fused_local_weight: Any
try:
    from . import fused, fused_local_weight
except ImportError:  # no Triton
    fused = fused_local_weight = None

HAS_TRITON = fused is not None
Backend = Literal["auto", "reference", "triton"]
BACKENDS = ("triton", "reference")


def why_not_triton(x: Tensor) -> str | None:
    """Why no kernel can run on tensors such as x (…, heads, d), or None if they can."""
    if is_exporting():
        return "exported and traced programs hold PyTorch's own operations only"
    if not HAS_TRITON:
        return "Triton is not installed"
    reason: str | None = fused.why_not(x)
    return reason


def choose(backend: str, x: Tensor, *, why_not: Callable[[], str | None] = lambda: None) -> str:
    """The backend to run. "auto" is the kernels where they can run on a GPU, else the reference.

    Args:
        backend: what the caller asked for.
        x: (…, heads, d), one of the inputs.
        why_not: a reason of the operation's own why its kernels cannot run; asked last.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend={backend!r} is unknown; expected one of auto, {', '.join(BACKENDS)}")
    if backend == "reference" or (backend == "auto" and not x.is_cuda):
        return "reference"
    reason = why_not_triton(x) or why_not()
    if reason is None:
        return "triton"
    if backend == "auto":
        return "reference"
    raise ValueError(f"backend='triton' cannot run here: {reason}; use backend='auto' or 'reference'")
