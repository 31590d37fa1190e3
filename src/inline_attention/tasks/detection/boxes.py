"""Regions of feature maps, masks inside regions, and the sampling of regions for training."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import roi_align

from inline_attention.layers.drop import scramble
from inline_attention.tasks.dense.backbone import STRIDES

Size = tuple[int, int]  # (height, width)


def in_full_precision(x: Tensor) -> Tensor:
    """At least float32. Half precision is too coarse for coordinates up to a thousand."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class PyramidAlign(nn.Module):
    """RoIAlign on the level that fits each box's size (FPN's equation 1).

    torchvision's MultiScaleRoIAlign shifts regions by half a pixel. It also guesses the strides from the first batch,
    which fails for small padded images.
    """

    def __init__(self, output_size: int) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, maps: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """maps (B, C, H/s, W/s) at `STRIDES`; boxes: for each image (n, 4) → (all boxes, C, output, output)"""
        rois = to_rois(boxes)
        # A box of 224² pixels belongs to stride 16 (level 2 of 0..3), one of half the side to stride 8, and so on.
        sides = ((rois[:, 3] - rois[:, 1]) * (rois[:, 4] - rois[:, 2])).clamp(min=0).sqrt()
        levels = torch.floor(2 + torch.log2(sides / 224 + 1e-6)).clamp(0, len(STRIDES) - 1)
        shape = (len(rois), maps[0].shape[1], self.output_size, self.output_size)
        pooled = maps[0].new_zeros(shape)
        for level, (features, stride) in enumerate(zip(maps, STRIDES, strict=True)):
            chosen = (levels == level).nonzero().squeeze(1)
            regions = roi_align(  # which takes regions and maps of one type
                in_full_precision(features), rois[chosen], self.output_size, spatial_scale=1 / stride, aligned=True
            )
            pooled.index_copy_(0, chosen, regions.to(pooled.dtype))
        return pooled


def to_rois(boxes: Sequence[Tensor]) -> Tensor:
    """For each image (n, 4) → (all boxes, 5), the number of the image first"""
    images = image_numbers(boxes).to(boxes[0].dtype)
    return torch.cat([images.unsqueeze(1), torch.cat(list(boxes))], dim=1)


def image_numbers(rows: Sequence[Tensor]) -> Tensor:
    """For each image n rows → (all rows,) int64, the number of each row's image"""
    counts = torch.tensor([len(part) for part in rows], device=rows[0].device)
    return torch.arange(len(rows), device=counts.device).repeat_interleave(counts)


def mask_targets(masks: Tensor, boxes: Tensor, matched: Tensor, *, side: int) -> Tensor:
    """The targets of a mask head: masks (objects, H, W) uint8, boxes (n, 4), their objects (n,) → (n, side, side)"""
    rois = torch.cat([matched.to(boxes.dtype).unsqueeze(1), boxes], dim=1)
    return roi_align(masks.unsqueeze(1).to(boxes.dtype), rois, side, aligned=True).squeeze(1)


def paste_masks(masks: Tensor, boxes: Tensor, size: Size) -> Tensor:
    """Probabilities (n, M, M) inside boxes (n, 4) → bool (n, height, width), True where they are at least 0.5"""
    x0, y0, x1, y1 = (side.unsqueeze(1) for side in boxes.unbind(1))
    rows, columns = (torch.arange(side, device=boxes.device) + 0.5 for side in size)
    # From image coordinates to grid_sample's, −1 to 1 from edge to edge of the box.
    x = (columns - x0) / (x1 - x0).clamp(min=1e-6) * 2 - 1
    y = (rows - y0) / (y1 - y0).clamp(min=1e-6) * 2 - 1
    shape = (len(masks), *size)
    grid = torch.stack([x.unsqueeze(1).expand(shape), y.unsqueeze(2).expand(shape)], dim=3)
    return F.grid_sample(masks.unsqueeze(1), grid, align_corners=False).squeeze(1) >= 0.5


class KeyedSampler:
    """Samples positive and negative candidates. The choice depends only on the image's key.

    Args:
        count: number of candidates to choose.
        positive_share: largest share of positive ones.
        place: a different number for each sampler of a model, so that their choices differ.
    """

    def __init__(self, count: int, *, positive_share: float, place: int) -> None:
        self.count, self.max_positive, self.place = count, int(count * positive_share), place

    def __call__(self, labels: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """labels (n,): positive above 0, negative at 0, ignored below; key () int64 → indices of both"""
        key = key + self.place
        mixed = scramble(scramble(key) ^ scramble(key >> 32))
        # `scramble` is a bijection, so no two candidates have the same priority.
        priority = scramble(torch.arange(len(labels), device=labels.device) ^ mixed)
        positive = self._first(labels > 0, priority, self.max_positive)
        negative = self._first(labels == 0, priority, self.count - len(positive))
        return positive, negative

    @staticmethod
    def _first(candidates: Tensor, priority: Tensor, count: int) -> Tensor:
        indices = candidates.nonzero().squeeze(1)
        return indices[priority[indices].topk(min(count, len(indices)), largest=False).indices]


def mean_over_images(values: Tensor, images: Tensor, counts: Tensor) -> Tensor:
    """Sum `values` (rows,) within each image, divide by the image's entry of `counts` (B,), and average over images.

    images (rows,) is the image of each row. Every image has the same weight, so the gradient over several ranks is the
    mean of the ranks' gradients.
    """
    return (values / counts.clamp(min=1)[images]).sum() / len(counts)
