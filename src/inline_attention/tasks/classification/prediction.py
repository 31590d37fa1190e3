"""The most probable classes of images, by a trained classifier."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inline_attention.data import EvalLoader
from inline_attention.tasks.classification.classifier import Classifier, class_descriptions, model_name


class Guess(NamedTuple):
    """One class and its probability."""

    label: int
    name: str  # from the weights file; the label if the file names no classes
    description: str  # "tench, Tinca tinca" for a WordNet number such as n01440764; "" otherwise
    probability: float


class Prediction(NamedTuple):
    """The most probable classes of one image."""

    sample: int  # the image's number in the loader
    guesses: list[Guess]  # the most probable first


@torch.no_grad()
def predict(
    classifier: Classifier,
    loader: EvalLoader,
    *,
    device: torch.device,
    topk: int | None = None,
    threshold: float | None = None,
    amp_dtype: torch.dtype | None = None,
) -> Iterator[Prediction]:
    """Yield the most probable classes of every readable image.

    Args:
        topk: number of classes. None: all of them.
        threshold: leave out classes below this probability.
    """
    model: Any = classifier.model.to(device).eval()  # timm's contract
    if not model.num_classes:
        raise ValueError(f"{model_name(model)} has no classifier (num_classes=0), so it predicts no classes")
    loader.to(device)
    names = classifier.class_names or [str(label) for label in range(model.num_classes)]
    descriptions = class_descriptions(names)
    for batch in loader:
        if len(batch.images) == 0:  # none of them could be read
            continue
        with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            logits = model(batch.images)
        if not logits.isfinite().all():
            raise ValueError("the model's outputs are not finite: its weights have diverged, or need --precision fp32")
        guesses = best_guesses(logits, names, descriptions, topk=topk, multi_label=classifier.multi_label)
        for sample, ranked in zip(batch.sample_ids.tolist(), guesses, strict=True):
            yield Prediction(sample, [guess for guess in ranked if guess.probability >= (threshold or 0)])


def best_guesses(
    logits: Tensor,
    names: Sequence[str],
    descriptions: Sequence[str],
    *,
    topk: int | None,
    multi_label: bool = False,
) -> list[list[Guess]]:
    """The classes of each image: logits (B, classes) → B lists, the most probable first"""
    probabilities = logits.float().sigmoid() if multi_label else logits.float().softmax(dim=1)
    best = probabilities.topk(min(topk or len(names), len(names)), dim=1)
    return [
        [Guess(label, names[label], descriptions[label], p) for label, p in zip(labels, values, strict=True)]
        for labels, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
