"""Models and images for the analyses, opened by name and by file."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import yaml
from torch import Tensor

from inline_attention.data import EvalLoader, open_eval_data, open_files
from inline_attention.data.samples import sample_photographs
from inline_attention.data.sources import find_images
from inline_attention.models.shipped import shipped_models
from inline_attention.tasks.classification.classifier import load_classifier, model_name

from .base import Subject, label_subjects
from .hooks import attention_kinds

DEFAULT_MODEL = "inline_deit_tiny"  # untrained; used if the package has no weights


def open_subjects(
    models: Sequence[str] = (),
    weights: Sequence[str] = (),
    *,
    data: str | None = None,
    images: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    split: str = "val",
    max_images: int | None = None,
    img_size: Sequence[int] | None = None,
    batch_size: int = 8,
    workers: int | None = None,
    device: torch.device | str = "cpu",
) -> list[Subject]:
    """Open the models, each with a loader of images prepared for it.

    Args:
        models: NAME,key=value,… of each, a name of this library or of timm. Without models, those of the weights files,
            else those that come with the package.
        weights: a file, a URL, "pretrained" or "none" for each model.
        data: images with known classes, as `DataConfig.path` takes them.
        images: files or folders, without classes. Without data and images, two photographs of the package are used.
        labels: names of the models in figures; None for their own.
        max_images: largest number of images, evenly spaced in `data`.
    """
    if max_images is not None and max_images < 1:
        raise ValueError(f"--max-images is {max_images}; expected at least 1")
    subjects = []
    for spec, file in _pairs(models, weights):
        torch.manual_seed(0)  # untrained models are the same in every run
        name, arguments = parse_model(spec)
        classifier = load_classifier(name, file, img_size=img_size, arguments=arguments)
        config = classifier.data
        config.batch_size, config.workers = batch_size, workers
        if data is not None:
            config.path, config.val_split = data, split
            # Labels are matched to the model's class names. An untrained model has none.
            class_names = classifier.class_names if file else None
            loader = open_eval_data(config, class_names=class_names, max_images=max_images)
            loader.check_one_label("an analysis with --data")
        else:
            paths = find_images(images) if images else sample_photographs()
            config.workers, config.max_broken = config.workers or 0, len(paths)
            loader = open_files(paths, config=config)
        loader.to(torch.device(device))
        count = min(loader.num_images, max_images or loader.num_images)
        facts = dict(
            model=model_name(classifier.model),
            weights=file or "none: as initialised",
            attention=", ".join(attention_kinds(classifier.model)),
            img_size="×".join(map(str, config.size)),
            images=count,
        )
        batches = partial(first_batches, loader, count, labelled=bool(data and file))
        mean, std = config.statistics
        subjects.append(Subject(classifier.model.to(device).eval(), batches, mean, std, facts))
    return label_subjects(subjects, labels)


def _pairs(models: Sequence[str], weights: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """(model, weights file). None as the model: that of the file. None as the file: an untrained model."""
    files: list[str | None] = [None if file == "none" else file for file in weights]
    names: list[str | None] = [*models]
    if not names and files:
        names = [None] * len(files)
    elif not names and (shipped := shipped_models()):
        names, files = [*shipped], ["pretrained"] * len(shipped)
    names = names or [DEFAULT_MODEL]
    files = files or [None] * len(names)
    if len(files) != len(names):
        raise ValueError(f"there are {len(names)} models and {len(files)} weights; give 'none' for an untrained one")
    return list(zip(names, files, strict=True))


def first_batches(loader: EvalLoader, count: int, *, labelled: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
    """`count` images of a loader, with their labels if the model knows the classes."""
    left = count
    for batch in loader:
        images, targets = batch.images[:left], batch.targets[:left]
        left -= len(images)
        if len(images):  # all of a batch may be unreadable
            yield images, targets if labelled else None
        if left <= 0:
            return


def parse_model(spec: str | None) -> tuple[str | None, dict[str, Any]]:
    """NAME,key=value,… → the name and the arguments; values are YAML"""
    if spec is None:
        return None, {}
    name, *settings = spec.split(",")
    arguments = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"model {spec!r}: expected NAME,key=value,… such as {DEFAULT_MODEL},attention=linear")
        arguments[key] = yaml.safe_load(value)
    return name, arguments
