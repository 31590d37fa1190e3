"""Turns a checkpoint into a safetensors file with this library's names and the model's configuration."""

import os
from dataclasses import dataclass
from pathlib import Path

from ._checkpoint import Checkpoint, open_checkpoint
from ._download import local_path
from .base import VisionModel
from .weights import kept_weights, num_elements, restore, save_weights


@dataclass(frozen=True)
class Conversion:
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
) -> Conversion:
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
        raise ValueError(f"{model_name} is a model of timm, not one of this library; `inline models` lists those")
    metadata = {"converted_from": path.name, "ema": str(checkpoint.is_ema).lower()}
    return Conversion(checkpoint, model, save_weights(model, target, metadata=metadata))
