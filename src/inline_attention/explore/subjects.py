"""The models of the page: one for each attention, trained or random, or a linearised model and its teacher."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inline_attention.analysis import layer_names, observe
from inline_attention.analysis.hooks import attention_kinds
from inline_attention.data import DataConfig
from inline_attention.linearize import Linearization, restore
from inline_attention.models.base import VisionModel
from inline_attention.models.shipped import shipped_models, shipped_weights
from inline_attention.tasks.classification.classifier import Classifier, load_classifier, model_name

# DeiT-T with each of the three attentions: a registered name, and arguments that differ from it.
DEIT_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax_deit_tiny", {}),
    "linear": ("inline_deit_tiny", {"attention": "linear"}),
    "inline": ("inline_deit_tiny", {}),
}


@dataclass(frozen=True)
class Subject:
    kind: str  # attention of the first block
    name: str  # in the registry, or timm's
    model: nn.Module
    data: DataConfig  # its image size and normalisation
    weights: str | None  # the file's name; None: random
    class_names: list[str] | None = None  # None: the file does not name them
    title: str | None = None  # None: that of the attention
    multi_label: bool = False  # an image may have several classes


def load_subjects(weights: Sequence[str] = (), *, device: torch.device) -> list[Subject]:
    """Open a model for each file, and random models of the same architecture for the other attentions.

    Files must be safetensors that describe their model, as `inline train` and `inline linearize` write them. Without
    files, those of the package are used. Beside a linearised model stands its teacher, and no random model: a softmax
    model among the files, or else the same file with softmax put back.
    """
    files = [_open(file) for file in weights or [str(shipped_weights(name)) for name in shipped_models()]]
    students = [subject for subject in files if _is_linearized(subject.model)]
    if len(students) > 1:
        names = " and ".join(str(student.weights) for student in students)
        raise ValueError(f"{names} are linearised; expected one such file, which is shown beside its teacher")
    loaded: dict[str, Subject] = {}
    for subject in files:
        if subject in students:
            continue
        if subject.kind in loaded:
            raise ValueError(
                f"{loaded[subject.kind].weights} and {subject.weights} both have {subject.kind} attention; "
                "expected one file for each attention"
            )
        loaded[subject.kind] = subject
    if students:
        (student,) = students
        given = loaded.pop("softmax", None)
        teacher = _softmax_put_back(weights[files.index(student)]) if given is None else given
        subjects = [*filter(None, [teacher]), student, *loaded.values()]
    else:
        like = next((subject for subject in loaded.values() if isinstance(subject.model, VisionModel)), None)
        missing = {kind: _random(kind, like) for kind in DEIT_TINY if kind not in loaded}
        others = [kind for kind in loaded if kind not in DEIT_TINY]
        subjects = [(loaded | missing)[kind] for kind in (*DEIT_TINY, *others)]
    for subject in subjects:
        subject.model.to(device).eval().requires_grad_(False)
    return subjects


def _is_linearized(model: nn.Module) -> bool:
    return isinstance(getattr(model, "linearization", None), Linearization)


def _load(file: str) -> tuple[Classifier, str]:
    """The model of a file, and the file's name"""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file {file!r}; expected weights that `inline train` wrote")
    return load_classifier(None, str(path)), path.name


def _open(file: str) -> Subject:
    classifier, name = _load(file)
    model: Any = classifier.model
    if not layer_names(model):
        raise ValueError(f"{name} holds a {model_name(model)}, whose attention cannot be written out")
    subject = _subject(classifier, weights=name)
    if not _is_linearized(model):
        return subject
    data = classifier.data
    try:
        observe(model, torch.zeros(1, data.in_chans, *data.size), lambda record: None)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    form = model.linearization.form
    return replace(subject, kind=form.attention, title=f"Linearised: {form}")


def _softmax_put_back(file: str) -> Subject | None:
    """A linearised model as it was before; None if its softmax attention cannot be written out."""
    classifier, name = _load(file)
    restore(classifier.model)
    if not layer_names(classifier.model):
        return None
    return replace(_subject(classifier, weights=name), title="Softmax put back")


def _random(kind: str, like: Subject | None) -> Subject:
    """A random model with a fixed seed, so that the page is always the same."""
    if like is None:
        name, arguments = DEIT_TINY[kind]
    else:
        of_its_attention = ("feature_map", "local_residual")
        assert isinstance(like.model, VisionModel)
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
    names = None if weights is None else classifier.class_names
    kind, several = attention_kinds(model)[0], classifier.multi_label
    return Subject(kind, model_name(model), model, classifier.data, weights, names, multi_label=several)
