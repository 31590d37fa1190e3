"""What a segmenter learns: the class of every pixel."""

from torch import Tensor
from torch.nn import functional as F

from inline_attention.tasks.dense.backbone import STRIDES
from inline_attention.tasks.segmentation.heads import to_pixels
from inline_attention.tasks.segmentation.sources import IGNORED


def pixel_loss(logits: Tensor, masks: Tensor, *, sizes: Tensor | None = None, stride: int = STRIDES[0]) -> Tensor:
    """Cross entropy () of logits (B, classes, h, w) at a stride, enlarged to masks (B, H, W).

    Divided by the number of all pixels, the ignored ones too, as published: the divisor is then the same on every rank.
    sizes (B, 2): of images that are padded; their masks must be IGNORED there.
    """
    enlarged = to_pixels(logits, masks.shape[1:], sizes=sizes, stride=stride)
    return F.cross_entropy(enlarged, masks, ignore_index=IGNORED, reduction="sum") / masks.numel()
