"""Whether operations are recorded or transformed by PyTorch, which sees neither kernels nor autograd functions."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether one of these tensors has a tangent: forward-mode differentiation, outside the transforms of torch.func"""
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_exporting() -> bool:
    """True under torch.export and torch.jit.trace, whose programs hold PyTorch's own operations only.

    The flag is that of `torch.compiler.is_exporting`, which is also True under torch.compile in torch 2.9 to 2.11.
    """
    return torch.compiler._is_exporting_flag or torch.jit.is_tracing()


def needs_plain_operations() -> bool:
    """True while exporting, and inside the transforms of torch.func. Nothing is overwritten then: vmap forbids it."""
    if is_exporting():
        return True
    # torch.compile traces the transforms by itself, and cannot trace this question in every supported version.
    return not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active()
