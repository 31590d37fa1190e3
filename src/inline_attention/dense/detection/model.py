"""Mask R-CNN and Cascade Mask R-CNN on a pyramid of any backbone."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from inline_attention.dense.detection.boxes import Size
from inline_attention.dense.detection.roi_heads import CASCADE, MASK_RCNN, Detections, RoIHeads
from inline_attention.dense.detection.rpn import Losses, RegionProposals, Targets

HEADS = {"mask_rcnn": MASK_RCNN, "cascade_mask_rcnn": CASCADE}
CHANNELS = 256  # of the pyramid


class Detector(nn.Module):
    """A backbone, a feature pyramid, proposals, and heads on them.

    Args:
        backbone: images (B, in_chans, H, W) → four maps at strides 4, 8, 16, 32, with their `channels`.
        head: "mask_rcnn" or "cascade_mask_rcnn".
        num_classes: of objects; the background comes besides.
    """

    def __init__(self, backbone: nn.Module, *, head: str, num_classes: int) -> None:
        super().__init__()
        if head not in HEADS:
            raise ValueError(f"there is no detection head {head!r}; expected one of {', '.join(HEADS)}")
        self.backbone, self.num_classes = backbone, num_classes
        self.pyramid = FeaturePyramidNetwork(list(backbone.channels), CHANNELS, extra_blocks=LastLevelMaxPool())
        self.proposals = RegionProposals(CHANNELS)
        self.heads = RoIHeads(CHANNELS, num_classes=num_classes, stages=HEADS[head])

    def forward(
        self,
        images: Tensor,
        sizes: Sequence[Size] | None = None,
        targets: Targets | None = None,
        keys: Tensor | None = None,
    ) -> Losses | list[Detections]:
        """Losses where there are targets, else what is found in each image.

        images: (B, in_chans, H, W), normalised; sizes: of each image without padding below and on the right (None:
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
        """Maps (B, 256, H/s, W/s) at strides 4, 8, 16, 32 and 64"""
        maps = self.backbone(images)
        return list(self.pyramid(OrderedDict((str(level), x) for level, x in enumerate(maps))).values())
