"""What an operator takes besides q, k and v, and how tensors become arguments of a kernel."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..feature_maps import NONZERO_AT_ZERO
from .config import LONGEST_STRIDE
from .plan import Plan


class Options(NamedTuple):
    """The arguments of an operator that are not tensors."""

    normalization: str
    feature_map: str
    anchored: bool  # the token weights are the softmax of the offset's scores
    scale: float
    grids: Sequence[int]
    num_prefix_tokens: int

    def effort(self, *, weighted: bool) -> str:
        """How much the attention computes for a token: the key of `STEPS`."""
        if self.normalization == "subtract" and self.feature_map in NONZERO_AT_ZERO:
            return "magnitude"  # exponentials of queries and keys
        if self.normalization == "subtract":
            return "weighted" if weighted else "plain"
        return self.normalization


class Tensors(NamedTuple):
    """The tensors of an operator besides q, k and v."""

    local_weight: Tensor | None
    token_mask: Tensor | None
    query_mask: Tensor | None
    sequences: Tensor | None
    shares: Tensor | None  # (B, heads, N) float32; an anchor's scores
    offset: Tensor | None  # (B, 1, heads, d)


def common_of(plan: Plan, token_mask: Tensor | None) -> dict[str, Any]:
    return dict(
        DK=plan.key_dim,
        DV=plan.value_dim,
        HEADS=plan.heads_per_block,
        BK=plan.block_keys,
        BV=plan.block_values,
        HAS_MASK=token_mask is not None,
        PACKED=plan.packed,
    )


def dot_settings(dtype: torch.dtype) -> dict[str, Any]:
    """The dtype of matrix products. float16 inputs use tf32, which also holds a state too large for float16."""
    if dtype == torch.bfloat16:
        return dict(DOT=tl.bfloat16, PRECISION="tf32")
    return dict(DOT=tl.float32, PRECISION="ieee" if dtype == torch.float32 else "tf32")


def state_dtype_of(dtype: torch.dtype, feature_map: str, anchored: bool) -> torch.dtype:
    """The dtype that S is kept in: that of the products for bfloat16, else float32.

    Where φ(0) is not zero the sum of S's rows is needed too, and the backward of an anchor needs the product of S and
    its gradient. Both take all digits of S.
    """
    rounded = dtype == torch.bfloat16 and feature_map not in NONZERO_AT_ZERO and not anchored
    return dtype if rounded else torch.float32


def saved(plan: Plan, options: Options, dtype: torch.dtype, save: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what the forward leaves for the backward: state, means, an anchor's scores, and log Σ exp

    Without a backward they are empty, but for the first two where one kernel leaves them to the next.
    """
    kept = plan.batch if save or not plan.fused else 0
    anchored = plan.batch if save and options.anchored else 0
    state = state_dtype_of(dtype, options.feature_map, options.anchored)
    return [
        ((kept, plan.heads, plan.key_dim, plan.value_dim), state),
        ((kept, plan.heads * (plan.key_dim + plan.value_dim)), torch.float32),
        ((anchored, plan.heads, plan.tokens), torch.float32),
        ((anchored, plan.heads), torch.float64 if dtype == torch.float32 else torch.float32),
    ]


def layout_of(projections: Sequence[Tensor]) -> str:
    """Which of q, k and v each tensor holds, such as "qkv" or "q,kv" """
    names = iter("qkv")
    return ",".join("".join(islice(names, projection.shape[2])) for projection in projections)


def rows_of(x: Tensor) -> Tensor:
    """x (B, N, …, heads, d) if a token's channels are contiguous and tokens not too far apart, else a copy"""
    together = x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
    return x if together and x.stride(1) <= LONGEST_STRIDE else x.contiguous()


def strides_of(packed: bool, *tensors: Tensor) -> list[int]:
    """The strides of the batch and of the tokens, for each tensor in turn"""
    return [stride for x in tensors for stride in (0 if packed else x.stride(0), x.stride(1))]


def count_of(token_mask: Tensor | None) -> Tensor | None:
    """Tokens present in each sample. A sample without any counts one, so that its sums of zeros stay zero."""
    return None if token_mask is None else token_mask.sum(1).clamp(min=1).float()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)
