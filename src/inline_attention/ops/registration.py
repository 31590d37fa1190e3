"""Registers functions that launch kernels as operators of PyTorch. Needs Triton."""

from typing import Any

import torch
from torch import Tensor

from .gpu import INTERPRETED
from .tracing import has_tangents

# torch.compile sees the launches inside a `triton_op` and inlines them, so that no Python runs between kernels.
# Launches in the interpreter cannot be traced, so the operator is opaque there.
register: Any = torch.library.custom_op if INTERPRETED else torch.library.triton_op


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise in forward-mode differentiation. Operators without a rule for it drop tangents silently."""
    if has_tangents(*tensors):
        raise NotImplementedError(
            "the kernels have no forward-mode derivative; differentiate in reverse mode, or pass backend='reference'"
        )


def refuse_second_derivatives(operator: Any) -> None:
    """Gives an operator, the backward of another, a backward that raises."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError("the kernels have no second derivatives; pass backend='reference'")

    operator.register_autograd(refuse)
