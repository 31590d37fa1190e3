"""The loss of a segmenter."""

from torch import Tensor
from torch.nn import functional as F

from inline_attention.tasks.dense.backbone import STRIDES
from inline_attention.tasks.segmentation.heads import to_pixels
from inline_attention.tasks.segmentation.sources import IGNORED


def pixel_loss(logits: Tensor, masks: Tensor, *, sizes: Tensor | None = None, stride: int = STRIDES[0]) -> Tensor:
    """Cross entropy () between logits (B, classes, h, w) at a stride, enlarged, and masks (B, H, W)

    The sum is divided by the number of all pixels, including ignored ones, as published. So the divisor is the same on
    every rank. sizes (B, 2) are those of padded images, whose masks must be IGNORED in the padding.
    """
    enlarged = to_pixels(logits, masks.shape[1:], sizes=sizes, stride=stride)
    return F.cross_entropy(enlarged, masks, ignore_index=IGNORED, reduction="sum") / masks.numel()
