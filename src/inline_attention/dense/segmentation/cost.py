"""What a segmenter costs, counted without computing."""

from typing import NamedTuple

import torch

from inline_attention.dense.published import COST_CLASSES, COST_SIZE
from inline_attention.dense.segmentation.model import create_segmenter
from inline_attention.models.profile import count_module_macs


class SegmenterCost(NamedTuple):
    params: int  # of everything that is trained, the auxiliary head too
    macs: int  # of one image in evaluation, without it


def count_cost(backbone: str, head: str) -> SegmenterCost:
    """As published costs are counted: of one image of `COST_SIZE`, with `COST_CLASSES`."""
    with torch.device("meta"):
        model = create_segmenter(backbone, head, num_classes=COST_CLASSES).eval()
        image = torch.empty(1, 3, *COST_SIZE)
    return SegmenterCost(sum(p.numel() for p in model.parameters()), count_module_macs(model, image))
