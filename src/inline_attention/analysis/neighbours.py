"""The neighbours of tokens on a map."""

import torch
from torch import Tensor

from inline_attention.ops import Grid


def neighbours(
    grid: Grid, side: Grid, *, num_prefix_tokens: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """The tokens in a window of odd sides around every token of a map, row by row.

    Returns:
        (N, height·width of the window) integers, N = num_prefix_tokens + grid; −1 beyond the border, and in
        the rows of prefix tokens, which have no neighbours.
    """
    offsets = [torch.arange(n, device=device) - n // 2 for n in side]
    y = torch.arange(grid[0], device=device)[:, None, None, None] + offsets[0][:, None]
    x = torch.arange(grid[1], device=device)[None, :, None, None] + offsets[1]
    inside = (y >= 0) & (y < grid[0]) & (x >= 0) & (x < grid[1])  # (H, W, height, width)
    around = torch.where(inside, num_prefix_tokens + y * grid[1] + x, -1).flatten(2).flatten(0, 1)
    return torch.nn.functional.pad(around, (0, 0, num_prefix_tokens, 0), value=-1)
