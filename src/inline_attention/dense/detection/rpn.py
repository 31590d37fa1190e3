"""Region proposals: torchvision's network, with losses that weigh images alike and strides that are known."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers

from inline_attention.dense.backbone import STRIDES
from inline_attention.dense.detection.boxes import KeyedSampler, Size

Targets = Sequence[dict[str, Tensor]]  # for each image: boxes (n, 4), labels (n,) from 1 on, masks (n, H, W) uint8
Losses = dict[str, Tensor]

_STRIDES = (*STRIDES, 64)  # one level more than regions are cut out of
_SIZES = tuple((8 * stride,) for stride in _STRIDES)
_RATIOS = ((0.5, 1.0, 2.0),) * len(_STRIDES)


class RegionProposals(RegionProposalNetwork):
    """Anchors of 8 strides a side in three shapes; 256 of an image's are learnt from, half of them positive at most."""

    def __init__(self, channels: int) -> None:
        anchors = AnchorGenerator(_SIZES, _RATIOS)
        super().__init__(
            anchors,
            RPNHead(channels, anchors.num_anchors_per_location()[0]),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n=dict(training=2000, testing=1000),
            post_nms_top_n=dict(training=1000, testing=1000),
            nms_thresh=0.7,
        )
        self.fg_bg_sampler = KeyedSampler(256, positive_share=0.5, place=0)

    @torch.compiler.disable  # shapes depend on what is found
    def forward(
        self, maps: Sequence[Tensor], sizes: Sequence[Size], targets: Targets | None = None, keys: Tensor | None = None
    ) -> tuple[list[Tensor], Losses]:
        """maps (B, C, H/s, W/s) at strides 4 to 64; sizes: of the images without their padding → boxes, losses"""
        by_level = self.head(list(maps))
        counts = [scores[0].numel() for scores in by_level[0]]
        # Coordinates up to a thousand do not fit into half precision.
        scores, deltas = (x.float() for x in concat_box_prediction_layers(*by_level))
        anchors = [self._anchors(maps)] * len(sizes)
        proposals = self.box_coder.decode(deltas.detach(), anchors).view(len(sizes), -1, 4)
        boxes, _ = self.filter_proposals(proposals, scores, list(sizes), counts)
        if targets is None:
            return boxes, {}
        assert keys is not None
        labels, matched = self.assign_targets_to_anchors(anchors, targets)
        return boxes, self._losses(
            scores.view(len(sizes), -1), deltas.view(len(sizes), -1, 4), anchors[0], labels, matched, keys
        )

    def _anchors(self, maps: Sequence[Tensor]) -> Tensor:
        self.anchor_generator.set_cell_anchors(torch.float32, maps[0].device)
        grids = [list(features.shape[-2:]) for features in maps]
        strides: list[list[Any]] = [[stride, stride] for stride in _STRIDES]
        return torch.cat(self.anchor_generator.grid_anchors(grids, strides))

    def _losses(
        self, scores: Tensor, deltas: Tensor, anchors: Tensor, labels: list[Tensor], matched: list[Tensor], keys: Tensor
    ) -> Losses:
        """scores (B, anchors), deltas (B, anchors, 4); for each image labels (anchors,), matched boxes (anchors, 4)"""
        objectness, boxes = [], []
        for image, key in enumerate(keys):
            positive, negative = self.fg_bg_sampler(labels[image], key)
            chosen = torch.cat([positive, negative])
            wanted = self.box_coder.encode_single(matched[image][positive], anchors[positive])
            objectness.append(F.binary_cross_entropy_with_logits(scores[image][chosen], labels[image][chosen]))
            boxes.append(F.l1_loss(deltas[image][positive], wanted, reduction="sum") / len(chosen))
        return {"proposal_score": torch.stack(objectness).mean(), "proposal_box": torch.stack(boxes).mean()}
