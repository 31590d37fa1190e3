"""Region proposals: torchvision's network with fixed strides, and losses that weight every image equally."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers

from inline_attention.layers.windows import ceil_div
from inline_attention.tasks.dense.backbone import STRIDES
from inline_attention.tasks.detection.boxes import KeyedSampler, Size, in_full_precision

# For each image: boxes (n, 4), labels (n,) from 1 on and, for mask heads, masks (n, height, width) uint8
Targets = Sequence[dict[str, Tensor]]
Losses = dict[str, Tensor]

_STRIDES = (*STRIDES, 64)  # box heads do not use the last level
_SIZES = tuple((8 * stride,) for stride in _STRIDES)
SMALLEST_ANCHOR = _SIZES[0][0]
_RATIOS = ((0.5, 1.0, 2.0),) * len(_STRIDES)


class RegionProposals(RegionProposalNetwork):
    """Anchors have a side of 8 strides, in three shapes. 256 anchors of an image are sampled, at most half positive."""

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

    @torch.compiler.disable  # shapes depend on the number of proposals
    def forward(
        self, maps: Sequence[Tensor], sizes: Sequence[Size], targets: Targets | None = None, keys: Tensor | None = None
    ) -> tuple[list[Tensor], Losses]:
        """maps (B, C, H/s, W/s) at strides 4 to 64; sizes: of the images without their padding → boxes, losses

        Anchors beyond the border of an image's own map are ignored.
        """
        scores, deltas = concat_box_prediction_layers(*self.head(list(maps)))
        scores, deltas = (in_full_precision(x) for x in (scores, deltas))
        scores, deltas = scores.view(len(sizes), -1), deltas.view(len(sizes), -1, 4)
        anchors = self._anchors(maps, scores.dtype)
        boxes, losses = [], []
        for image, size in enumerate(sizes):
            chosen, counts = self._own_anchors(maps, size)
            own = (scores[image, chosen], deltas[image, chosen], anchors[chosen])
            proposals = self.box_coder.decode(own[1].detach(), [own[2]]).view(1, -1, 4)
            boxes += self.filter_proposals(proposals, own[0][None], [size], counts)[0]
            if targets is not None:
                assert keys is not None
                losses.append(self._losses(*own, target=targets[image], key=keys[image]))
        return boxes, {
            name: torch.stack([part[name] for part in losses]).mean() for name in losses[0]
        } if losses else {}

    def _anchors(self, maps: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        self.anchor_generator.set_cell_anchors(dtype, maps[0].device)
        grids = [list(features.shape[-2:]) for features in maps]
        strides: list[list[Any]] = [[stride, stride] for stride in _STRIDES]
        return torch.cat(self.anchor_generator.grid_anchors(grids, strides))

    def _own_anchors(self, maps: Sequence[Tensor], size: Size) -> tuple[Tensor | slice, list[int]]:
        """The indices of the anchors of an image of that size, and their number on each level"""
        grids = [(features.shape[2], features.shape[3]) for features in maps]
        own = [(ceil_div(size[0], stride), ceil_div(size[1], stride)) for stride in _STRIDES]
        places = self.anchor_generator.num_anchors_per_location()[0]
        counts = [places * rows * columns for rows, columns in own]
        if own == grids:
            return slice(None), counts
        present = [
            torch.arange(height, device=maps[0].device)[:, None].lt(rows)
            & torch.arange(width, device=maps[0].device).lt(columns)
            for (height, width), (rows, columns) in zip(grids, own, strict=True)
        ]
        everywhere = torch.cat([mask.flatten() for mask in present]).repeat_interleave(places)
        return everywhere.nonzero().squeeze(1), counts

    def _losses(
        self, scores: Tensor, deltas: Tensor, anchors: Tensor, *, target: dict[str, Tensor], key: Tensor
    ) -> Losses:
        """The proposals of one image: scores (anchors,), deltas (anchors, 4), anchors (anchors, 4)"""
        (labels,), (matched,) = self.assign_targets_to_anchors([anchors], [target])
        positive, negative = self.fg_bg_sampler(labels, key)
        chosen = torch.cat([positive, negative])
        wanted = self.box_coder.encode_single(matched[positive], anchors[positive])
        return {
            "proposal_score": F.binary_cross_entropy_with_logits(scores[chosen], labels[chosen]),
            "proposal_box": F.l1_loss(deltas[positive], wanted, reduction="sum") / len(chosen),
        }
