"""Rotary positions on a token map: pairs of channels turn by angles that grow with the row or the column."""

import torch
from timm.layers.pos_embed_sincos import apply_rot_embed, build_rotary_pos_embed
from torch import Tensor

from inline_attention.ops import Grid

ROPE_BASE = 10_000.0


def rotate(x: Tensor, grid: Grid, *, num_prefix_tokens: int) -> Tensor:
    """x (B, N, heads, d) turned by the position of each token → the same. Prefix tokens keep their channels.

    The first d/2 channels turn with the row and the others with the column. With the position n on its axis, the pair
    of channels (2m, 2m + 1) of a half turns by n·10,000^(−4m/d). A product of two turned vectors depends on the offset
    between their tokens, not on where they are.
    """
    bands = torch.arange(x.shape[-1] // 4, device=x.device, dtype=x.dtype)
    bands = ROPE_BASE ** (-bands / len(bands))
    sin, cos = build_rotary_pos_embed(list(grid), bands, in_pixels=False, device=x.device, dtype=x.dtype)
    turned = apply_rot_embed(x[:, num_prefix_tokens:], sin[:, None], cos[:, None])
    return turned if num_prefix_tokens == 0 else torch.cat([x[:, :num_prefix_tokens], turned], 1)
