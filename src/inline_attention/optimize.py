"""Compiles a model for speed. Benchmarks, training and the documentation use this function."""

import os
import shutil
import warnings
from typing import TypeVar

import torch
from torch import nn

from inline_attention.layers.activation import PolynomialGELU, is_exact_gelu
from inline_attention.layers.block import Block
from inline_attention.layers.embed import PatchConv2d
from inline_attention.layers.mode import is_plain
from inline_attention.ops.backends import HAS_TRITON
from inline_attention.ops.mlp import pays_on

ModelT = TypeVar("ModelT", bound=nn.Module)

MOST_IMAGE_CHANNELS = 4  # with more, cuDNN's convolution was not measured to be slow

# torch.compile's modes. "reduce-overhead" and "max-autotune" replay CUDA graphs.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def optimize(model: ModelT, *, mode: str | None = None) -> ModelT:
    """Compiles a model's call in place and returns the model. Parameter names, type and attributes stay the same.

    Move the model to its device and call `train()` or `eval()` first. The first call at a size compiles. When a second
    size comes, PyTorch compiles a graph that serves other sizes too. On a GPU, sizes for which the kernels take another
    path, such as short sequences, need a graph of their own.

    Args:
        mode: of `torch.compile`. Default: "reduce-overhead", which replays CUDA graphs, for a model in `eval()` on a
            GPU; "default" otherwise. "max-autotune" also times several kernels for each matrix product, and takes
            longer to compile. For training, "max-autotune-no-cudagraphs" does the same without CUDA graphs.
            "reduce-overhead" works for training, unless gradients are accumulated over several backward passes: every
            replay writes them to the same memory.

    Four things become faster on a GPU, and compute the same up to rounding:

    - The convolution that cuts images into patches, as in timm's transformers, becomes a matrix product. cuDNN has no
      fast kernel for three channels: in DeiT-T at 224 pixels it takes a fifth of the time.
    - Exact GELU in half precision loses the error function (`ops.gelu`), also in models of timm.
    - The MLP half of this library's blocks becomes one kernel (`ops.add_mlp`) on GPUs, widths and numbers
      of tokens for which that was measured to be faster. In inference it may include the attention's output projection.
      In training, only blocks without dropout and without stochastic depth in that half take it.
    - In inference, the first norm of a block and the projection to q, k and v become one kernel (`ops.norm_linear`)
      where that was measured to be faster.

    Add hooks and adapters before the first call: compiled code does not notice hooks that come later.
    With CUDA graphs every input size keeps the memory of its own graph, and an output is valid until the next call.
    Call `clone()` to keep it longer; PyTorch raises an error otherwise. Pass "default" if sizes vary freely.
    If nothing can be compiled (no C++ compiler, or no Triton for a GPU), the model runs uncompiled, with a warning.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; expected one of {', '.join(MODES)}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if reason := _why_not_compiled(device.type):
        warnings.warn(f"the model is not compiled: {reason}", stacklevel=2)
        return model
    if mode is None:
        mode = "reduce-overhead" if device.type == "cuda" and not model.training else "default"
    for module in model.modules():
        if isinstance(module, Block):
            _fuse(module, device, training=model.training)
        if device.type == "cuda" and _cuts_images(module):
            module.__class__ = PatchConv2d  # the same parameters, another computation
        if device.type == "cuda" and is_exact_gelu(module):
            module.__class__ = PolynomialGELU
    model.compile(mode=mode)
    return model


def _fuse(block: Block, device: torch.device, *, training: bool) -> None:
    layers: dict[str, nn.Module] = {}
    if block.has_plain_mlp() and not (training and block.drops_mlp()):
        layers = dict.fromkeys(("training",) if training else ("inference", "projected"), block.mlp.fc1)
    if not training and block.has_plain_norm():
        layers["normed"] = block.attn.qkv
    fused = {use for use in block.fused if (use == "training") != training}  # of the other mode
    for use, layer in layers.items():
        assert isinstance(layer, nn.Linear)
        if pays_on(device, layer.in_features, layer.out_features, use):
            fused.add(use)
    block.fused = tuple(sorted(fused))


def _cuts_images(module: nn.Module) -> bool:
    """Whether a module is a convolution that `PatchConv2d` computes, on the few channels of an image."""
    return (
        isinstance(module, nn.Conv2d)
        and is_plain(module, nn.Conv2d)
        and module.in_channels <= MOST_IMAGE_CHANNELS
        and module.kernel_size == module.stride == (module.kernel_size[0],) * 2
        and (module.padding, module.dilation, module.groups) == ((0, 0), (1, 1), 1)
    )


def _why_not_compiled(device: str) -> str | None:
    if device == "cuda":
        return None if HAS_TRITON else "Triton is not installed; torch.compile writes its GPU kernels in it"
    if device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl"))):
        return "there is no C++ compiler (g++, clang++, or what CXX names)"
    return None
