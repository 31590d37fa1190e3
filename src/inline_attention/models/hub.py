"""Models for the Hugging Face hub, written by timm's own functions. `inline export --format hf` calls this."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from torch import nn

from . import schema
from .base import VisionModel, input_shape
from .registry import create_model
from .weights import architecture


def image_preparation(model: nn.Module, preprocessing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The preparation of images in timm's terms: input_size, mean, std, interpolation, crop_pct, crop_mode.

    Entries of `preprocessing` replace those of the model's `pretrained_cfg`.
    """
    cfg: Any = getattr(model, "pretrained_cfg", None)
    if cfg is None:
        raise ValueError(
            f"the {type(model).__name__} has no pretrained_cfg, which says how its images are prepared: build it with "
            "create_model"
        )
    unknown = set(preprocessing or {}) - {"mean", "std", "interpolation", "crop_pct", "crop_mode"}
    if unknown:
        raise ValueError(
            f"preprocessing has {', '.join(sorted(unknown))}; expected mean, std, interpolation, crop_pct or crop_mode"
        )
    channels, *size = input_shape(model)
    prepared = resolve_data_config(pretrained_cfg={**cfg, **(preprocessing or {})})
    for key in ("mean", "std"):
        values = tuple(prepared[key])
        if len(values) != channels:  # ImageNet's three do not fit: their average for every channel
            values = (sum(values) / len(values),) * channels
        prepared[key] = values
    return prepared | {"input_size": (channels, *size)}


def save_for_hf(model: VisionModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write a folder in the layout of the hub, with timm's `save_for_hf`.

    timm opens it as "local-dir:FOLDER", transformers as `AutoModelForImageClassification.from_pretrained(FOLDER)`, both
    after `import inline_attention`. `huggingface_hub.upload_folder` publishes it.

    Args:
        options: those of `hf_arguments`.
    """
    timm.models.save_for_hf(model, str(folder), **hf_arguments(model, **options))
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    if config["model_args"].pop("num_classes", None) is not None:  # from timm 1.0.31 on
        path.write_text(json.dumps(config, indent=2))


def hf_arguments(
    model: VisionModel,
    *,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    multi_label: bool = False,
) -> dict[str, Any]:
    """Arguments of timm's `save_for_hf` and `push_to_hf_hub` for a model of this library.

    The folder or repository then contains everything to rebuild the model. timm opens it as "local-dir:FOLDER" or
    "hf-hub:USER/NAME", after `import inline_attention`. From timm 1.0.31 on, transformers opens only what this module's
    `save_for_hf` writes: timm stores the number of classes twice.

    Args:
        class_names: one name for each class. Pipelines print them.
        preprocessing: replaces entries of the model's `pretrained_cfg`, such as mean, std, interpolation or crop_pct.
        multi_label: an image may have several classes. transformers then trains with binary cross-entropy, and its
            pipeline gives a probability for each class.
    """
    if class_names is not None and len(class_names) != model.num_classes:
        raise ValueError(f"there are {len(class_names)} class names for the {model.num_classes} classes of the model")
    if any(conversion.describe(model) for conversion in schema.CONVERSIONS.values()):
        raise ValueError(
            "the model was linearised, and timm would build it with the softmax attention that it had: save it with "
            "save_weights, whose files load_model opens"
        )
    # transformers passes the number of classes separately, and the configuration has its own entry for it.
    options = {key: value for key, value in model.config.items() if key != "num_classes"}
    options |= {"img_size": list(model.img_size), "global_pool": model.global_pool}
    with torch.device("meta"):
        again = create_model(architecture(model), num_classes=model.num_classes, **options)
    ours, theirs = ({name: p.shape for name, p in m.state_dict().items()} for m in (model, again))
    if ours != theirs:
        raise ValueError(
            "the model was changed since it was built, in a way that timm cannot repeat (layers were pruned, or the "
            "input size was set): build it with the arguments it should have, and load its weights with load_weights"
        )
    cfg: Any = model.pretrained_cfg  # timm's builder sets it
    left_out = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture")
    cfg = {key: value for key, value in cfg.items() if key not in left_out and value is not None}
    cfg |= {"num_classes": model.num_classes, **image_preparation(model, preprocessing)}
    config: dict[str, Any] = {"pretrained_cfg": cfg}
    if class_names is not None:
        config["label_names"] = list(class_names)
    if multi_label:
        config["problem_type"] = "multi_label_classification"
    return {"model_args": options, "model_config": config, "safe_serialization": True}
