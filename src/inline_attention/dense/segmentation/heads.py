"""Segmentation heads on maps (B, C, H, W) at strides 4, 8, 16 and 32: UperNet, Semantic FPN, and an auxiliary FCN.

UperNet: "Unified Perceptual Parsing for Scene Understanding", arXiv 1807.10221.
Semantic FPN: "Panoptic Feature Pyramid Networks", arXiv 1901.02446.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.dense.backbone import STRIDES
from inline_attention.dense.norm import BatchNorm
from inline_attention.layers.drop import ChannelDrop


class ConvNormAct(nn.Sequential):
    """Convolution that keeps the size, batch norm, ReLU"""

    def __init__(self, in_dim: int, dim: int, kernel: int) -> None:
        conv = nn.Conv2d(in_dim, dim, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        super().__init__(conv, BatchNorm(dim), nn.ReLU())


class PixelClassifier(nn.Sequential):
    """Dropout of channels, then a 1×1 convolution to the classes"""

    def __init__(self, dim: int, num_classes: int, *, drop: float) -> None:
        conv = nn.Conv2d(dim, num_classes, 1)
        nn.init.normal_(conv.weight, std=0.01)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]  # a convolution with a bias has one
        super().__init__(ChannelDrop(drop, dim), conv)


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    """(B, C, H, W) → (B, C, *size), bilinear"""
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


def repeat(x: Tensor, size: Sequence[int]) -> Tensor:
    """(B, C, H, W) → (B, C, *size), the nearest value"""
    return F.interpolate(x, size=tuple(size), mode="nearest")


class PyramidPooling(nn.Module):
    """The map beside itself averaged over 1×1, 2×2, 3×3 and 6×6 cells: (B, C, H, W) → (B, dim, H, W)"""

    def __init__(self, in_dim: int, dim: int, *, cells: Sequence[int] = (1, 2, 3, 6)) -> None:
        super().__init__()
        self.cells = tuple(cells)
        self.projections = nn.ModuleList(ConvNormAct(in_dim, dim, 1) for _ in cells)
        self.bottleneck = ConvNormAct(in_dim + len(self.cells) * dim, dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [
            resize(projection(F.adaptive_avg_pool2d(x, cells)), x.shape[2:])
            for cells, projection in zip(self.cells, self.projections, strict=True)
        ]
        return self.bottleneck(torch.cat([x, *pooled], dim=1))


def add_downwards(laterals: list[Tensor], enlarge: Callable[[Tensor, Sequence[int]], Tensor]) -> list[Tensor]:
    """Each map of a pyramid plus the sum of all coarser ones; fine to coarse."""
    sums = [laterals[-1]]
    for lateral in reversed(laterals[:-1]):
        sums.append(lateral + enlarge(sums[-1], lateral.shape[2:]))
    return sums[::-1]


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

    def forward(self, maps: list[Tensor]) -> Tensor:
        laterals = [lateral(x) for lateral, x in zip(self.laterals, maps[:-1], strict=True)]
        *fine, coarsest = add_downwards([*laterals, self.pooling(maps[-1])], resize)
        levels = [smoothing(x) for smoothing, x in zip(self.smoothings, fine, strict=True)] + [coarsest]
        finest = levels[0].shape[2:]
        fused = torch.cat([levels[0], *(resize(x, finest) for x in levels[1:])], dim=1)
        return self.classifier(self.fusion(fused))


class SemanticFPN(nn.Module):
    """A feature pyramid whose levels are brought to stride 4 by convolutions and doublings, and added.

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

    def forward(self, maps: list[Tensor]) -> Tensor:
        laterals = [lateral(x) for lateral, x in zip(self.laterals, maps, strict=True)]
        sums = add_downwards(laterals, repeat)
        levels = [smoothing(x) for smoothing, x in zip(self.smoothings, sums, strict=True)]
        refined = [self._refine(level, levels) for level in range(len(levels))]
        return self.classifier(torch.stack(refined).sum(0))

    def _refine(self, level: int, levels: list[Tensor]) -> Tensor:
        """Convolution and doubling in turn; a map is doubled to the size of the next finer level, odd sides too."""
        x = levels[level]
        convs = self.refinements[level]
        assert isinstance(convs, nn.ModuleList)
        for i, conv in enumerate(convs):
            x = conv(x)
            if level > 0:
                x = resize(x, levels[level - 1 - i].shape[2:])
        return x


class FCNHead(nn.Module):
    """One convolution and a classifier: the auxiliary head on a single map."""

    def __init__(self, in_dim: int, num_classes: int, *, dim: int = 256, drop: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormAct(in_dim, dim, 3)
        self.classifier = PixelClassifier(dim, num_classes, drop=drop)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes, H, W)"""
        return self.classifier(self.conv(x))
