"""Turns a checkpoint into a safetensors file with this library's names and the model's configuration."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.models import get_pretrained_cfg

from ._base import StateDict, VisionModel
from ._checkpoint import Checkpoint, errors_name, open_checkpoint
from .registry import create_model, list_models
from .weights import (
    HEAD_NAMES,
    build_as_saved,
    find_family,
    first_conv_name,
    load_checkpoint,
    local_path,
    save_weights,
    saved_config,
    source_size,
)

# What adapting position parameters that do not belong to a model may raise.
_MISFITS = (ValueError, IndexError, RuntimeError)


@dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    checkpoint: Checkpoint
    model: VisionModel
    path: Path

    @property
    def was_resized(self) -> bool:
        """Position parameters had to be resized: the file was made at another input size than the model's."""
        kept = {name: tensor for name, tensor in self.checkpoint.state_dict.items() if not _is_recomputed(name)}
        return _num_elements(kept) != _num_elements(self.model.state_dict())


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model_name: str | None = None,
    ema: bool | None = None,
) -> Conversion:
    """Reads whatever `load_weights` reads from a file or URL, and writes what `save_weights` writes.

    Args:
        model_name: a registered model; None finds it by the names and shapes in the file, and is an error where none
            or several fit.
        ema: None takes averaged (EMA) weights where there are some, True demands them, False takes the others.
    """
    path = local_path(source)
    checkpoint = open_checkpoint(path, ema=ema)
    if model_name is None and saved_config(checkpoint) is not None:
        with errors_name(path):
            model = build_as_saved(checkpoint)
    else:
        name = model_name or identify(checkpoint, filename=path.name)
        model = create_model(name, **_options(name, checkpoint))
    assert isinstance(model, VisionModel)
    load_checkpoint(model, checkpoint, origin=str(path))
    metadata = {"converted_from": path.name, "ema": str(checkpoint.is_ema).lower()}
    return Conversion(checkpoint, model, save_weights(model, target, metadata=metadata))


def identify(checkpoint: Checkpoint, *, filename: str = "") -> str:
    """The one registered model that the weights fit without resizing anything; ValueError if there is none such.

    Models that differ in nothing but the input size are told apart by the size in the file's configuration or name.
    """
    family = find_family(checkpoint.state_dict)
    names = list_models(f"*_{family.lower()}_*") if family else []
    fitting = [name for name in names if _fits(name, checkpoint)]
    if len(fitting) > 1:
        size = source_size(checkpoint)
        sides = {size[0]} if size else {int(number) for number in re.findall(r"\d+", filename)}
        fitting = [name for name in fitting if _input_side(name) in sides] or fitting
    if len(fitting) != 1:
        found = f"they fit {' and '.join(fitting)}" if fitting else "they fit none of the registered models"
        raise ValueError(f"it is not clear whose weights these are ({found}): name the model (--model, model_name)")
    return fitting[0]


def _input_side(name: str) -> int:
    cfg = get_pretrained_cfg(name)
    assert cfg is not None
    return cfg.input_size[1]


def _adapted_shapes(name: str, checkpoint: Checkpoint) -> tuple[VisionModel, StateDict]:
    """The model without a head, and the weights as it would take them, both on the meta device."""
    size = source_size(checkpoint)
    options: dict[str, Any] = {"img_size": size} if size else {}
    with torch.device("meta"):
        model = create_model(name, num_classes=0, **options)
    assert isinstance(model, VisionModel)
    on_meta = {key: tensor.to("meta") for key, tensor in checkpoint.state_dict.items()}
    return model, model.adapt_state_dict(on_meta, img_size=size)


def _fits(name: str, checkpoint: Checkpoint) -> bool:
    try:
        model, theirs = _adapted_shapes(name, checkpoint)
    except _MISFITS:
        return False
    resized = _num_elements(theirs) != sum(
        tensor.numel() for key, tensor in checkpoint.state_dict.items() if not _is_recomputed(key)
    )
    return not resized and _shapes(theirs, model) == _shapes(model.state_dict(), model)


def _shapes(state_dict: StateDict, model: VisionModel) -> dict[str, torch.Size]:
    """Shapes that tell models apart: not the head's, not the number of input channels."""
    shapes = {name: tensor.shape for name, tensor in state_dict.items() if name not in HEAD_NAMES}
    conv = first_conv_name(model)
    if conv in shapes:
        shapes[conv] = shapes[conv][:1] + shapes[conv][2:]
    return shapes


def _options(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments that make the model as large as the weights: class count, input channels and size."""
    try:
        model, theirs = _adapted_shapes(name, checkpoint)
    except _MISFITS:
        return {}  # the load will fail, and say why
    head, conv = theirs.get(HEAD_NAMES[0]), theirs.get(first_conv_name(model))
    return {
        "num_classes": 0 if head is None else head.shape[0],
        "in_chans": model.in_chans if conv is None else conv.shape[1],
        "img_size": model.img_size,
    }


def _is_recomputed(name: str) -> bool:
    return name.endswith(("relative_position_index", "attn_mask"))


def _num_elements(state_dict: StateDict) -> int:
    return sum(tensor.numel() for tensor in state_dict.values())
