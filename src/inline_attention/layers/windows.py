"""Windows of any size over maps of any size: cut, shifted cyclically, padded at the bottom and right."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Grid = tuple[int, int]


def is_zero(n: int) -> bool:
    """Whether n is known to be zero: False for a symbolic size, so that an exported graph keeps the general path."""
    return isinstance(n, int) and n == 0


def pad_to_multiple(x: Tensor, multiple: Grid) -> Tensor:
    """Zeros at the bottom and right of a map (B, H, W, C) until each side is a multiple."""
    bottom, right = (-size % m for size, m in zip(x.shape[1:3], multiple, strict=True))
    return x if is_zero(bottom) and is_zero(right) else F.pad(x, (0, 0, 0, right, 0, bottom))


class WindowPlan(NamedTuple):
    """How a map is cut: the window and its cyclic shift, by axis."""

    window: Grid
    shift: Grid

    @classmethod
    def fit(cls, size: Grid, window: Grid | None, *, shifted: bool) -> "WindowPlan":
        """A window as large as the map or larger is clipped to it and not shifted, by axis; None is the whole map."""
        if window is None:
            return cls(size, (0, 0))
        clipped = tuple(min(w, s) for w, s in zip(window, size, strict=True))
        shift = tuple(w // 2 if shifted and w < s else 0 for w, s in zip(window, size, strict=True))
        return cls((clipped[0], clipped[1]), (shift[0], shift[1]))


class Windows(NamedTuple):
    tokens: Tensor  # (B·windows, window tokens, C), the windows of an image next to each other
    token_mask: Tensor | None  # (B·windows, window tokens) bool, False on padding; None where there is none
    plan: WindowPlan
    size: Grid  # of the map

    def merge(self, tokens: Tensor) -> Tensor:
        """The map (B, H, W, C) from windows (B·windows, window tokens, C), shift undone, padding dropped."""
        (height, width), (wh, ww) = self.size, self.plan.window
        rows, columns = -(-height // wh), -(-width // ww)
        x = tokens.reshape(-1, rows, columns, wh, ww, tokens.shape[-1])
        x = x.transpose(2, 3).reshape(-1, rows * wh, columns * ww, tokens.shape[-1])
        if self.plan.shift != (0, 0):
            x = x.roll(self.plan.shift, (1, 2))
        return x[:, :height, :width]


def _cut(x: Tensor, window: Grid) -> Tensor:
    """(B, H, W, C) with sides that are multiples of the window → (B·windows, window tokens, C)"""
    wh, ww = window
    x = x.unflatten(2, (-1, ww)).unflatten(1, (-1, wh))
    return x.transpose(2, 3).reshape(-1, wh * ww, x.shape[-1])


def to_windows(x: Tensor, plan: WindowPlan) -> Windows:
    """Cuts a map (B, H, W, C)."""
    size = (x.shape[1], x.shape[2])
    token_mask = None
    padded = pad_to_multiple(x, plan.window)
    if padded is not x:
        present = pad_to_multiple(torch.ones((1, *size, 1), dtype=torch.bool, device=x.device), plan.window)
        token_mask = _cut(_shifted(present, plan), plan.window)[..., 0]
        token_mask = token_mask.expand(x.shape[0], -1, -1).flatten(0, 1)
    return Windows(_cut(_shifted(padded, plan), plan.window), token_mask, plan, size)


def _shifted(x: Tensor, plan: WindowPlan) -> Tensor:
    return x if plan.shift == (0, 0) else x.roll((-plan.shift[0], -plan.shift[1]), (1, 2))


def window_regions(size: Grid, plan: WindowPlan, device: torch.device) -> Tensor:
    """Which part of the unshifted map each token of a shifted window comes from → (windows, window tokens) integers.

    A cyclic shift brings opposite borders into one window; three bands an axis tell them apart.
    """
    bands = []
    for length, window, shift in zip(size, plan.window, plan.shift, strict=True):
        padded = length + -length % window
        position = torch.arange(padded, device=device)
        if shift == 0:
            bands.append(torch.zeros_like(position))
        else:
            bands.append((position >= padded - window).long() + (position >= padded - shift).long())
    regions = 3 * bands[0][:, None] + bands[1][None, :]
    return _cut(regions[None, :, :, None], plan.window)[..., 0]
