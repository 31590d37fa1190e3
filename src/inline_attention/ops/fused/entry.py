"""The backend's entry: where the kernels run, and the call of the operator."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import gpu, tuned
from ..gpu import INTERPRETED
from ..local import Grid, LocalSource
from ..registration import refuse_tangents
from ..tracing import needs_gradients
from .arguments import Options, rows_of
from .config import MOST_CHANNELS, WIDE_MEMORY, WITHIN_ANY_MEMORY
from .operators import forward_op
from .short import Tile, local_tensors, short_op, winning_tile


def why_not(x: Tensor) -> str | None:
    """Why no kernel runs on tensors of x's dtype and device, or None if they do."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels compute in bfloat16, float16 or float32, not in {x.dtype}"
    if not x.is_cuda and not INTERPRETED:
        return f"the kernels run on a GPU, and the inputs are on {x.device}"
    return gpu.why_not(x.device) if x.is_cuda else None


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
    local_weight: Tensor | LocalSource | None,
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
    make: Callable[[LocalSource], Tensor],
    tile: Tile | None = None,
) -> Tensor:
    """The backend's entry. Inputs are checked and defaults filled in.

    Args:
        local_weight: (B, heads, e, 9), or a `LocalSource`: the kernel of one launch makes the weight itself.
        sequences: (images, 4) integers for a packed batch: first token, tokens, height and width of each image.
        shares: the normalised token weight (B, heads, N).
        offset: what is subtracted from the queries, (B, 1, heads, d).
        anchored: the shares are the softmax of the offset's scores. They are computed here.
        feature_map: the kernels' name of φ, `FeatureMap.kernel`.
        grids: (height, width) of the map; of each image's map for a packed batch.
        make: makes the local weight of a `LocalSource` for the other kernels.
        tile: parameters of the kernel of one launch, which has no gradients. By default that kernel runs only where it
            was measured to be faster.
    """
    shares = None if shares is None else shares.float().contiguous()
    offset = None if offset is None else offset.contiguous()
    local = local_tensors(local_weight)
    differentiable = (*projections, *local, shares, offset)
    refuse_tangents(*differentiable)
    projections = [rows_of(x) for x in projections]
    masks = [None if mask is None else mask.contiguous() for mask in (token_mask, query_mask)]
    sizes = [length for grid in grids for length in grid]
    options = Options(normalization, feature_map, anchored, scale, sizes, num_prefix_tokens)
    save = needs_gradients(*differentiable)
    if tile is None and not save:
        tile = winning_tile(projections, local, sequences, shares, options)
    if tile is not None:
        assert not save, "one launch has no backward"
        return short_op(projections, local, *masks, sequences, shares, offset, *options, list(tile))
    if isinstance(local_weight, LocalSource):
        local = local_tensors(make(local_weight))
    weight = local[0] if local else None
    out, *_ = forward_op(
        projections, weight, *masks, sequences, shares, offset, *options, save, tuned.digest(projections[0].device)
    )
    return out
