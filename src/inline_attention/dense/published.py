"""What was published of segmenters and detectors, and what ours count."""

from typing import NamedTuple


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
    "softmax_pvt_small": PublishedSegmenter("fpn", 28, 225, 41.95),
    "softmax_pvt_medium": PublishedSegmenter("fpn", 48, 315, 42.91),
    "softmax_pvt_large": PublishedSegmenter("fpn", 65, 420, 43.49),
    "inline_pvt_tiny": PublishedSegmenter("fpn", miou=39.16, macc=50.63),
    "inline_pvt_small": PublishedSegmenter("fpn"),
    "inline_pvt_medium": PublishedSegmenter("fpn"),
    "inline_pvt_large": PublishedSegmenter("fpn"),
    "softmax_swin_tiny": PublishedSegmenter("upernet", 60, 945, 44.51),
    "softmax_swin_small": PublishedSegmenter("upernet", 81, 1038, 47.64),
    "softmax_swin_base": PublishedSegmenter("upernet", 121, 1188, 48.13),
    "inline_swin_tiny": PublishedSegmenter("upernet", miou=45.57, macc=57.6),
    "inline_swin_small": PublishedSegmenter("upernet"),
    "inline_swin_base": PublishedSegmenter("upernet"),
}
