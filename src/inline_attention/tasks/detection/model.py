"""Faster R-CNN, Mask R-CNN and their cascades on the feature pyramid of a backbone."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from inline_attention.layers.padding import repeat_border, sizes_on_map, zero_padding
from inline_attention.tasks.dense.backbone import STRIDES, Backbone, HeadedModel, create_backbone
from inline_attention.tasks.detection.boxes import Size
from inline_attention.tasks.detection.roi_heads import (
    CASCADE,
    NORM_GROUPS,
    SINGLE,
    Detections,
    RoIHeads,
    StageSettings,
)
from inline_attention.tasks.detection.rpn import Losses, RegionProposals, Targets

# name → (title, stages, whether it has mask heads)
HEADS: dict[str, tuple[str, tuple[StageSettings, ...], bool]] = {
    "faster_rcnn": ("Faster R-CNN", SINGLE, False),
    "cascade_rcnn": ("Cascade R-CNN", CASCADE, False),
    "mask_rcnn": ("Mask R-CNN", SINGLE, True),
    "cascade_mask_rcnn": ("Cascade Mask R-CNN", CASCADE, True),
}


def has_masks(head: str) -> bool:
    """Whether a detector with this head learns and predicts masks"""
    return HEADS[head][2]


class Pyramid(FeaturePyramidNetwork):
    """torchvision's feature pyramid, with a fifth level and support for padded images."""

    def __init__(self, in_channels: Sequence[int], channels: int) -> None:
        super().__init__(list(in_channels), channels, extra_blocks=LastLevelMaxPool())

    def forward(self, x: dict[str, Tensor], sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Maps at strides 4, 8, 16, 32 → maps of `channels` channels at strides 4, 8, 16, 32 and 64

        sizes (B, 2): of padded images. Maps are set to zero beyond them before and after each convolution.
        """
        if sizes is None:
            return super().forward(x)
        own = [sizes_on_map(sizes, stride) for stride in STRIDES]
        inner = [block(features) for block, features in zip(self.inner_blocks, x.values(), strict=True)]
        for fine in reversed(range(len(inner) - 1)):
            # Nearest neighbours do not depend on padding: a side is doubled, or doubled minus one.
            inner[fine] = inner[fine] + F.interpolate(inner[fine + 1], inner[fine].shape[2:], mode="nearest")
        maps = [
            zero_padding(block(zero_padding(features, o, channels="first")), o, channels="first")
            for block, features, o in zip(self.layer_blocks, inner, own, strict=True)
        ]
        assert self.extra_blocks is not None
        maps, names = self.extra_blocks(maps, list(x.values()), list(x))
        return OrderedDict(zip(names, maps, strict=True))


@torch.compiler.disable  # a compiled graph would hold for the sizes of one batch only
def padded_sizes(images: Tensor, sizes: Sequence[Size]) -> Tensor | None:
    """The sizes on the device of the images (B, 3, H, W). None: no image is padded."""
    canvas = (images.shape[2], images.shape[3])
    if len(sizes) != len(images) or any(
        not 1 <= n <= most for size in sizes for n, most in zip(size, canvas, strict=True)
    ):
        raise ValueError(f"sizes={list(sizes)}; expected a (height, width) within {canvas} for {len(images)} images")
    if all(tuple(size) == canvas for size in sizes):
        return None
    on_gpu = images.device.type == "cuda"
    return torch.tensor(sizes, pin_memory=on_gpu).to(images.device, non_blocking=on_gpu)


class Detector(HeadedModel):
    """A backbone, a feature pyramid, proposals, and heads on them.

    Args:
        backbone: images (B, 3, H, W) → four maps at strides 4, 8, 16, 32.
        head: "faster_rcnn", "cascade_rcnn", "mask_rcnn" or "cascade_mask_rcnn".
        num_classes: classes of objects, without the background.
        channels: of the pyramid and of the convolutions in the heads. Their hidden layers are four times as wide.
        regions: number of regions of an image that each stage learns from.
    """

    def __init__(
        self, backbone: Backbone, *, head: str, num_classes: int, channels: int = 256, regions: int = 512
    ) -> None:
        super().__init__(backbone)
        if head not in HEADS:
            raise ValueError(f"head={head!r}; expected one of {', '.join(HEADS)}")
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes}; expected 1 or more")
        if channels < 1 or channels % NORM_GROUPS:
            raise ValueError(f"channels={channels}; expected a multiple of {NORM_GROUPS}")
        if regions < 1:
            raise ValueError(f"regions={regions}; expected 1 or more")
        self.num_classes, self.has_masks = num_classes, has_masks(head)
        self.pyramid = Pyramid(backbone.channels, channels)
        self.proposals = RegionProposals(channels)
        stages = HEADS[head][1]
        self.heads = RoIHeads(channels, num_classes=num_classes, stages=stages, masks=self.has_masks, regions=regions)

    def forward(
        self,
        images: Tensor,
        sizes: Sequence[Size] | None = None,
        targets: Targets | None = None,
        keys: Tensor | None = None,
    ) -> Losses | list[Detections]:
        """Losses if there are targets, otherwise the detections in each image.

        Args:
            images: (B, 3, H, W), normalised, padded at the bottom and right.
            sizes: (height, width) of each image without its padding; None if there is none. A padded image gets the
                same result as the image alone.
            targets: see `Targets`.
            keys: (B,) int64, seeds for choosing the regions to learn from. None: a random choice.
        """
        own = None if sizes is None else padded_sizes(images, sizes)
        sizes = [(images.shape[2], images.shape[3])] * len(images) if sizes is None else sizes
        maps = self.extract(images, own)
        if targets is not None and keys is None:
            keys = torch.randint(2**62, (len(images),), device=images.device)
        boxes, losses = self.proposals(maps, sizes, targets, keys)
        pooled = maps[:-1]
        if own is not None:
            pooled = [repeat_border(x, sizes_on_map(own, stride)) for x, stride in zip(pooled, STRIDES, strict=True)]
        if targets is None:
            return self.heads(pooled, boxes, sizes)
        return losses | self.heads.losses(pooled, boxes, sizes, targets, keys)

    def extract(self, images: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        """Maps (B, channels, H/s, W/s) at strides 4, 8, 16, 32 and 64; sizes (B, 2): of padded images"""
        maps = OrderedDict((str(level), x) for level, x in enumerate(self.backbone(images, sizes)))
        return list(self.pyramid(maps, sizes).values())


def create_detector(
    backbone: str,
    head: str = "mask_rcnn",
    *,
    num_classes: int,
    weights: str | None = None,
    drop_path: float | None = None,
    kwargs: dict[str, Any] | None = None,
    **sizes: int,
) -> Detector:
    """Build a detector on a registered backbone.

    `weights`, `drop_path` and `kwargs` are those of `create_backbone`, all others those of `Detector`.
    """
    features = create_backbone(backbone, weights=weights, drop_path=drop_path, kwargs=kwargs)
    return Detector(features, head=head, num_classes=num_classes, **sizes)
