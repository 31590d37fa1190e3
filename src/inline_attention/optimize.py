"""How to run a model fast, in one place: benchmarks, training and the documentation all use it."""

import os
import shutil
import warnings
from typing import TypeVar

from torch import nn

from inline_attention.ops.backends import HAS_TRITON

ModelT = TypeVar("ModelT", bound=nn.Module)

# torch.compile's modes. "reduce-overhead" and "max-autotune" replay CUDA graphs.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def optimize(model: ModelT, *, mode: str | None = None) -> ModelT:
    """Compiles a model's call in place and returns the model: parameter names, type and attributes stay.

    Move the model to its device and call `train()` or `eval()` first. The first call at a size takes the time of a
    compilation; sizes that keep changing get a graph that serves others too. On a GPU it takes another one where the
    kernels go another way, as for short sequences.

    Args:
        mode: of `torch.compile`. Default: "reduce-overhead", which replays CUDA graphs, for a model in `eval()` on a
            GPU; "default" otherwise. "max-autotune" also times several kernels for each matrix product, and
            compiles longer for it. For training, "max-autotune-no-cudagraphs" does so without graphs.
            "reduce-overhead" trains with graphs, unless gradients are added up over several backward passes: a replay
            writes them where the one before it did.

    With CUDA graphs each input size keeps the memory of a graph of its own, and an output is valid until the next
    call: `clone()` it to keep it longer (PyTorch raises an error otherwise). Where sizes vary freely, pass "default".
    Where nothing can be compiled (no C++ compiler, or no Triton for a GPU) a warning says so, and the model runs as it
    is.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; expected one of {', '.join(MODES)}")
    device = next((p.device.type for p in model.parameters()), "cpu")
    if reason := _why_not_compiled(device):
        warnings.warn(f"the model is not compiled: {reason}", stacklevel=2)
        return model
    if mode is None:
        mode = "reduce-overhead" if device == "cuda" and not model.training else "default"
    model.compile(mode=mode)
    return model


def _why_not_compiled(device: str) -> str | None:
    if device == "cuda":
        return None if HAS_TRITON else "Triton is not installed, which kernels for GPUs are written in"
    if device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl"))):
        return "there is no C++ compiler (g++, clang++, or what CXX names)"
    return None
