"""Which implementation runs: the first that can, and the reason why another cannot."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

BACKENDS = ("triton", "reference")


HAS_TRITON = importlib.util.find_spec("triton") is not None


def why_not_triton(sources: Sequence[Tensor]) -> str | None:
    """Why the fused kernels cannot run on these inputs, or None if they can."""
    if torch.compiler.is_exporting():
        return "exported programs hold PyTorch's own operations only"
    if not HAS_TRITON:
        return "Triton is not installed"
    from . import fused

    return fused.why_not(sources)


def choose(backend: str, sources: Sequence[Tensor]) -> str:
    """The name of the backend to run: "auto" takes the kernels on a GPU, if nothing stands against it."""
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend={backend!r} is unknown; expected one of auto, {', '.join(BACKENDS)}")
    if backend == "auto":
        return "triton" if sources[0].is_cuda and why_not_triton(sources) is None else "reference"
    if backend == "triton" and (reason := why_not_triton(sources)):
        raise ValueError(f"backend='triton' cannot run here: {reason}; use backend='auto' or 'reference'")
    return backend
