"""Images of different sizes in one batch, padded at the bottom and right to one canvas.

`sizes` (B, 2) holds the true (height, width) of each image, or of each image's own part of a feature map, as integers
on the device of the data. None stands for a batch without padding, which then costs nothing.

With the functions here, each image gets the result that it would get alone. They make a mask of its own tokens, set
everything beyond its border to zero, and resize it from its own border, not from that of the canvas.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from inline_attention.ops import Grid


class Padding(NamedTuple):
    """Which tokens of a padded map are the images' own."""

    sizes: Tensor  # (B, 2): rows and columns of each image's own map, at the top left
    token_mask: Tensor  # (B, N) bool, False on padding; prefix tokens are True


def sizes_on_map(sizes: Tensor, stride: int) -> Tensor:
    """The sizes of the maps that images of these sizes have at a stride. A partial patch is a token too."""
    return (sizes + stride - 1) // stride


def own_positions(sizes: Tensor, grid: Grid) -> Tensor:
    """(B, H, W) bool, True on each image's own part of a map of that grid"""
    rows, columns = (
        torch.arange(length, device=sizes.device) < sizes[:, axis, None] for axis, length in enumerate(grid)
    )
    return rows[:, :, None] & columns[:, None, :]


def own_tokens(sizes: Tensor, grid: Grid, *, num_prefix_tokens: int = 0) -> Padding:
    """The padding of a map whose tokens follow the prefix tokens row by row"""
    mask = own_positions(sizes, grid).flatten(1)
    prefix = mask.new_ones(mask.shape[0], num_prefix_tokens)
    return Padding(sizes, torch.cat([prefix, mask], dim=1))


def zero_padding(x: Tensor, sizes: Tensor | None, *, channels: Literal["first", "last"]) -> Tensor:
    """A map (B, C, H, W) or (B, H, W, C) with everything beyond each image's border set to zero"""
    if sizes is None:
        return x
    if channels == "first":
        return x.masked_fill(~own_positions(sizes, (x.shape[2], x.shape[3]))[:, None], 0)
    return x.masked_fill(~own_positions(sizes, (x.shape[1], x.shape[2]))[..., None], 0)


def repeat_border(x: Tensor, sizes: Tensor) -> Tensor:
    """A map (B, C, H, W) with each image's last own row and column repeated once beyond its border

    Interpolation then reads the same values as at the end of a map, where PyTorch repeats the border.
    """
    for axis, shift in enumerate(((0, 0, 1, -1), (1, -1))):
        beyond = torch.arange(x.shape[2 + axis], device=x.device) == sizes[:, axis, None]  # (B, H or W)
        at = beyond[:, None, :, None] if axis == 0 else beyond[:, None, None, :]
        x = torch.where(at, F.pad(x, shift), x)
    return x


def resize_weights(
    source: Tensor, target: Tensor, lengths: tuple[int, int], *, mode: str, dtype: torch.dtype
) -> Tensor:
    """Interpolation along one axis as a matrix for each image, as `F.interpolate` computes it without antialiasing.

    Args:
        source: (B,) or (1,), how many positions of the input are the image's own.
        target: (B,), how many of the output are.
        lengths: of the input and the output with their padding.
        mode: "bilinear" or "bicubic".

    Returns:
        (B, output length, input length); rows beyond the target are zero.
    """
    length, new_length = lengths
    position = torch.arange(new_length, device=target.device, dtype=dtype)
    source, target = source[:, None], target[:, None]
    at = (position + 0.5) * (source.to(dtype) / target) - 0.5  # (B, output length), in positions of the input
    columns = torch.arange(length, device=target.device)
    if mode == "bilinear":
        at = torch.minimum(at.clamp(min=0), source.to(dtype) - 1)
        weights = (1 - (at[..., None] - columns).abs()).clamp(min=0)
    elif mode == "bicubic":
        first = at.floor()
        weights = at.new_zeros(*at.shape, length)
        for tap in range(-1, 3):
            index = torch.minimum((first + tap).long().clamp(min=0), source - 1)
            weights = weights + _cubic((at - first - tap).abs())[..., None] * (index[..., None] == columns)
    else:
        raise ValueError(f"mode={mode!r}; expected 'bilinear' or 'bicubic'")
    return weights * (position < target)[..., None]


def _cubic(distance: Tensor) -> Tensor:
    """The kernel of cubic convolution with PyTorch's a = −0.75, at distances from 0 to 2"""
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, far)


def resize_map_for_each(x: Tensor, sizes: Tensor, grid: Grid, *, mode: str) -> Tensor:
    """A learned map (1, H, W, C) resized to each image's own size → (B, *grid, C), zero beyond it"""
    rows, columns = (
        resize_weights(sizes.new_tensor([length]), sizes[:, axis], (length, grid[axis]), mode=mode, dtype=x.dtype)
        for axis, length in enumerate(x.shape[1:3])
    )
    return torch.einsum("bih,hwc,bjw->bijc", rows, x[0], columns)
