"""Published results of segmenters, and the cost of ours, counted without computing anything."""

from typing import NamedTuple

import torch

from inline_attention.models.profile import count_module_macs
from inline_attention.tasks.segmentation.model import create_segmenter


class PublishedSegmenter(NamedTuple):
    """Cost of one 512×2048 image with 150 classes; result on ADE20K's validation split, in per cent."""

    head: str
    params: float | None = None  # millions
    macs: float | None = None  # 10⁹
    miou: float | None = None
    macc: float | None = None


COST_SIZE = (512, 2048)
COST_CLASSES = 150

SEGMENTERS = {
    "softmax_pvt_tiny": PublishedSegmenter("fpn", 17, 158, 36.57),
    "inline_pvt_tiny": PublishedSegmenter("fpn", miou=39.16, macc=50.63),
    "softmax_pvt_small": PublishedSegmenter("fpn", 28, 225, 41.95),
    "inline_pvt_small": PublishedSegmenter("fpn"),
    "softmax_pvt_medium": PublishedSegmenter("fpn", 48, 315, 42.91),
    "inline_pvt_medium": PublishedSegmenter("fpn"),
    "softmax_pvt_large": PublishedSegmenter("fpn", 65, 420, 43.49),
    "inline_pvt_large": PublishedSegmenter("fpn"),
    "softmax_swin_tiny": PublishedSegmenter("upernet", 60, 945, 44.51),
    "inline_swin_tiny": PublishedSegmenter("upernet", miou=45.57, macc=57.6),
    "softmax_swin_small": PublishedSegmenter("upernet", 81, 1038, 47.64),
    "inline_swin_small": PublishedSegmenter("upernet"),
    "softmax_swin_base": PublishedSegmenter("upernet", 121, 1188, 48.13),
    "inline_swin_base": PublishedSegmenter("upernet"),
}


class SegmenterCost(NamedTuple):
    params: int  # of the whole model, with the auxiliary head
    macs: int  # of one image in evaluation, without the auxiliary head


def count_cost(backbone: str, head: str) -> SegmenterCost:
    """Count as published costs do: one image of `COST_SIZE`, with `COST_CLASSES`."""
    with torch.device("meta"):
        model = create_segmenter(backbone, head, num_classes=COST_CLASSES).eval()
        image = torch.empty(1, 3, *COST_SIZE)
    return SegmenterCost(sum(p.numel() for p in model.parameters()), count_module_macs(model, image))
