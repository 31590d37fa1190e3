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


class PublishedDetector(NamedTuple):
    """Cost of one 800×1280 image with 80 classes; average precision on COCO's val2017, in per cent."""

    backbone: str
    head: str
    params: float | None  # millions
    macs: float  # 10⁹
    box_ap: float
    mask_ap: float


DETECTOR_COST_SIZE = (800, 1280)
DETECTOR_COST_CLASSES = 80
DETECTOR_COST_BOXES, DETECTOR_COST_MASKS = 1000, 100  # regions through every box head, and through every mask head

# By the recipe that trains it.
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
