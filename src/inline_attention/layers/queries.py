"""What an attention can learn about queries and keys besides their projection: a gain per head, an affine map."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .mode import is_plain


class AffineMap(nn.Module):
    """A learned map x → A·x + b per head, shared by queries and keys. It starts as the identity.

    (B, N, heads, d) → the same
    """

    def __init__(self, num_heads: int, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim, **factory))
        self.bias = nn.Parameter(torch.empty(num_heads, head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.weight.shape[-1], device=self.weight.device))
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bnhi,hoi->bnho", x, self.weight)
        return y + self.bias.to(y.dtype)  # a float32 bias would widen autocast's dtype


class HeadGain(nn.Module):
    """A learned factor of the queries of each head.

    It multiplies the rows of the projection that make the queries. These are few compared with the tokens, and the
    operation stays as it is.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        start: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < start < math.inf:
            raise ValueError(f"gain={start!r}; expected True, or the positive number that it starts at")
        self.start = start
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def project(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """`linear`, whose first C outputs are the queries, with the gains: (…, C) → (…, its outputs)"""
        queries = x.shape[-1]
        factor = self.weight.repeat_interleave(queries // len(self.weight))
        # An adapter, a quantised layer or a layer with hooks computes something else than its weight says.
        if not is_plain(linear, nn.Linear):
            y = linear(x)
            return y * F.pad(factor, (0, y.shape[-1] - queries), value=1.0).to(y.dtype)
        factor = F.pad(factor, (0, linear.out_features - queries), value=1.0)
        bias = None if linear.bias is None else factor * linear.bias
        return F.linear(x, factor[:, None] * linear.weight, bias)
