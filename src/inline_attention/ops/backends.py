"""Which implementation runs: the first that can, and the reason why another cannot."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .tracing import is_exporting

# Imported here and not where it is used: torch.compile cannot trace an import that registers operators.
fused: Any
fused_taps: Any
try:
    from . import fused, fused_taps
except ImportError:  # no Triton
    fused = fused_taps = None

HAS_TRITON = fused is not None
BACKENDS = ("triton", "reference")


def why_not_triton(sources: Sequence[Tensor]) -> str | None:
    """Why the fused kernels cannot run on these inputs, or None if they can."""
    if is_exporting():
        return "exported programs hold PyTorch's own operations only"
    if not HAS_TRITON:
        return "Triton is not installed"
    reason: str | None = fused.why_not(sources)
    return reason


def choose(backend: str, sources: Sequence[Tensor]) -> str:
    """The name of the backend to run. "auto" is the kernels for tensors on a GPU that they take, else the reference."""
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend={backend!r} is unknown; expected one of auto, {', '.join(BACKENDS)}")
    if backend == "auto":
        return "triton" if sources[0].is_cuda and why_not_triton(sources) is None else "reference"
    if backend == "triton" and (reason := why_not_triton(sources)):
        raise ValueError(f"backend='triton' cannot run here: {reason}; use backend='auto' or 'reference'")
    return backend
