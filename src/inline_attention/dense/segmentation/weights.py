"""Segmenters from and for weights files."""

import json
from dataclasses import dataclass
from typing import Any

from inline_attention.dense.segmentation.config import SegmentDataConfig, SegmenterConfig
from inline_attention.dense.segmentation.model import HEADS, Segmenter, create_segmenter
from inline_attention.dense.weights import find_weights, load_whole, read_configuration, restore_whole, task_file
from inline_attention.models._checkpoint import errors_name
from inline_attention.models.schema import check_arguments

TASK = "segmentation"  # in the metadata of a file
# What of the data configuration belongs to the weights: how their images are prepared and segmented.
_PREPARATION = ("short_side", "max_long_side", "window", "window_stride", "eval_scales", "eval_flip")


def title(config: SegmenterConfig) -> str:
    return f"{config.name} + {HEADS[config.head][0]}"


def arguments_of(config: SegmenterConfig) -> dict[str, Any]:
    """What builds the model again, beside its backbone's name and its class count."""
    return {"head": config.head, "kwargs": config.kwargs, "head_kwargs": config.head_kwargs}


def preparation(config: SegmentDataConfig) -> str:
    """What a weights file should say about its images, under the key "preprocessing"."""
    return json.dumps({key: getattr(config, key) for key in _PREPARATION})


def build(config: SegmenterConfig, *, num_classes: int) -> Segmenter:
    """The segmenter, with the weights that the configuration names: a segmenter's, or a classifier's below the head."""
    whole, source = find_weights(config.weights, TASK)
    model = create_segmenter(
        config.name,
        config.head,
        num_classes=num_classes,
        weights=source,
        drop_path=config.drop_path,
        kwargs=config.kwargs,
        head_kwargs=config.head_kwargs,
    )
    if whole is not None:
        load_whole(model, whole, backbone_only=config.reset_head)
    return model


@dataclass
class TrainedSegmenter:
    """A segmenter from a weights file, with what the file says about it."""

    model: Segmenter
    title: str
    class_names: list[str]
    data: SegmentDataConfig  # how images are prepared and segmented


def load_segmenter(weights: str) -> TrainedSegmenter:
    """A segmenter from a weights file (or its URL) that `inline segment train` wrote."""
    file = task_file(weights, TASK)
    if file is None:
        raise ValueError(f"{weights!r} is no weights file of `inline segment train`")
    config, data = read_configuration(
        file,
        SegmenterConfig(),
        SegmentDataConfig(),
        arguments=("head", "head_kwargs"),
        preparation=_PREPARATION,
    )
    with errors_name(file.path):
        check_arguments(HEADS[config.head][1], config.head_kwargs)
    model, class_names = restore_whole(file, lambda num_classes: build(config, num_classes=num_classes))
    return TrainedSegmenter(model, title(config), class_names, data)
