"""Segmenters from and for weights files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from inline_attention.dense.segmentation.config import SegmentDataConfig, SegmenterConfig
from inline_attention.dense.segmentation.model import HEADS, Segmenter, create_segmenter
from inline_attention.models.weights import local_path, read_checkpoint, read_metadata
from inline_attention.training.task import weights_source

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
    source = config.weights
    whole = None
    if source is not None and source != "pretrained":
        source = weights_source(source)
        whole = _segmenter_file(source)
    model = create_segmenter(
        config.name,
        config.head,
        num_classes=num_classes,
        weights=source if whole is None else None,
        drop_path=config.drop_path,
        kwargs=config.kwargs,
        head_kwargs=config.head_kwargs,
    )
    if whole is not None:
        load_segmenter_weights(model, whole, backbone_only=config.reset_head)
    return model


def _segmenter_file(source: str) -> Path | None:
    """The file, if it holds a segmenter."""
    path = local_path(source)
    is_segmenter = path.suffix == ".safetensors" and read_metadata(path).get("task") == TASK
    return path if is_segmenter else None


def load_segmenter_weights(model: Segmenter, path: Path, *, backbone_only: bool = False) -> None:
    """ValueError where the file is of another model; nothing is loaded then."""
    found = read_checkpoint(path)
    target: nn.Module = model
    if backbone_only:
        target = model.backbone
        found = {name.removeprefix("backbone."): v for name, v in found.items() if name.startswith("backbone.")}
    own = target.state_dict()
    misfits = sorted(name for name in own.keys() | found.keys() if _shape(own.get(name)) != _shape(found.get(name)))
    if misfits:
        hint = "" if backbone_only else "; for other classes or another head set model.reset_head=true"
        raise ValueError(f"{path} does not fit the model: {len(misfits)} tensors differ, such as {misfits[0]}{hint}")
    target.load_state_dict(found)


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


@dataclass
class TrainedSegmenter:
    model: Segmenter
    title: str
    class_names: list[str]
    data: SegmentDataConfig  # how images are prepared and segmented


def load_segmenter(weights: str) -> TrainedSegmenter:
    """A segmenter from a weights file (or its URL) that `inline segment train` wrote."""
    path = local_path(weights)
    metadata = read_metadata(path) if path.suffix == ".safetensors" else {}
    if metadata.get("task") != TASK:
        raise ValueError(f"{weights!r} is no weights file of `inline segment train`")
    class_names = json.loads(metadata["class_names"])
    config = SegmenterConfig(name=metadata["architecture"], **json.loads(metadata["config"]))
    model = build(config, num_classes=len(class_names))
    load_segmenter_weights(model, path)
    data = SegmentDataConfig(**json.loads(metadata["preprocessing"]))
    return TrainedSegmenter(model.eval(), title(config), class_names, data)
