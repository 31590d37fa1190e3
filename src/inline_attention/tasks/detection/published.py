"""Published results of detectors, and the cost of ours, counted without computing anything."""

from collections import OrderedDict
from typing import NamedTuple

import torch

from inline_attention.models.profile import count_module_macs
from inline_attention.tasks.detection.boxes import Size
from inline_attention.tasks.detection.model import create_detector
from inline_attention.tasks.detection.roi_heads import BOX_SIDE, MASK_SIDE


class PublishedDetector(NamedTuple):
    """Cost of one 800×1280 image with 80 classes; average precision on COCO's val2017, in per cent."""

    backbone: str
    head: str
    params: float | None  # millions
    macs: float  # 10⁹
    box_ap: float
    mask_ap: float


COST_SIZE = (800, 1280)
COST_CLASSES = 80
COST_BOXES, COST_MASKS = 1000, 100  # regions that pass every box head, and every mask head

_ROWS = (
    ("1x", PublishedDetector("softmax_pvt_tiny", "mask_rcnn", None, 240, 36.7, 35.1)),
    ("1x", PublishedDetector("softmax_pvt_small", "mask_rcnn", None, 305, 40.4, 37.8)),
    ("1x", PublishedDetector("softmax_pvt_medium", "mask_rcnn", None, 392, 42.0, 39.0)),
    ("1x", PublishedDetector("softmax_pvt_large", "mask_rcnn", None, 494, 42.9, 39.5)),
    ("1x", PublishedDetector("softmax_swin_tiny", "mask_rcnn", 48, 267, 43.7, 39.8)),
    ("1x", PublishedDetector("softmax_swin_small", "mask_rcnn", 69, 358, 45.7, 41.1)),
    ("3x", PublishedDetector("softmax_swin_tiny", "mask_rcnn", 48, 267, 46.0, 41.6)),
    ("1x", PublishedDetector("softmax_swin_tiny", "cascade_mask_rcnn", 86, 745, 48.1, 41.7)),
    ("3x", PublishedDetector("softmax_swin_tiny", "cascade_mask_rcnn", 86, 745, 50.4, 43.7)),
    ("3x", PublishedDetector("softmax_swin_small", "cascade_mask_rcnn", 107, 837, 51.9, 45.0)),
    ("3x", PublishedDetector("softmax_swin_base", "cascade_mask_rcnn", 145, 981, 51.9, 45.0)),
)
DETECTORS = {f"{row.head}_{row.backbone}_{schedule}": row for schedule, row in _ROWS}  # by recipe


class DetectorCost(NamedTuple):
    """Multiply-accumulates of one image by part. `boxes` and `masks` are sums over the stages of the heads."""

    params: int
    backbone: int
    pyramid: int
    proposals: int
    boxes: int
    masks: int

    @property
    def macs(self) -> int:
        return sum(self[1:])


def count_cost(backbone: str, head: str, *, img_size: Size = COST_SIZE) -> DetectorCost:
    """Count as published costs do: `COST_BOXES` regions in every box head and `COST_MASKS` in every mask head."""
    with torch.device("meta"):
        model = create_detector(backbone, head, num_classes=COST_CLASSES).eval()
        image = torch.empty(1, 3, *img_size)
        features = OrderedDict((str(level), x) for level, x in enumerate(model.backbone(image)))
        maps = list(model.pyramid(features).values())
        box_regions = torch.empty(COST_BOXES, maps[0].shape[1], BOX_SIDE, BOX_SIDE)
        mask_regions = torch.empty(COST_MASKS, maps[0].shape[1], MASK_SIDE, MASK_SIDE)
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
        masks=sum(count_module_macs(stage.mask_head, mask_regions) for stage in stages if stage.mask_head is not None),
    )
