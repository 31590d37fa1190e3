"""A trained classifier from a weights file: the model, the names of its classes, and how its images are prepared."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from timm.data import ImageNetInfo
from torch import nn

from inline_attention.data import DataConfig, EvalLoader
from inline_attention.models import create_model

# What a weights file says about itself, in the metadata that `save_weights` writes; JSON where it is not a name.
ARCHITECTURE, MODEL_ARGUMENTS, CLASS_NAMES, PREPROCESSING = "architecture", "config", "class_names", "preprocessing"


@dataclass
class Classifier:
    model: nn.Module
    class_names: list[str] | None  # None: neither the file nor the class count tells
    data: DataConfig  # img_size, channels, normalisation and evaluation transform


def load_classifier(
    name: str, weights: str, *, img_size: Sequence[int] | None = None, eval_transform: str | None = None
) -> Classifier:
    """Build model `name` for the weights (a file, a URL, or "pretrained") and load them.

    A file of this library says with which arguments its model was built, which classes it knows and how its images
    were prepared; other files are taken for published ones. `img_size` and `eval_transform` override the file's.
    """
    from inline_attention.models.weights import load_weights, local_path, read_metadata

    path = None if weights == "pretrained" else local_path(weights)
    # Official pickles have no metadata of this kind.
    metadata = read_metadata(path) if path is not None and path.suffix == ".safetensors" else {}
    architecture = metadata.get(ARCHITECTURE, name)
    if architecture != name:
        raise ValueError(f"{weights!r} holds weights of {architecture}, not of {name}")
    arguments: dict[str, Any] = json.loads(metadata.get(MODEL_ARGUMENTS, "{}"))
    if img_size is not None:
        arguments["img_size"] = list(img_size)
    model = create_model(name, pretrained=path is None, **arguments)
    if path is not None:
        load_weights(model, path)
    data = _preparation(model, json.loads(metadata.get(PREPROCESSING, "{}")))
    data = replace(data, img_size=list(model.img_size), in_chans=model.in_chans)  # type: ignore[arg-type]  # VisionModel
    if eval_transform is not None:
        data = replace(data, eval_transform=eval_transform)
    return Classifier(model, _class_names(model, metadata.get(CLASS_NAMES), weights=weights), data)


def preprocessing(config: DataConfig) -> str:
    """What a weights file should say about the images it was evaluated with, under the key "preprocessing"."""
    return json.dumps({key: getattr(config, key) for key in _PREPARATION})


_PREPARATION = ("mean", "std", "interpolation", "eval_transform", "crop_pct", "exif_rotation")
assert set(_PREPARATION) <= {field.name for field in fields(DataConfig)}


def _preparation(model: nn.Module, saved: dict[str, Any]) -> DataConfig:
    if saved:
        return DataConfig(**{key: saved[key] for key in _PREPARATION if key in saved})
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's description of the published model
    squashed = "resize" if cfg["crop_pct"] >= 1 else "published"
    return DataConfig(
        mean=list(cfg["mean"]) if model.in_chans == 3 else None,
        std=list(cfg["std"]) if model.in_chans == 3 else None,
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
    label: int
    name: str  # the class as the weights file has it; the label where it names none
    description: str  # "tench, Tinca tinca" for a WordNet number such as n01440764; "" otherwise
    probability: float


class Prediction(NamedTuple):
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
