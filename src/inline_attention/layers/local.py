"""The parameters of local terms: the generator of the local residual, and a description of what an attention adds."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inline_attention.ops import Backend, LocalSource, make_local_weight
from inline_attention.ops.local import TAPS


class ParameterPair(nn.Module):
    """A weight and a bias that an operation takes as tensors.

    It holds parameters and is never called. Hooks, adapters and quantisers belong on the module around it.
    """

    def __init__(
        self, weight_shape: tuple[int, ...], bias_shape: tuple[int, ...], *, fan_in: int, **factory: Any
    ) -> None:
        super().__init__()
        self.fan_in = fan_in
        self.weight = nn.Parameter(torch.empty(weight_shape, **factory))
        self.bias = nn.Parameter(torch.empty(bias_shape, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As PyTorch initialises the convolution that has these parameters."""
        bound = 1 / math.sqrt(self.fan_in)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)}, bias={tuple(self.bias.shape)}"


class LocalWeight(nn.Module):
    """Makes the 3×3 kernels of the local residual from the mean token: a two-layer MLP per head.

    A depthwise convolution applies the same kernels to every image. These depend on the image (or on the window),
    but not on the position in it, so they cost one small product a sample at any resolution.

    token_mean (B, dim) → local_weight (B, heads, dim / heads, 9), taps row-major

    `factory` is the `device` and `dtype` of the parameters.
    """

    def __init__(self, dim: int, num_heads: int, **factory: Any) -> None:
        super().__init__()
        d = dim // num_heads
        self.fc1 = ParameterPair((num_heads, d, d), (num_heads, d), fan_in=d, **factory)
        self.fc2 = ParameterPair((num_heads, TAPS * d, d), (num_heads, TAPS * d), fan_in=d, **factory)

    def forward(self, token_mean: Tensor, *, backend: Backend = "auto") -> Tensor:
        """The mean token (B, C) → local_weight (B, heads, d, 9); `backend` as of `inline_attention`"""
        return make_local_weight(token_mean, *self.parameters_in_order(), backend=backend)

    def source(self, x: Tensor) -> LocalSource:
        """What the local weight of tokens x (B, N, C) is made from, for an operation that makes it"""
        return LocalSource(x, *self.parameters_in_order())

    def parameters_in_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias


class LocalTerm(NamedTuple):
    """What an attention adds to weights @ v: the correlation of v with a small kernel per channel."""

    weight: Tensor  # (B or 1, C, height, width), odd sides; v is zero beyond the border
    bias: Tensor | None = None  # (C,), added to the tokens that the kernel applies to
    on_map: bool = True  # on the token map, without prefix tokens; otherwise along the sequence of all tokens
    regions: Tensor | None = None  # (groups, N): taps reach tokens of the same region only; groups split the channels
    sample_regions: Tensor | None = None  # (S, N): the same, of each sample
