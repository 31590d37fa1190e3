"""Segmenters from and for weights files."""

from inline_attention.models.schema import check_arguments
from inline_attention.tasks.dense.weights import TaskModels, TrainedModel
from inline_attention.tasks.segmentation.config import SegmentDataConfig, SegmenterConfig
from inline_attention.tasks.segmentation.model import HEADS, Segmenter, create_segmenter

TrainedSegmenter = TrainedModel[Segmenter, SegmentDataConfig]

MODELS: TaskModels[Segmenter, SegmenterConfig, SegmentDataConfig] = TaskModels(
    task="segmentation",
    command="inline segment train",
    create=create_segmenter,
    heads=HEADS,
    model=SegmenterConfig(),
    data=SegmentDataConfig(),
    arguments=("head_kwargs",),
    preparation=(
        *("short_side", "max_side", "window", "window_stride", "eval_scales", "eval_flip"),
        *("layout", "val_split", "ignore_index"),
    ),
    check=lambda config: check_arguments(HEADS[config.head][1], config.head_kwargs),
)


def load_segmenter(weights: str) -> TrainedSegmenter:
    """A segmenter from a weights file (or its URL) that `inline segment train` wrote."""
    return MODELS.load(weights)
