"""Patch embedding as a matrix product, and position embeddings for maps of any size."""

from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.ops import Grid

from .windows import ceil_div, is_equal


def resize_map(x: Tensor, size: Grid, *, mode: str) -> Tensor:
    """A learned map (B, H, W, C) interpolated to another size, without antialiasing"""
    if all(is_equal(new, old) for new, old in zip(size, x.shape[1:3], strict=True)):
        return x
    if x.is_meta:  # only the shape is asked for, and torch's bicubic interpolation takes 0.1 s on this device
        return x.new_empty(x.shape[0], *size, x.shape[3])
    return F.interpolate(x.permute(0, 3, 1, 2), size=size, mode=mode, align_corners=False).permute(0, 2, 3, 1)


def with_value(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter that holds a copy of the value, and is trained or frozen as the given one is.

    The parameter itself if it is the value: an optimizer that holds it still trains it.
    """
    if value is parameter:
        return parameter
    return nn.Parameter(value.detach().clone(), requires_grad=parameter.requires_grad)


class PatchConv2d(nn.Conv2d):
    """A convolution whose stride is its kernel, computed as a matrix product, for which GPUs have faster kernels.

    (B, in_channels, H, W), of any strides → (B, out_channels, H / patch, W / patch), channels last in memory. As in any
    convolution, rows and columns that fill no patch are left out.
    """

    def __init__(self, in_channels: int, out_channels: int, patch_size: int) -> None:
        super().__init__(in_channels, out_channels, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        patch = self.kernel_size[0]
        batch, channels, height, width = x.shape
        rows, columns = height // patch, width // patch
        if not (is_equal(rows * patch, height) and is_equal(columns * patch, width)):
            x = x[:, :, : rows * patch, : columns * patch]
        x = x.reshape(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(x, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


@register_notrace_module
class PatchEmbed(nn.Module):
    """Patches of an image or of a feature map, projected and normed.

    Sides that are no multiple of the patch are zero-padded at the bottom and right.
    """

    def __init__(self, patch_size: int, in_chans: int, dim: int, *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = PatchConv2d(in_chans, dim, patch_size)
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W), of any strides → a map (B, ⌈H/patch⌉, ⌈W/patch⌉, dim)"""
        return self.norm(self.proj(pad_image(x, self.patch_size)).permute(0, 2, 3, 1))


def pad_image(x: Tensor, multiple: int) -> Tensor:
    """Zeros at the bottom and right of an image (B, C, H, W) until each side is a multiple."""
    bottom, right = (ceil_div(size, multiple) * multiple - size for size in x.shape[2:])
    return x if is_equal(bottom, 0) and is_equal(right, 0) else F.pad(x, (0, right, 0, bottom))
