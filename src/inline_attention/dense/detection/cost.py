"""What a detector costs, counted without computing."""

from collections import OrderedDict
from typing import NamedTuple

import torch

from inline_attention.dense.detection.boxes import Size
from inline_attention.dense.detection.model import create_detector
from inline_attention.dense.detection.roi_heads import BOX_SIDE, MASK_SIDE
from inline_attention.dense.published import (
    DETECTOR_COST_BOXES,
    DETECTOR_COST_CLASSES,
    DETECTOR_COST_MASKS,
    DETECTOR_COST_SIZE,
)
from inline_attention.models.profile import count_module_macs


class DetectorCost(NamedTuple):
    """Of one image: multiply-accumulates by part, the heads' over all their stages."""

    params: int
    backbone: int
    pyramid: int
    proposals: int
    boxes: int
    masks: int

    @property
    def macs(self) -> int:
        return sum(self[1:])


def count_cost(backbone: str, head: str, *, img_size: Size = DETECTOR_COST_SIZE) -> DetectorCost:
    """As published costs are counted: `DETECTOR_COST_BOXES` regions through every box head, `DETECTOR_COST_MASKS`
    through every mask head."""
    with torch.device("meta"):
        model = create_detector(backbone, head, num_classes=DETECTOR_COST_CLASSES).eval()
        image = torch.empty(1, 3, *img_size)
        features = OrderedDict((str(level), x) for level, x in enumerate(model.backbone(image)))
        maps = list(model.pyramid(features).values())
        box_regions = torch.empty(DETECTOR_COST_BOXES, maps[0].shape[1], BOX_SIDE, BOX_SIDE)
        mask_regions = torch.empty(DETECTOR_COST_MASKS, maps[0].shape[1], MASK_SIDE, MASK_SIDE)
        hidden = model.heads.in_order()[0].box_head(box_regions)
    stages = model.heads.in_order()
    return DetectorCost(
        params=sum(p.numel() for p in model.parameters()),
        backbone=count_module_macs(model.backbone, image),
        pyramid=count_module_macs(model.pyramid, features),
        proposals=count_module_macs(model.proposals.head, maps),
        boxes=sum(
            count_module_macs(stage.box_head, box_regions) + count_module_macs(stage.box_predictor, hidden)
            for stage in stages
        ),
        masks=sum(count_module_macs(stage.mask_head, mask_regions) for stage in stages),
    )
