"""The kernel generator of the local residual, and how an attention's local terms are described."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.ops import backends
from inline_attention.ops.attention import Backend
from inline_attention.ops.local import TAPS


class GroupedLinear(nn.Module):
    """A linear map per group: what a 1×1 grouped convolution does, as one batched product.

    (B, groups, in_features / groups) → (B, groups, out_features / groups)
    """

    def __init__(self, in_features: int, out_features: int, groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features // groups, in_features // groups))
        self.bias = nn.Parameter(torch.empty(groups, out_features // groups))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As PyTorch starts the convolution that this replaces."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.einsum("bgi,goi->bgo", x, self.weight)
        return out + self.bias.to(out.dtype)  # under autocast as a linear layer: in half precision

    def extra_repr(self) -> str:
        groups, out_features, in_features = self.weight.shape
        return f"{groups * in_features}, {groups * out_features}, groups={groups}"


class LocalKernel(nn.Module):
    """Makes the 3×3 kernels of the local residual from the mean token: a two-layer perceptron per head.

    A depthwise convolution applies the same kernels to every image. These depend on the image (or on the window),
    but not on the position in it, so they cost one small product a sample, whatever the resolution.

    token_mean (B, dim) → (B, heads, dim / heads, 9), taps row-major
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.fc1 = GroupedLinear(dim, dim, num_heads)
        self.fc2 = GroupedLinear(dim, TAPS * dim, num_heads)

    def forward(self, token_mean: Tensor, *, backend: Backend = "auto") -> Tensor:
        """The mean token (B, C) → kernels (B, heads, d, 9); `backend` as of `inline_attention`"""
        heads, _, head_dim = self.fc1.weight.shape
        if token_mean.ndim != 2 or token_mean.shape[1] != heads * head_dim:
            raise ValueError(f"the mean token has shape {tuple(token_mean.shape)}; expected (B, {heads * head_dim})")
        x = token_mean.unflatten(1, (heads, head_dim))
        if backends.choose(backend, (x,)) == "triton":
            return backends.fused_taps.make_taps(
                token_mean, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
            )
        return self.fc2(F.gelu(self.fc1(x))).unflatten(2, (-1, TAPS))


class LocalTerm(NamedTuple):
    """What an attention adds to its output besides its weights: a correlation of v with a small kernel per channel."""

    weight: Tensor  # (B or 1, C, height, width), odd sides; zeros beyond the border
    bias: Tensor | None = None  # (C,), where the kernel applies
    on_map: bool = True  # on the token map, prefix tokens left out; else along the row of all tokens
    regions: Tensor | None = None  # (groups, N): taps reach the same region alone; groups split the channels evenly
