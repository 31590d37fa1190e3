"""Turns a checkpoint into a safetensors file with this library's names and the model's configuration."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import schema
from ._checkpoint import Checkpoint, open_checkpoint, read_metadata
from ._download import local_path
from .base import VisionModel
from .weights import (
    architecture,
    kept_weights,
    num_elements,
    restore,
    save_weights,
    trained_preparation,
    write_safetensors,
)


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    checkpoint: Checkpoint
    model: VisionModel
    path: Path

    @property
    def was_resized(self) -> bool:
        """Whether position parameters were resized, because the file has another input size than the model."""
        return num_elements(kept_weights(self.checkpoint)) != num_elements(self.model.state_dict())


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model_name: str | None = None,
    ema: bool | None = None,
) -> Converted:
    """Read a file or URL as `load_weights` does, and write it as `save_weights` does.

    Args:
        model_name: a registered model. None finds it by the names and shapes in the file, and is an error if none
            or several fit.
        ema: None takes averaged (EMA) weights if there are any, True requires them, False takes the others.
    """
    path = local_path(source)
    checkpoint = open_checkpoint(path, ema=ema)
    model = restore(checkpoint, origin=str(path), name=model_name)
    if not isinstance(model, VisionModel):
        raise ValueError(
            f"{architecture(model)} is a model of timm, not one of this library; `inline models` lists those"
        )
    metadata = {"converted_from": path.name, "ema": str(checkpoint.is_ema).lower()}
    if schema.read_description(checkpoint.info) is not None:  # a file of this library
        kept = (schema.CLASS_NAMES, schema.PREPROCESSING, schema.MULTI_LABEL)
        metadata |= {key: checkpoint.info[key] for key in kept if key in checkpoint.info}
    elif prepared := trained_preparation(checkpoint, in_chans=model.in_chans):
        metadata[schema.PREPROCESSING] = json.dumps(prepared)
    return Converted(checkpoint, model, save_weights(model, target, metadata=metadata))


def average(sources: Sequence[Path], target: Path) -> Path:
    """Write the mean of several weights files of one model, with the metadata that all of them have in common.

    Integers, such as the counters of batch norm, are those of the last file. Raises ValueError if the files are of
    different models.
    """
    compared = [schema.ARCHITECTURE, schema.ARGUMENTS, schema.CHANGES, schema.CLASS_NAMES, schema.MULTI_LABEL]
    compared += [schema.TASK, *schema.CONVERSIONS]
    metadata: dict[str, str] = {}
    sums: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    for number, path in enumerate(sources):
        if path.suffix != ".safetensors":
            raise ValueError(f"{path}: expected a .safetensors file; `inline convert {path} OUT` makes one")
        about, tensors = read_metadata(path), open_checkpoint(path).state_dict
        if number == 0:
            metadata, types = about, {name: tensor.dtype for name, tensor in tensors.items()}
        for key in compared:
            if about.get(key) != metadata.get(key):
                raise ValueError(f"{path} has another {key} than {sources[0]}: only files of one model have a mean")
        if number and {name: tensor.shape for name, tensor in tensors.items()} != {n: t.shape for n, t in sums.items()}:
            raise ValueError(f"{path} has other tensors than {sources[0]}: only files of one model have a mean")
        metadata = {key: value for key, value in metadata.items() if about.get(key) == value}
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                sums[name] = sums[name] + tensor.double() if number else tensor.double()
            else:
                sums[name] = tensor
    means = {
        name: (value / len(sources)).to(types[name]) if value.is_floating_point() else value
        for name, value in sums.items()
    }
    metadata["averaged_from"] = json.dumps([path.name for path in sources])
    return write_safetensors(means, target, metadata=metadata)
