"""Published results of detectors, and the cost of ours, counted on the meta device."""

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
COST_BOXES, COST_MASKS = 1000, 100  # regions through every box head, and through every mask head

# recipe → published model
DETECTORS = {
    "mask_rcnn_softmax_pvt_tiny_1x": PublishedDetector("softmax_pvt_tiny", "mask_rcnn", None, 240, 36.7, 35.1),
    "mask_rcnn_softmax_pvt_small_1x": PublishedDetector("softmax_pvt_small", "mask_rcnn", None, 305, 40.4, 37.8),
    "mask_rcnn_softmax_pvt_medium_1x": PublishedDetector("softmax_pvt_medium", "mask_rcnn", None, 392, 42.0, 39.0),
    "mask_rcnn_softmax_pvt_large_1x": PublishedDetector("softmax_pvt_large", "mask_rcnn", None, 494, 42.9, 39.5),
    "mask_rcnn_softmax_swin_tiny_1x": PublishedDetector("softmax_swin_tiny", "mask_rcnn", 48, 267, 43.7, 39.8),
    "mask_rcnn_softmax_swin_small_1x": PublishedDetector("softmax_swin_small", "mask_rcnn", 69, 358, 45.7, 41.1),
    "mask_rcnn_softmax_swin_tiny_3x": PublishedDetector("softmax_swin_tiny", "mask_rcnn", 48, 267, 46.0, 41.6),
    "cascade_mask_rcnn_softmax_swin_tiny_1x": PublishedDetector(
        "softmax_swin_tiny", "cascade_mask_rcnn", 86, 745, 48.1, 41.7
    ),
    "cascade_mask_rcnn_softmax_swin_tiny_3x": PublishedDetector(
        "softmax_swin_tiny", "cascade_mask_rcnn", 86, 745, 50.4, 43.7
    ),
    "cascade_mask_rcnn_softmax_swin_small_3x": PublishedDetector(
        "softmax_swin_small", "cascade_mask_rcnn", 107, 837, 51.9, 45.0
    ),
    "cascade_mask_rcnn_softmax_swin_base_3x": PublishedDetector(
        "softmax_swin_base", "cascade_mask_rcnn", 145, 981, 51.9, 45.0
    ),
}


class DetectorCost(NamedTuple):
    """Multiply-accumulates of one image by part. The heads' cover all their stages."""

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
