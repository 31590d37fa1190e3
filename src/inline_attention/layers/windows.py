"""Windows of any size over maps of any size, shifted cyclically and padded at the bottom and right."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from inline_attention.ops import Grid

from .padding import Padding, sizes_on_map


def is_equal(a: int, b: int) -> bool:
    """Whether two sizes are known to be equal. False for a symbolic size, so that a graph keeps the general path.

    A plain comparison would specialise the graph. torch.jit.trace records a single size, so it gets the plain one.
    """
    return bool(a == b) if torch.jit.is_tracing() else statically_known_true(a == b)


def ceil_div(n: int, divisor: int) -> int:
    """⌈n / divisor⌉, written with a positive dividend, which symbolic sizes require"""
    return (n + divisor - 1) // divisor


def pad_bottom_right(x: Tensor, bottom: int, right: int) -> Tensor:
    """Adds zeros to a map (B, H, W, C), or crops it if a number is negative. A cropped map is contiguous."""
    return x if is_equal(bottom, 0) and is_equal(right, 0) else F.pad(x, (0, 0, 0, right, 0, bottom))


def pad_to_multiple(x: Tensor, multiple: Grid) -> Tensor:
    """Zeros at the bottom and right of a map (B, H, W, C) until each side is a multiple."""
    bottom, right = (ceil_div(size, m) * m - size for size, m in zip(x.shape[1:3], multiple, strict=True))
    return pad_bottom_right(x, bottom, right)


class WindowPlan(NamedTuple):
    """How a map is cut into windows. Each field has a value for height and one for width."""

    size: Grid
    window: Grid
    counts: Grid
    shift: Grid

    @classmethod
    def fit(cls, size: Grid, window: Grid | None, *, shifted: bool) -> "WindowPlan":
        """On each axis a window no smaller than the map is clipped to it and not shifted. None is the whole map."""
        axes = []
        for length, side in zip(size, window or size, strict=True):
            if side < length:
                axes.append((side, ceil_div(length, side), side // 2 if shifted else 0))
            else:
                axes.append((length, 1, 0))
        rows, columns = axes
        return cls(size, *zip(rows, columns, strict=True))

    # A method: torch.compile before 2.10 does not know properties of named tuples.
    def padding(self) -> Grid:
        """Rows and columns of padding that complete the last windows"""
        bottom, right = (n * w - size for size, w, n in zip(self.size, self.window, self.counts, strict=True))
        return bottom, right

    def pad_and_shift(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """A map (B, H, W, C) completed to whole windows. With `sizes` each image is shifted as it would be alone."""
        x = pad_bottom_right(x, *self.padding())
        if self.shift == (0, 0):
            return x
        return x.roll((-self.shift[0], -self.shift[1]), (1, 2)) if sizes is None else self._roll_own(x, sizes, 1)

    def own_shift(self, axis: int, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Along one axis, for images whose own part of the map is of these sizes (B, 2): windows and shift, (B,) each.

        An image that is no larger than a window is not shifted.
        """
        own = sizes[:, axis]
        return sizes_on_map(own, self.window[axis]), self.shift[axis] * (own > self.window[axis])

    def _roll_own(self, x: Tensor, sizes: Tensor, direction: int) -> Tensor:
        """Each image's own windows, rolled by its own shift. What lies beyond them is not moved."""
        orders = []
        for axis, (count, window) in enumerate(zip(self.counts, self.window, strict=True)):
            position = torch.arange(count * window, device=x.device)
            own_count, shift = (n[:, None] for n in self.own_shift(axis, sizes))
            period = own_count * window
            orders.append(torch.where(position < period, (position + direction * shift) % period, position))
        rows, columns = orders
        images = torch.arange(x.shape[0], device=x.device)
        return x[images[:, None, None], rows[:, :, None], columns[:, None, :]]

    def cut(self, x: Tensor) -> Tensor:
        """A padded map (B, H, W, C) → (B·windows, window tokens, C)"""
        (rows, columns), (height, width) = self.counts, self.window
        x = x.reshape(x.shape[0], rows, height, columns, width, x.shape[-1]).transpose(2, 3)
        return x.reshape(x.shape[0] * rows * columns, height * width, x.shape[-1])

    def merge(self, tokens: Tensor, *, batch: int, sizes: Tensor | None = None) -> Tensor:
        """Windows (B·windows, window tokens, C) → the map (B, H, W, C), with the shift undone and without padding"""
        (rows, columns), (height, width) = self.counts, self.window
        channels = tokens.shape[-1]
        x = tokens.reshape(batch, rows, columns, height, width, channels).transpose(2, 3)
        x = x.reshape(batch, rows * height, columns * width, channels)
        if self.shift != (0, 0):
            x = x.roll(self.shift, (1, 2)) if sizes is None else self._roll_own(x, sizes, -1)
        bottom, right = self.padding()
        return pad_bottom_right(x, -bottom, -right)


class Windows(NamedTuple):
    tokens: Tensor  # (B·windows, window tokens, C), image by image
    token_mask: Tensor | None  # (B·windows, window tokens) bool, False on padding; None without padding


def to_windows(x: Tensor, plan: WindowPlan, padding: Padding | None = None) -> Windows:
    """Cuts a map (B, H, W, C), of a padded batch if `padding` is given."""
    if padding is not None:
        present = plan.pad_and_shift(padding.token_mask.unflatten(1, plan.size)[..., None], padding.sizes)
        return Windows(plan.cut(plan.pad_and_shift(x, padding.sizes)), plan.cut(present)[..., 0])
    token_mask = None
    if not all(is_equal(n, 0) for n in plan.padding()):
        present = plan.pad_and_shift(torch.ones((1, *plan.size, 1), dtype=torch.bool, device=x.device))
        token_mask = plan.cut(present)[..., 0].repeat(x.shape[0], 1)
    return Windows(plan.cut(plan.pad_and_shift(x)), token_mask)


def keys_to_attend(token_mask: Tensor) -> Tensor:
    """The mask (B, N) for a softmax over keys. A row without tokens gets all, because the softmax of nothing is NaN."""
    return token_mask | ~token_mask.any(1, keepdim=True)


def window_regions(plan: WindowPlan, device: torch.device, sizes: Tensor | None = None) -> Tensor:
    """The part of the unshifted map that each token of a shifted window comes from → (windows, window tokens) integers

    A cyclic shift brings opposite borders into one window. Three bands on each axis tell them apart. With the `sizes`
    (B, 2) of a padded batch each image has its own regions → (B·windows, window tokens).
    """
    bands = []
    for axis, (count, window, shift) in enumerate(zip(plan.counts, plan.window, plan.shift, strict=True)):
        position = torch.arange(count * window, device=device)
        if sizes is not None:
            own_count, own_shift = (n[:, None] for n in plan.own_shift(axis, sizes))
            begin = (own_count - 1) * window
            band = (position >= begin).long() + (position >= begin + window - own_shift).long()
            bands.append(band * (own_shift > 0))
        elif shift == 0:
            bands.append(torch.zeros_like(position)[None])
        else:
            last = (count - 1) * window
            bands.append(((position >= last).long() + (position >= last + window - shift).long())[None])
    regions = 3 * bands[0][:, :, None] + bands[1][:, None, :]
    return plan.cut(regions[..., None])[..., 0]
