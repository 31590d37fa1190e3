"""Rotary positions on a token map: pairs of channels rotate by angles that grow with the row or the column."""

import torch
from timm.layers.pos_embed_sincos import apply_rot_embed, build_rotary_pos_embed
from torch import Tensor

from inline_attention.ops import Grid

ROPE_BASE = 10_000.0


def rotate(x: Tensor, grid: Grid, *, num_prefix_tokens: int) -> Tensor:
    """x (B, N, heads, d) rotated by the position of each token → the same. Prefix tokens keep their channels.

    The first d/2 channels rotate with the row and the others with the column. With the position n on its axis, the pair
    of channels (2m, 2m + 1) of a half rotates by n·10,000^(−4m/d). The product of two rotated vectors depends on the
    offset between their tokens, not on where they are.
    """
    bands = torch.arange(x.shape[-1] // 4, device=x.device, dtype=x.dtype)
    bands = ROPE_BASE ** (-bands / len(bands))
    sin, cos = build_rotary_pos_embed(list(grid), bands, in_pixels=False, device=x.device, dtype=x.dtype)
    rotated = apply_rot_embed(x[:, num_prefix_tokens:], sin[:, None], cos[:, None])
    return rotated if num_prefix_tokens == 0 else torch.cat([x[:, :num_prefix_tokens], rotated], 1)
