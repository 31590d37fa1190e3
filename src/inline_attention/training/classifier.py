"""A trained classifier from a weights file: the model, the names of its classes, and how its images are prepared."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.data import ImageNetInfo
from torch import nn

from inline_attention.data import DataConfig, EvalLoader
from inline_attention.models import create_model
from inline_attention.models._base import VisionModel, to_pair
from inline_attention.models.shipped import shipped_weights

# What a weights file says about itself, in the metadata that `save_weights` writes; JSON where it is not a name.
ARCHITECTURE, MODEL_ARGUMENTS, CLASS_NAMES, PREPROCESSING = "architecture", "config", "class_names", "preprocessing"


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
    """Build model `name` for the weights (a file, a URL, or "pretrained") and load them; None leaves it untrained.

    A file of this library says which model it is for (so that `name` may be None), with which arguments that was
    built, which classes it knows and how its images were prepared; other files are taken for published ones.
    `img_size`, `eval_transform` and `arguments` of the model override the file's. Models of timm are built, and their
    files read, by timm.
    """
    from inline_attention.models.weights import load_weights, local_path, read_metadata

    if weights == "pretrained" and name is not None and (shipped := shipped_weights(name)):
        weights = str(shipped)  # a file of the package, which names its classes
    path = None if weights in (None, "pretrained") else local_path(weights)
    # Official pickles have no metadata of this kind.
    metadata = read_metadata(path) if path is not None and path.suffix == ".safetensors" else {}
    name = name or metadata.get(ARCHITECTURE)
    if name is None:
        raise ValueError(f"{weights!r} does not say which model it is for; name the model")
    architecture = metadata.get(ARCHITECTURE, name)
    if architecture != name:
        raise ValueError(f"{weights!r} holds weights of {architecture}, not of {name}")
    options: dict[str, Any] = {**json.loads(metadata.get(MODEL_ARGUMENTS, "{}")), **(arguments or {})}
    if img_size is not None:
        options["img_size"] = list(img_size)
    model = create_model(name, pretrained=weights == "pretrained", **options)
    if path is not None and isinstance(model, VisionModel):
        load_weights(model, path)
    elif path is not None:
        _load_timm(model, path)
    in_chans = options.get("in_chans", 3)
    data = _preparation(model, json.loads(metadata.get(PREPROCESSING, "{}")), in_chans=in_chans)
    data = replace(data, img_size=_input_size(model, options), in_chans=in_chans)
    if eval_transform is not None:
        data = replace(data, eval_transform=eval_transform)
    return Classifier(model, _class_names(model, metadata.get(CLASS_NAMES), weights=weights or name), data)


def _load_timm(model: nn.Module, path: Path) -> None:
    try:
        timm.models.load_checkpoint(model, str(path))
    except RuntimeError as error:  # what PyTorch raises for names and shapes that differ
        raise ValueError(f"{path} does not fit {type(model).__name__}: {' '.join(str(error).split())[:300]}") from error


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
        return DataConfig(**{key: saved[key] for key in _PREPARATION if key in saved})
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's description of the published model
    squashed = "resize" if cfg["crop_pct"] >= 1 else "published"
    return DataConfig(
        mean=list(cfg["mean"]) if in_chans == 3 else None,
        std=list(cfg["std"]) if in_chans == 3 else None,
        interpolation=cfg["interpolation"],
        eval_transform=squashed if cfg["crop_mode"] == "squash" else "timm",
        crop_pct=cfg["crop_pct"],
    )


def _class_names(model: nn.Module, saved: str | None, *, weights: str) -> list[str] | None:
    num_classes: int = model.num_classes  # type: ignore[assignment]  # timm's contract
    if saved is None:
        return ImageNetInfo().label_names() if num_classes == 1000 else None
    names = json.loads(saved)
    if len(names) != num_classes:
        raise ValueError(f"{weights!r} names {len(names)} classes, its model has {num_classes} outputs")
    return names


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
def predict(classifier: Classifier, loader: EvalLoader, *, device: torch.device, topk: int) -> Iterator[Prediction]:
    """The `topk` most probable classes of every image that can be read (all of them where there are fewer)."""
    loader.to(device)
    model = classifier.model.to(device).eval()
    names = classifier.class_names or [str(label) for label in range(model.num_classes)]  # type: ignore[arg-type]  # timm's contract
    descriptions = _descriptions(names)
    for batch in loader:
        if len(batch.images) == 0:  # none of them could be read
            continue
        probabilities = model(batch.images).float().softmax(dim=1)
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
