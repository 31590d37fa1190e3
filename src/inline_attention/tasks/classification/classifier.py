"""A trained classifier from a weights file: the model, the names of its classes, and how its images are prepared."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import timm
from timm.data import ImageNetInfo
from torch import nn

from inline_attention.data import DataConfig
from inline_attention.data.transforms import eval_crop, eval_interpolation
from inline_attention.models import create_model
from inline_attention.models._checkpoint import errors_name, open_checkpoint
from inline_attention.models._download import local_path
from inline_attention.models.base import input_shape, resize_input, to_pair
from inline_attention.models.registry import find_family
from inline_attention.models.schema import annotations_of, check_values, read_description
from inline_attention.models.shipped import shipped_weights
from inline_attention.models.weights import restore, trained_preparation

# Settings of the data that a weights file stores: how images are prepared.
PREPARATION = ("img_size", "mean", "std", "interpolation", "eval_transform", "crop_pct")
assert set(PREPARATION) <= {entry.name for entry in fields(DataConfig)}


@dataclass
class Classifier:
    """A model, the names of its classes, and the preparation of its images."""

    model: nn.Module
    class_names: list[str] | None  # None: unknown, because the file does not name them and they are not ImageNet's
    data: DataConfig  # img_size, channels, normalisation and evaluation transform
    multi_label: bool = False  # an image may have several classes, or none: probabilities are sigmoids of the logits
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the model, as its file names them

    def readable_names(self) -> list[str] | None:
        """Class names for people, such as "goldfish, Carassius auratus" for the WordNet number n01443537.

        Names are unique: two classes of ImageNet are called "crane", and such names also show the number.
        """
        if self.class_names is None:
            return None
        described = class_descriptions(self.class_names)
        times = Counter(described)
        pairs = zip(self.class_names, described, strict=True)
        return [(text if times[text] == 1 else f"{text} ({name})") if text else name for name, text in pairs]

    def preprocessing(self) -> dict[str, Any]:
        """The preparation of images in timm's terms: mean, std, interpolation, crop_pct and crop_mode."""
        mean, std = self.data.statistics
        crop_mode, crop_pct = eval_crop(self.data)
        interpolation = eval_interpolation(self.data)
        return dict(mean=mean, std=std, interpolation=interpolation, crop_pct=crop_pct, crop_mode=crop_mode)


def load_classifier(
    name: str | None,
    weights: str | None,
    *,
    img_size: Sequence[int] | None = None,
    eval_transform: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Classifier:
    """Build the model of a weights file and load the weights.

    A file of this library names its model, the arguments of the model, its classes and the preparation of its images.
    An official checkpoint is recognised by its shapes. Any other file needs `name`, which may be a model of timm.

    Args:
        name: of a registered model.
        weights: a path, a URL, or "pretrained". None: an untrained model.
        img_size: replaces the size in the file.
        eval_transform: replaces the transform in the file.
        arguments: of the model; they replace those in the file.
    """
    if weights == "pretrained" and name is not None and (shipped := shipped_weights(name)):
        weights = str(shipped)  # unlike published weights, this file names its classes
    options = dict(arguments or {})
    description, prepared = None, {}
    if weights is None or weights == "pretrained":
        if name is None:
            raise ValueError("there is neither a model nor a weights file: give one of them")
        if img_size is not None:
            options["img_size"] = list(img_size)
        model = create_model(name, pretrained=weights == "pretrained", **options)
    else:
        path = local_path(weights)
        checkpoint = open_checkpoint(path)
        if img_size is not None and name is not None and find_family(name) is None:
            options["img_size"] = list(img_size)
        model = restore(checkpoint, origin=str(path), name=name, arguments=options)
        description = read_description(checkpoint.info)
        with errors_name(str(path)):
            in_chans = input_shape(model)[0]
            prepared = description.preprocessing if description else trained_preparation(checkpoint, in_chans=in_chans)
        if img_size is not None:
            resize_input(model, img_size)
    origin = weights or str(name)
    in_chans, *own_size = input_shape(model)
    with errors_name(origin):
        data = _preparation(model, prepared, in_chans=in_chans)
        size = img_size or (None if is_sized(model_name(model)) else data.img_size) or own_size
        data = replace(data, img_size=list(to_pair(size)), in_chans=in_chans)
        class_names = _class_names(model, description.class_names if description else None)
    if eval_transform is not None:
        data = replace(data, eval_transform=eval_transform)
    if description is None:
        return Classifier(model, class_names, data)
    return Classifier(model, class_names, data, description.multi_label, description.arguments)


def model_name(model: nn.Module) -> str:
    """The name that a model is registered under, in this library or in timm."""
    return _pretrained_cfg(model)["architecture"]


def is_sized(name: str) -> bool:
    """Whether a model is built for one size of images. timm's convolutional networks are not, and refuse `img_size`."""
    described = timm.models.get_pretrained_cfg(name)
    return described is None or described.fixed_input_size


def _pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """timm's description of the published model. timm's builder stores it in every model."""
    return model.pretrained_cfg  # type: ignore[return-value]


def preprocessing(config: DataConfig) -> str:
    """The value of "preprocessing" in the metadata of a weights file: how its images are prepared."""
    return json.dumps({key: getattr(config, key) for key in PREPARATION})


def _preparation(model: nn.Module, saved: dict[str, Any], *, in_chans: int) -> DataConfig:
    """saved: settings from the weights file, which replace those of the published model."""
    known = {key: saved[key] for key in PREPARATION if key in saved}  # older files have more keys
    check_values(annotations_of(DataConfig, PREPARATION), known)
    cfg = _pretrained_cfg(model)
    squashed = "resize" if cfg["crop_pct"] >= 1 else "published"
    own = dict(
        mean=list(cfg["mean"]) if in_chans == 3 else None,
        std=list(cfg["std"]) if in_chans == 3 else None,
        interpolation=cfg["interpolation"],
        eval_transform=squashed if cfg["crop_mode"] == "squash" else "timm",
        crop_pct=cfg["crop_pct"],
    )
    config = DataConfig(**{**own, **known}, in_chans=in_chans)
    config.validate()
    return config


def class_descriptions(names: Sequence[str]) -> list[str]:
    """WordNet's descriptions of the WordNet numbers among class names; "" for other names"""
    imagenet = ImageNetInfo()

    def describe(name: str) -> str:
        try:
            return imagenet.label_name_to_description(name)  # knows all WordNet numbers, not only the thousand
        except KeyError:
            return ""

    return [describe(name) for name in names]


def _class_names(model: nn.Module, saved: list[str] | None) -> list[str] | None:
    num_classes: int = model.num_classes  # type: ignore[assignment]  # timm's contract
    if saved is None:
        return ImageNetInfo().label_names() if num_classes == 1000 else None
    if len(saved) != num_classes:
        raise ValueError(f"names {len(saved)} classes, but its model has {num_classes} outputs")
    return saved
