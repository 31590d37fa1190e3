"""A trained classifier from a weights file: the model, the names of its classes, and how its images are prepared."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from timm.data import ImageNetInfo
from torch import nn

from inline_attention.data import DataConfig, EvalLoader
from inline_attention.models import create_model
from inline_attention.models._checkpoint import errors_name, open_checkpoint
from inline_attention.models._download import local_path
from inline_attention.models.base import VisionModel, to_pair
from inline_attention.models.registry import find_family
from inline_attention.models.schema import annotations_of, check_values, read_description
from inline_attention.models.shipped import shipped_weights
from inline_attention.models.weights import restore


@dataclass
class Classifier:
    """A model with what is needed to show it images and to read its answers."""

    model: nn.Module
    class_names: list[str] | None  # None: neither the file nor the class count tells
    data: DataConfig  # img_size, channels, normalisation and evaluation transform


def load_classifier(
    name: str | None,
    weights: str | None,
    *,
    img_size: Sequence[int] | None = None,
    eval_transform: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Classifier:
    """Builds the model of a weights file (a path, a URL, or "pretrained") and loads it. None: an untrained model.

    A file of this library says which model it is for, with which arguments that was built, which classes it knows and
    how its images were prepared. An official checkpoint is recognised by its shapes. `name` is needed for any other
    file; it may be a model of timm. `img_size`, `eval_transform` and `arguments` of the model replace the file's.
    """
    if weights == "pretrained" and name is not None and (shipped := shipped_weights(name)):
        weights = str(shipped)  # a file of the package, which names its classes
    options = dict(arguments or {})
    said = None
    if weights is None or weights == "pretrained":
        if name is None:
            raise ValueError("there is neither a model nor a weights file: give the name of one")
        if img_size is not None:
            options["img_size"] = list(img_size)
        model = create_model(name, pretrained=weights == "pretrained", **options)
    else:
        path = local_path(weights)
        checkpoint = open_checkpoint(path)
        if img_size is not None and name is not None and find_family(name) is None:
            options["img_size"] = list(img_size)
        model = restore(checkpoint, origin=str(path), name=name, arguments=options)
        said = read_description(checkpoint.info)
        if img_size is not None and isinstance(model, VisionModel):
            model.set_input_size(img_size)
    origin = weights or str(name)
    in_chans = model.in_chans if isinstance(model, VisionModel) else options.get("in_chans", 3)
    with errors_name(origin):
        data = _preparation(model, said.preprocessing if said else {}, in_chans=in_chans)
        data = replace(data, img_size=_input_size(model, options), in_chans=in_chans)
        class_names = _class_names(model, said.class_names if said else None)
    if eval_transform is not None:
        data = replace(data, eval_transform=eval_transform)
    return Classifier(model, class_names, data)


def model_name(model: nn.Module) -> str:
    """The name that a model is registered under, in this library or in timm."""
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's builder sets it
    return cfg["architecture"]


def _input_size(model: nn.Module, arguments: Mapping[str, Any]) -> list[int]:
    if isinstance(model, VisionModel):
        return list(model.img_size)
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's description of the published model
    return list(to_pair(arguments.get("img_size", cfg["input_size"][1:])))


def preprocessing(config: DataConfig) -> str:
    """What a weights file should say about the images it was evaluated with, under the key "preprocessing"."""
    return json.dumps({key: getattr(config, key) for key in _PREPARATION})


_PREPARATION = ("mean", "std", "interpolation", "eval_transform", "crop_pct")
assert set(_PREPARATION) <= {field.name for field in fields(DataConfig)}


def _preparation(model: nn.Module, saved: dict[str, Any], *, in_chans: int) -> DataConfig:
    if saved:
        known = {key: saved[key] for key in _PREPARATION if key in saved}  # older files say more
        check_values(annotations_of(DataConfig, _PREPARATION), known)
        config = DataConfig(**known, in_chans=in_chans)
        config.validate()
        return config
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's description of the published model
    squashed = "resize" if cfg["crop_pct"] >= 1 else "published"
    return DataConfig(
        mean=list(cfg["mean"]) if in_chans == 3 else None,
        std=list(cfg["std"]) if in_chans == 3 else None,
        interpolation=cfg["interpolation"],
        eval_transform=squashed if cfg["crop_mode"] == "squash" else "timm",
        crop_pct=cfg["crop_pct"],
    )


def _class_names(model: nn.Module, saved: list[str] | None) -> list[str] | None:
    num_classes: int = model.num_classes  # type: ignore[assignment]  # timm's contract
    if saved is None:
        return ImageNetInfo().label_names() if num_classes == 1000 else None
    if len(saved) != num_classes:
        raise ValueError(f"names {len(saved)} classes, its model has {num_classes} outputs")
    return saved


class Guess(NamedTuple):
    """One class, and how probable the model finds it."""

    label: int
    name: str  # the class as the weights file has it; the label where it names none
    description: str  # "tench, Tinca tinca" for a WordNet number such as n01440764; "" otherwise
    probability: float


class Prediction(NamedTuple):
    """What a model sees in one image."""

    sample: int  # the image's number in the loader
    guesses: list[Guess]  # the most probable first


@torch.no_grad()
def predict(
    classifier: Classifier,
    loader: EvalLoader,
    *,
    device: torch.device,
    topk: int,
    amp_dtype: torch.dtype | None = None,
) -> Iterator[Prediction]:
    """The `topk` most probable classes of every image that can be read (all of them where there are fewer)."""
    loader.to(device)
    model = classifier.model.to(device).eval()
    names = classifier.class_names or [str(label) for label in range(model.num_classes)]  # type: ignore[arg-type]  # timm's contract
    descriptions = _descriptions(names)
    for batch in loader:
        if len(batch.images) == 0:  # none of them could be read
            continue
        with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            logits = model(batch.images)
        probabilities = logits.float().softmax(dim=1)
        best = probabilities.topk(min(topk, len(names)), dim=1)
        columns = (batch.sample_ids.tolist(), best.indices.tolist(), best.values.tolist())
        for sample, labels, values in zip(*columns, strict=True):
            ranked = zip(labels, values, strict=True)
            yield Prediction(sample, [Guess(label, names[label], descriptions[label], p) for label, p in ranked])


def _descriptions(names: Sequence[str]) -> list[str]:
    imagenet = ImageNetInfo()

    def describe(name: str) -> str:
        try:
            return imagenet.label_name_to_description(name)  # knows all WordNet numbers, not only the thousand
        except KeyError:
            return ""

    return [describe(name) for name in names]
