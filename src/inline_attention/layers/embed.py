"""Patch embedding as a matrix product, and position embeddings for maps of any size."""

from torch import Tensor, nn
from torch.nn import functional as F

from .windows import Grid, ceil_div, is_equal


def resize_map(x: Tensor, size: Grid, *, mode: str) -> Tensor:
    """A learned map (B, H, W, C) at another size, without antialiasing."""
    if all(is_equal(new, old) for new, old in zip(size, x.shape[1:3], strict=True)):
        return x
    return F.interpolate(x.permute(0, 3, 1, 2), size=size, mode=mode, align_corners=False).permute(0, 2, 3, 1)


class PatchEmbed(nn.Module):
    """Patches of an image or of a feature map, projected: a convolution whose stride is its kernel.

    Computed as a matrix product, for which GPUs have better kernels than for the convolution; the parameters are those
    of the convolution. Sides that are no multiple of the patch are zero-padded at the bottom and right.

    (B, in_chans, H, W), of any strides → (B, ceil(H / patch), ceil(W / patch), dim)
    """

    def __init__(self, patch_size: int, in_chans: int, dim: int, *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size)
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) → a map (B, ⌈H/patch⌉, ⌈W/patch⌉, C)"""
        patch = self.patch_size
        rows, columns = (ceil_div(size, patch) for size in x.shape[2:])
        x = pad_image(x, patch).reshape(x.shape[0], x.shape[1], rows, patch, columns, patch)
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return self.norm(F.linear(x, self.proj.weight.flatten(1), self.proj.bias))


def pad_image(x: Tensor, multiple: int) -> Tensor:
    """Zeros at the bottom and right of an image (B, C, H, W) until each side is a multiple."""
    bottom, right = (ceil_div(size, multiple) * multiple - size for size in x.shape[2:])
    return x if is_equal(bottom, 0) and is_equal(right, 0) else F.pad(x, (0, right, 0, bottom))
