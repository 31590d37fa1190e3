"""The backend's entry: where the kernels run, and the call of the operator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import gpu
from ..gpu import INTERPRETED
from ..local import Grid
from ..registration import refuse_tangents
from .arguments import rows_of
from .config import MOST_CHANNELS, WIDE_MEMORY, WITHIN_ANY_MEMORY
from .operators import forward_op


def why_not(x: Tensor) -> str | None:
    """Why the kernels cannot run on tensors such as x (…, heads, d), or None if they can."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels compute in bfloat16, float16 or float32, not in {x.dtype}"
    if not x.is_cuda and not INTERPRETED:
        return f"the kernels run on a GPU, and the inputs are on {x.device}"
    if x.is_cuda and (reason := gpu.why_not(x.device)):
        return reason
    return why_not_widths(x.shape[-1], x.shape[-1], x.device)


def why_not_widths(key_dim: int, value_dim: int, device: torch.device) -> str | None:
    """Why the kernels cannot run with heads of so many features and values, or None if they can."""
    channels = max(key_dim, value_dim)
    if channels > MOST_CHANNELS:
        return f"the kernels hold heads of up to {MOST_CHANNELS} channels, not of {channels}"
    if channels > WITHIN_ANY_MEMORY and (reason := gpu.why_not_memory(WIDE_MEMORY, device)):
        return f"with heads of {channels} channels {reason}"
    return None


def attention(
    projections: Sequence[Tensor],
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    sequences: Tensor | None,
    shares: Tensor | None,
    offset: Tensor | None,
    *,
    anchored: bool,
    normalization: str,
    feature_map: str,
    scale: float,
    grids: Sequence[Grid],
    num_prefix_tokens: int,
) -> Tensor:
    """The backend's entry. Inputs are checked and defaults filled in.

    Args:
        sequences: (images, 4) integers for a packed batch: first token, tokens, height and width of each image.
        shares: the normalised token weight (B, heads, N).
        offset: what is subtracted from the queries, (B, 1, heads, d).
        anchored: the shares are the softmax of the offset's scores. They are computed here.
        feature_map: the kernels' name of φ, `FeatureMap.kernel`.
        grids: (height, width) of the map; of each image's map for a packed batch.
    """
    shares, offset = (None if x is None else x.float().contiguous() for x in (shares, offset))
    differentiable = (*projections, local_weight, shares, offset)
    refuse_tangents(*differentiable)
    out, *_ = forward_op(
        [rows_of(x) for x in projections],
        None if local_weight is None else local_weight.contiguous(),
        None if token_mask is None else token_mask.contiguous(),
        None if query_mask is None else query_mask.contiguous(),
        sequences,
        shares,
        offset,
        normalization,
        feature_map,
        anchored,
        scale,
        [length for grid in grids for length in grid],
        num_prefix_tokens,
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable),
    )
    return out
