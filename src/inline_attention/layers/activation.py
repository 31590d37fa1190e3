"""The activation of the MLPs."""

import torch
from torch import Tensor, nn

from inline_attention.ops.gelu import gelu

from .mode import is_changed


class PolynomialGELU(nn.GELU):
    """Exact GELU. Compiled code in half precision computes it by `ops.gelu`, which is faster on GPUs."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling() and input.dtype in (torch.bfloat16, torch.float16):
            return gelu(input)
        return super().forward(input)


def is_exact_gelu(module: nn.Module) -> bool:
    """Whether a call of the module is x·Φ(x) and nothing else."""
    return type(module) in (nn.GELU, PolynomialGELU) and module.approximate == "none" and not is_changed(module)
