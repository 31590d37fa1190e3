"""Registers functions that launch kernels as operators of PyTorch. Needs Triton."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .gpu import INTERPRETED

# torch.compile sees the launches inside a `triton_op` and inlines them, so that no Python runs between kernels.
# Launches in the interpreter cannot be traced, so the operator is opaque there.
register: Any = torch.library.custom_op if INTERPRETED else torch.library.triton_op


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise in forward-mode differentiation. Operators without a rule for it drop tangents silently."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "the kernels have no forward-mode derivative; differentiate in reverse mode, or use torch.func.jvp with "
            "backend='reference'"
        )
