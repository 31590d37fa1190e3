"""Mask R-CNN and Cascade Mask R-CNN on a pyramid of any backbone."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from inline_attention.dense.backbone import Backbone, create_backbone
from inline_attention.dense.detection.boxes import Size
from inline_attention.dense.detection.roi_heads import (
    CASCADE,
    MASK_RCNN,
    NORM_GROUPS,
    Detections,
    RoIHeads,
    StageSettings,
)
from inline_attention.dense.detection.rpn import Losses, RegionProposals, Targets

# name → (for people, stages)
HEADS: dict[str, tuple[str, tuple[StageSettings, ...]]] = {
    "mask_rcnn": ("Mask R-CNN", MASK_RCNN),
    "cascade_mask_rcnn": ("Cascade Mask R-CNN", CASCADE),
}


class Detector(nn.Module):
    """A backbone, a feature pyramid, proposals, and heads on them.

    Args:
        backbone: images (B, 3, H, W) → four maps at strides 4, 8, 16, 32.
        head: "mask_rcnn" or "cascade_mask_rcnn".
        num_classes: of objects; the background comes besides.
        channels: of the pyramid and of the heads' convolutions; their hidden layers are four times as wide.
        regions: how many of an image's a stage learns from.
    """

    def __init__(
        self, backbone: Backbone, *, head: str, num_classes: int, channels: int = 256, regions: int = 512
    ) -> None:
        super().__init__()
        if head not in HEADS:
            raise ValueError(f"head={head!r}; expected one of {', '.join(HEADS)}")
        if channels < 1 or channels % NORM_GROUPS:
            raise ValueError(f"channels={channels}; expected a multiple of {NORM_GROUPS}")
        if regions < 1:
            raise ValueError(f"regions={regions}; expected 1 or more")
        self.backbone, self.num_classes = backbone, num_classes
        self.pyramid = FeaturePyramidNetwork(list(backbone.channels), channels, extra_blocks=LastLevelMaxPool())
        self.proposals = RegionProposals(channels)
        self.heads = RoIHeads(channels, num_classes=num_classes, stages=HEADS[head][1], regions=regions)

    def forward(
        self,
        images: Tensor,
        sizes: Sequence[Size] | None = None,
        targets: Targets | None = None,
        keys: Tensor | None = None,
    ) -> Losses | list[Detections]:
        """Losses where there are targets, else what is found in each image.

        images: (B, 3, H, W), normalised; sizes: of each image without padding below and on the right (None:
        there is none). targets: see `Targets`. keys (B,) int64: the choice of regions to learn from is a function of
        them; None: random.
        """
        sizes = [(images.shape[2], images.shape[3])] * len(images) if sizes is None else sizes
        maps = self.extract(images)
        if targets is None:
            boxes, _ = self.proposals(maps, sizes)
            return self.heads(maps[:-1], boxes, sizes)
        if keys is None:
            keys = torch.randint(2**62, (len(images),), device=images.device)
        boxes, losses = self.proposals(maps, sizes, targets, keys)
        return losses | self.heads.losses(maps[:-1], boxes, sizes, targets, keys)

    def extract(self, images: Tensor) -> list[Tensor]:
        """Maps (B, channels, H/s, W/s) at strides 4, 8, 16, 32 and 64"""
        maps = self.backbone(images)
        return list(self.pyramid(OrderedDict((str(level), x) for level, x in enumerate(maps))).values())

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return self.backbone.group_matcher(prefix="backbone", coarse=coarse)

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


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
    """A registered backbone under a head.

    weights, drop_path, kwargs: of the backbone, see `create_backbone`. The others, and sizes (channels, regions): see
    `Detector`.
    """
    features = create_backbone(backbone, weights=weights, drop_path=drop_path, kwargs=kwargs)
    return Detector(features, head=head, num_classes=num_classes, **sizes)
