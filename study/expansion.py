"""Softmax attention replaced by its expansions in a trained model, without any training.

The weights of `softmax_deit_study` are used as they are. Only the attention of every block changes.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from inline_attention import linearize
from inline_attention.cli._output import image_progress
from inline_attention.data import open_eval_data
from inline_attention.tasks.classification.classifier import load_classifier
from inline_attention.tasks.classification.evaluation import evaluate

TEACHER = "softmax_deit_study"
# The file of the tables in docs/. It stays the teacher when another model is shipped under that name.
TEACHER_SHA256 = "3611ff04ba59fe6d8af0980ef33b0d936f6a9e0b67d98f4ee86f4716fa1c6a68"

ROWS = {  # title: attention, anchors
    "softmax": ("softmax", 1),
    "linear (ReLU)": ("linear", 1),
    "InLine, the tangent at zero": ("inline", 1),
    "tangent at the mean query": ("tangent", 1),
    "tangent at 4 anchors": ("tangent", 4),
    "tangent at 16 anchors": ("tangent", 16),
}


class Row(NamedTuple):
    title: str
    attention: str
    anchors: int
    images: int
    top1: float
    top5: float


def check_teacher() -> None:
    content = files("inline_attention.models.study").joinpath(f"{TEACHER}.safetensors").read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != TEACHER_SHA256:
        raise ValueError(f"{TEACHER} has the SHA-256 {found}; expected {TEACHER_SHA256}, the teacher of the tables")


def carry_over(teacher: nn.Module, attention: str, anchors: int) -> nn.Module:
    """A copy of the teacher with another attention and no local residual."""
    model = deepcopy(teacher)
    if attention != "softmax":
        linearize(model, attention=attention, anchors=anchors, local_residual=False)
    return model.eval()


def read_rows(path: Path) -> list[Row]:
    """The rows of a table that was written before. None if there is no file. ValueError if it is another table."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        teacher, rows = content["teacher"], [Row(**row) for row in content["rows"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is not a table of `python -m study expansion`: {error!r}; name another file"
        ) from error
    if teacher != TEACHER_SHA256:
        raise ValueError(f"{path} is the table of the teacher {teacher}; expected {TEACHER_SHA256}: name another file")
    return rows


def evaluate_rows(
    data: str, *, device: torch.device, batch_size: int, workers: int, known: Iterable[Row] = ()
) -> Iterator[Row]:
    """Yields the accuracy of each row as soon as it is known, and the known rows at once."""
    check_teacher()
    found = {row.title: row for row in known}
    classifier = load_classifier(TEACHER, "pretrained")
    config = classifier.data
    config.path, config.batch_size, config.workers = data, batch_size, workers
    for title, (attention, anchors) in ROWS.items():
        if title in found:
            yield found[title]
            continue
        model = carry_over(classifier.model, attention, anchors).to(device)
        loader = open_eval_data(config, class_names=classifier.class_names)
        with image_progress(title, total=loader.num_images) as on_images:
            result = evaluate(model, loader, device=device, on_images=on_images)
        yield Row(title, attention, anchors, result.images, result.top1, result.top5)
