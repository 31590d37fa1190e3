"""What is learnt: the model for the data, and how a weights file describes both."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inline_attention._version import __version__
from inline_attention.data import Data
from inline_attention.data.seeding import derive_seed
from inline_attention.models.published import PUBLISHED
from inline_attention.models.registry import create_model
from inline_attention.models.weights import load_weights, local_path
from inline_attention.training.classifier import preprocessing
from inline_attention.training.config import ModelConfig, TrainConfig
from inline_attention.training.optim import freeze_layers


def fetch_weights(config: ModelConfig) -> None:
    """Download what `model.weights` names, for every rank to find it in the cache."""
    name = config.name if config.weights == "pretrained" else config.weights
    if name in PUBLISHED:
        local_path(_source(name))


def build_model(config: TrainConfig, data: Data) -> tuple[nn.Module, dict[str, Any]]:
    """The model on the CPU, from weights that are a function of the seed or of a file, and its arguments."""
    wanted = config.model
    arguments = {
        "num_classes": data.num_classes,
        "in_chans": data.in_chans,
        "img_size": config.data.img_size,
        **({} if wanted.drop_path is None else {"drop_path_rate": wanted.drop_path}),
        **wanted.kwargs,
    }
    torch.manual_seed(derive_seed("weights", config.seed))
    model = create_model(wanted.name, pretrained=wanted.weights == "pretrained", **arguments)
    if wanted.weights not in (None, "pretrained"):
        load_weights(model, _source(wanted.weights), reset_head=wanted.reset_head)
    if wanted.checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]  # timm's contract
    freeze_layers(model, wanted.freeze)
    return model, arguments


def describe(config: TrainConfig, arguments: dict[str, Any], data: Data) -> dict[str, str]:
    """What goes into every weights file: enough to build the model again, and to name its classes."""
    return {
        "format": "pt",
        "library": f"inline_attention {__version__}",
        "architecture": config.model.name,
        "config": json.dumps(arguments),
        "class_names": json.dumps(list(data.class_names)),
        "preprocessing": preprocessing(config.data),
        "recipe": config.recipe,
    }


def check_same_task(before: dict[str, str], now: Mapping[str, str], checkpoint: Path) -> None:
    """ValueError where the checkpoint is of another model or other classes than this run's."""
    if before["architecture"] != now["architecture"]:
        raise ValueError(f"{checkpoint} is of {before['architecture']}, this run trains {now['architecture']}")
    old_classes, new_classes = json.loads(before["class_names"]), json.loads(now["class_names"])
    if len(old_classes) != len(new_classes):
        raise ValueError(
            f"{checkpoint} has {len(old_classes)} classes, the data {len(new_classes)}: a run goes on with the classes "
            "it began with. For other classes start a new run with model.weights=… model.reset_head=true"
        )
    if old_classes != new_classes:
        old, new = next((a, b) for a, b in zip(old_classes, new_classes, strict=True) if a != b)
        raise ValueError(f"{checkpoint} knows other classes than the data: {old!r} there is {new!r} here")
    old_arguments, new_arguments = json.loads(before["config"]), json.loads(now["config"])
    for name in sorted(set(old_arguments | new_arguments) - {"drop_path_rate"}):
        if old_arguments.get(name) != new_arguments.get(name):
            raise ValueError(
                f"{checkpoint} was trained with {name}={old_arguments.get(name)}, "
                f"this run has {name}={new_arguments.get(name)}"
            )


def _source(weights: str) -> str:
    """The file or address of `model.weights`, which may be the name of a model with published weights."""
    if weights not in PUBLISHED:
        return weights
    if not PUBLISHED[weights].url:
        raise ValueError(f"model.weights={weights}: no weights of that model were published; give a file")
    return PUBLISHED[weights].url
