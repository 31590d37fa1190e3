"""The models of the page: one for each attention, trained or random."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inline_attention.data import DataConfig
from inline_attention.models.base import VisionModel
from inline_attention.models.shipped import shipped_models, shipped_weights
from inline_attention.models.weights import architecture
from inline_attention.tasks.classification.classifier import Classifier, load_classifier

# DeiT-T with each of the three attentions: a registered name, and arguments that differ from it.
DEIT_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax_deit_tiny", {}),
    "linear": ("inline_deit_tiny", {"attention": "linear"}),
    "inline": ("inline_deit_tiny", {}),
}


@dataclass(frozen=True)
class Subject:
    kind: str  # attention of the first block
    name: str  # in the registry
    model: VisionModel
    data: DataConfig  # its image size and normalisation
    weights: str | None  # the file's name; None: random
    class_names: list[str] | None = None  # None: the file does not name them


def load_subjects(weights: Sequence[str] = (), *, device: torch.device) -> list[Subject]:
    """Open a model for each file, and random models of the same architecture for the other attentions.

    Files must be safetensors that describe their model, as `inline train` writes them. Without files, those of the
    package are used.
    """
    loaded: dict[str, Subject] = {}
    for file in weights or [str(shipped_weights(name)) for name in shipped_models()]:
        subject = _load(file)
        if subject.kind in loaded:
            raise ValueError(
                f"{loaded[subject.kind].weights} and {subject.weights} both have {subject.kind} attention; "
                "expected one file for each attention"
            )
        loaded[subject.kind] = subject
    like = next(iter(loaded.values()), None)
    missing = {kind: _random(kind, like) for kind in DEIT_TINY if kind not in loaded}
    others = [kind for kind in loaded if kind not in DEIT_TINY]
    subjects = [(loaded | missing)[kind] for kind in (*DEIT_TINY, *others)]
    for subject in subjects:
        subject.model.to(device).eval().requires_grad_(False)
    return subjects


def _load(file: str) -> Subject:
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file {file!r}; expected weights that `inline train` wrote")
    classifier = load_classifier(None, str(path))
    return _subject(classifier, weights=path.name)


def _random(kind: str, like: Subject | None) -> Subject:
    """A random model with a fixed seed, so that the page is always the same."""
    if like is None:
        name, arguments = DEIT_TINY[kind]
    else:
        of_its_attention = ("feature_map", "local_residual")
        kept = {key: value for key, value in like.model.config.items() if key not in of_its_attention}
        name, arguments = like.name, {**kept, "attention": kind}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = load_classifier(name, None, arguments=arguments)
    if like is not None:
        classifier.data = like.data
    return _subject(classifier, weights=None)


def _subject(classifier: Classifier, *, weights: str | None) -> Subject:
    model = classifier.model
    assert isinstance(model, VisionModel)
    names = None if weights is None else classifier.class_names
    return Subject(model.attention[0][0], architecture(model), model, classifier.data, weights, names)
