"""Segmentation heads on maps (B, C, H, W) at strides 4, 8, 16 and 32: UperNet, Semantic FPN, and an auxiliary FCN.

UperNet: "Unified Perceptual Parsing for Scene Understanding", arXiv 1807.10221.
Semantic FPN: "Panoptic Feature Pyramid Networks", arXiv 1901.02446.

In a batch of padded images, `sizes` (B, 2) are the true (height, width) of each. An image gets the same result as if it
were alone: maps are zero beyond its border, and pooling, resizing and batch norm use only its own part of a map.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.layers.drop import ChannelDrop
from inline_attention.layers.padding import own_positions, resize_weights, sizes_on_map, zero_padding
from inline_attention.ops.reference import accumulation_dtype, without_autocast
from inline_attention.tasks.dense.backbone import STRIDES
from inline_attention.tasks.segmentation.norm import BatchNorm

Own = Tensor | None  # (B, 2): rows and columns of each image's own part of a map; None: no image is padded


def own_levels(sizes: Tensor | None, strides: Sequence[int] = STRIDES) -> list[Own]:
    """Each image's own part of the maps at these strides, for images of these sizes"""
    return [None if sizes is None else sizes_on_map(sizes, stride) for stride in strides]


class ConvNormAct(nn.Sequential):
    """Convolution that keeps the size, batch norm, ReLU"""

    def __init__(self, in_dim: int, dim: int, kernel: int) -> None:
        if min(in_dim, dim) < 1:
            raise ValueError(f"a convolution from {in_dim} to {dim} channels: set dim and pyramid_dim to 1 or more")
        conv = nn.Conv2d(in_dim, dim, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        super().__init__(conv, BatchNorm(dim), nn.ReLU())

    def forward(self, x: Tensor, own: Own = None) -> Tensor:
        """(B, in_dim, H, W) → (B, dim, H, W), zero beyond each image's own part"""
        if own is None:
            return super().forward(x)
        conv, norm, activation = self
        present = own_positions(own, (x.shape[2], x.shape[3]))[:, None]
        return activation(norm(conv(x), present)).masked_fill(~present, 0)


class PixelClassifier(nn.Sequential):
    """Dropout of channels, then a 1×1 convolution to the classes"""

    def __init__(self, dim: int, num_classes: int, *, drop: float) -> None:
        conv = nn.Conv2d(dim, num_classes, 1)
        nn.init.normal_(conv.weight, std=0.01)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        super().__init__(ChannelDrop(drop, dim), conv)


def resize(x: Tensor, size: Sequence[int], *, own: Own = None, new_own: Own = None) -> Tensor:
    """(B, C, H, W) → (B, C, *size), bilinear

    own, new_own: each image's own part of x and of the result, which is zero beyond it.
    """
    if own is None or new_own is None:
        return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
    weights = [
        resize_weights(
            own[:, axis],
            new_own[:, axis],
            (x.shape[2 + axis], size[axis]),
            mode="bilinear",
            dtype=accumulation_dtype(x.dtype),
        )
        for axis in range(2)
    ]
    return _resampled(x, *weights)


def to_pixels(logits: Tensor, size: Sequence[int], *, sizes: Tensor | None = None, stride: int = STRIDES[0]) -> Tensor:
    """Logits (B, classes, h, w) at a stride → (B, classes, *size), in at least float32

    sizes (B, 2): of padded images.
    """
    (own,) = own_levels(sizes, [stride])
    return resize(logits.to(accumulation_dtype(logits.dtype)), size, own=own, new_own=sizes)


def pool_cells(x: Tensor, cells: int, *, own: Own = None) -> Tensor:
    """The means of cells × cells parts of each image: (B, C, H, W) → (B, C, cells, cells)"""
    if own is None:
        return F.adaptive_avg_pool2d(x, cells)
    cell = torch.arange(cells, device=x.device)
    weights = []
    for axis in range(2):
        length = own[:, axis, None]
        begin, end = cell * length // cells, ((cell + 1) * length + cells - 1) // cells  # (B, cells), as in torch
        position = torch.arange(x.shape[2 + axis], device=x.device)
        inside = (position >= begin[..., None]) & (position < end[..., None])
        weights.append(inside / (end - begin)[..., None].to(accumulation_dtype(x.dtype)))
    return _resampled(x, *weights)


def _resampled(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, C, H, W) → (B, C, h, w) by the weights (B, h, H) and (B, w, W). Autocast does not lower the precision."""
    with without_autocast(x.device):
        return torch.einsum("bih,bchw,bjw->bcij", rows, x.to(rows.dtype), columns).to(x.dtype)


class PyramidPooling(nn.Module):
    """Concatenates the map with its averages over 1×1, 2×2, 3×3 and 6×6 cells: (B, C, H, W) → (B, dim, H, W)"""

    def __init__(self, in_dim: int, dim: int, *, cells: Sequence[int] = (1, 2, 3, 6)) -> None:
        super().__init__()
        self.cells = tuple(cells)
        self.projections = nn.ModuleList(ConvNormAct(in_dim, dim, 1) for _ in cells)
        self.bottleneck = ConvNormAct(in_dim + len(self.cells) * dim, dim, 3)

    def forward(self, x: Tensor, own: Own = None) -> Tensor:
        pooled = []
        for cells, projection in zip(self.cells, self.projections, strict=True):
            all_cells = None if own is None else torch.full_like(own, cells)
            means = projection(pool_cells(x, cells, own=own))
            pooled.append(resize(means, x.shape[2:], own=all_cells, new_own=own))
        return self.bottleneck(torch.cat([x, *pooled], dim=1), own)


class UperNet(nn.Module):
    """Pyramid pooling on the coarsest map, a top-down pyramid, and all levels fused at stride 4.

    maps → logits (B, num_classes, H / 4, W / 4)
    """

    def __init__(self, channels: Sequence[int], num_classes: int, *, dim: int = 512, drop: float = 0.1) -> None:
        super().__init__()
        self.pooling = PyramidPooling(channels[-1], dim)
        self.laterals = nn.ModuleList(ConvNormAct(in_dim, dim, 1) for in_dim in channels[:-1])
        self.smoothings = nn.ModuleList(ConvNormAct(dim, dim, 3) for _ in channels[:-1])
        self.fusion = ConvNormAct(len(channels) * dim, dim, 3)
        self.classifier = PixelClassifier(dim, num_classes, drop=drop)

    def forward(self, maps: list[Tensor], sizes: Tensor | None = None) -> Tensor:
        own = own_levels(sizes)
        levels = [lateral(x, o) for lateral, x, o in zip(self.laterals, maps[:-1], own[:-1], strict=True)]
        levels.append(self.pooling(maps[-1], own[-1]))
        for fine in reversed(range(len(levels) - 1)):
            coarse = resize(levels[fine + 1], levels[fine].shape[2:], own=own[fine + 1], new_own=own[fine])
            levels[fine] = levels[fine] + coarse
        levels[:-1] = [smooth(x, o) for smooth, x, o in zip(self.smoothings, levels[:-1], own[:-1], strict=True)]
        finest = levels[0].shape[2:]
        enlarged = [resize(x, finest, own=o, new_own=own[0]) for x, o in zip(levels[1:], own[1:], strict=True)]
        return self.classifier(self.fusion(torch.cat([levels[0], *enlarged], dim=1), own[0]))


class SemanticFPN(nn.Module):
    """A feature pyramid. Convolutions and doublings bring its levels to stride 4, where they are added.

    maps → logits (B, num_classes, H / 4, W / 4)
    """

    def __init__(
        self, channels: Sequence[int], num_classes: int, *, pyramid_dim: int = 256, dim: int = 128, drop: float = 0.1
    ) -> None:
        super().__init__()
        self.laterals = nn.ModuleList(nn.Conv2d(in_dim, pyramid_dim, 1) for in_dim in channels)
        self.smoothings = nn.ModuleList(nn.Conv2d(pyramid_dim, pyramid_dim, 3, padding=1) for _ in channels)
        for conv in (*self.laterals, *self.smoothings):
            nn.init.xavier_uniform_(conv.weight)
            nn.init.zeros_(conv.bias)
        doublings = [round(math.log2(stride / STRIDES[0])) for stride in STRIDES]
        self.refinements = nn.ModuleList(
            nn.ModuleList(ConvNormAct(dim if i else pyramid_dim, dim, 3) for i in range(max(1, count)))
            for count in doublings
        )
        self.classifier = PixelClassifier(dim, num_classes, drop=drop)

    def forward(self, maps: list[Tensor], sizes: Tensor | None = None) -> Tensor:
        own = own_levels(sizes)
        levels = [lateral(x) for lateral, x in zip(self.laterals, maps, strict=True)]
        for fine in reversed(range(len(levels) - 1)):
            # Nearest neighbours do not depend on padding: a side is doubled, or doubled minus one.
            levels[fine] = levels[fine] + F.interpolate(levels[fine + 1], levels[fine].shape[2:], mode="nearest")
        smooth = [
            zero_padding(smoothing(zero_padding(x, o, channels="first")), o, channels="first")
            for smoothing, x, o in zip(self.smoothings, levels, own, strict=True)
        ]
        refined = [self._refine(level, smooth, own) for level in range(len(smooth))]
        return self.classifier(torch.stack(refined).sum(0))

    def _refine(self, level: int, levels: list[Tensor], own: list[Own]) -> Tensor:
        """Alternate convolutions and enlargements, each to the size of the next finer level."""
        x = levels[level]
        convs = self.refinements[level]
        assert isinstance(convs, nn.ModuleList)
        for i, conv in enumerate(convs):
            x = conv(x, own[level - i])
            if level > 0:
                finer = level - 1 - i
                x = resize(x, levels[finer].shape[2:], own=own[finer + 1], new_own=own[finer])
        return x


class FCNHead(nn.Module):
    """One convolution and a classifier: the auxiliary head on a single map."""

    def __init__(self, in_dim: int, num_classes: int, *, dim: int = 256, drop: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormAct(in_dim, dim, 3)
        self.classifier = PixelClassifier(dim, num_classes, drop=drop)

    def forward(self, x: Tensor, own: Own = None) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes, H, W)"""
        return self.classifier(self.conv(x, own))
