"""Softmax attention replaced by its expansions in a trained model, without any training.

The weights of `softmax_deit_study` are used as they are. Only the attention of every block changes. Two of the rows are
there for comparison and are no attentions of the library: the expansion of second order at zero, computed as a matrix,
and clustered attention, which is of order zero at several anchors.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inline_attention import linearize
from inline_attention.cli._output import image_progress
from inline_attention.data import open_eval_data
from inline_attention.layers import Attention, SoftmaxAttention
from inline_attention.layers.registry import build_attention
from inline_attention.layers.tangent import find_anchors, take_rows
from inline_attention.ops import Grid
from inline_attention.ops.projections import unstack
from inline_attention.tasks.classification.classifier import Classifier, load_classifier
from inline_attention.tasks.classification.evaluation import evaluate

TEACHER = "softmax_deit_study"
# The file of the tables in docs/. It stays the teacher when another model is shipped under that name.
TEACHER_SHA256 = "3611ff04ba59fe6d8af0980ef33b0d936f6a9e0b67d98f4ee86f4716fa1c6a68"

ROWS = {  # title: attention, anchors
    "softmax": ("softmax", 1),
    "linear (ReLU)": ("linear", 1),
    "InLine, the tangent at zero": ("inline", 1),
    "second order at zero": ("taylor", 1),
    "16 centroids, order zero": ("centroids", 16),
    "tangent at the mean query": ("tangent", 1),
    "tangent at 4 anchors": ("tangent", 4),
    "tangent at 16 anchors": ("tangent", 16),
}


EVERY = 5  # one image of so many for the errors of layers


class Expansion(SoftmaxAttention):
    """Another attention in the place of softmax, with the same parameters."""

    anchors: int = 1


class TaylorAttention(Expansion):
    """Softmax attention as a function of the query, expanded to second order at the query zero.

    With c_ij = s·q_i·(k_j − k̄): out_i = v̄ + (1/N)·Σ_j (c_ij + c_ij²/2)·(v_j − v̄). The first order is InLine attention.
    """

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mean = v.mean(2, keepdim=True)
        scores = self.scale * q @ (k - k.mean(2, keepdim=True)).mT
        return (mean + (scores + scores.square() / 2) @ (v - mean) / k.shape[2]).transpose(1, 2)


class CentroidAttention(Expansion):
    """Clustered attention (arXiv 2007.04825): each query gets the softmax attention of its nearest anchor.

    The anchors are those of `TangentAttention`.
    """

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        anchors, nearest = find_anchors(q.transpose(1, 2), None, count=self.anchors)
        out = self.softmax_rows(anchors.transpose(1, 2), k, v, mask=None)
        return take_rows(out.transpose(1, 2), nearest).transpose(1, 2)


OF_THE_STUDY: dict[str, type[Expansion]] = {"taylor": TaylorAttention, "centroids": CentroidAttention}


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
    if attention in OF_THE_STUDY:
        for module in model.modules():
            if isinstance(module, SoftmaxAttention):
                module.__class__ = OF_THE_STUDY[attention]
                vars(module)["anchors"] = anchors
    elif attention != "softmax":
        linearize(model, attention=attention, anchors=anchors, local_residual=False)
    return model.eval()


class LayerErrors(NamedTuple):
    """How far an attention is from softmax in each block, on the teacher's own inputs.

    The squared difference of the outputs of all heads, relative to the squared deviation of softmax's outputs from the
    mean of the values: 1 is the error of v̄ for every query.
    """

    title: str
    images: int
    errors: list[float]  # by block


def read_table(path: Path) -> tuple[list[Row], list[LayerErrors]]:
    """What was written before: nothing if there is no file. ValueError if it is another table."""
    if not path.exists():
        return [], []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        teacher, rows = content["teacher"], [Row(**row) for row in content["rows"]]
        layers = [LayerErrors(**row) for row in content.get("layers", [])]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is not a table of `python -m study expansion`: {error!r}; name another file"
        ) from error
    if teacher != TEACHER_SHA256:
        raise ValueError(f"{path} is the table of the teacher {teacher}; expected {TEACHER_SHA256}: name another file")
    return rows, layers


def open_teacher(data: str, batch_size: int, workers: int) -> Classifier:
    check_teacher()
    classifier = load_classifier(TEACHER, "pretrained")
    classifier.data.path, classifier.data.batch_size, classifier.data.workers = data, batch_size, workers
    return classifier


def build_like(module: SoftmaxAttention, attention: str, anchors: int) -> Attention:
    """An attention without weights of its own, which takes the projections of a module"""
    dim = module.num_heads * module.head_dim
    options: dict[str, Any] = dict(num_prefix_tokens=module.num_prefix_tokens)
    if attention in OF_THE_STUDY:
        built = OF_THE_STUDY[attention](dim, module.num_heads, **options)
        built.anchors = anchors
        return built
    local_residual = None if attention == "softmax" else False
    return build_attention(attention, dim, module.num_heads, anchors=anchors, local_residual=local_residual, **options)


@torch.no_grad()
def compare_layers(model: nn.Module, batches: Iterable[Tensor]) -> list[LayerErrors]:
    """The errors of each row in each block of a softmax model"""
    layers = [module for module in model.modules() if isinstance(module, SoftmaxAttention)]
    forms = {title: build_like(layers[0], *choice).to(layers[0].qkv.weight.device) for title, choice in ROWS.items()}
    wrong = torch.zeros(len(ROWS), len(layers), dtype=torch.float64)
    size = torch.zeros(len(layers), dtype=torch.float64)

    def compare(layer: int, module: SoftmaxAttention, args: tuple[Tensor, Grid]) -> None:
        x, grid = args
        projections = module.project(x, grid)
        options: dict[str, Any] = dict(grid=grid, token_mask=None, local_weight=None)
        softmax = module.attend(projections, **options)
        size[layer] += float((softmax - unstack(projections)[2].mean(1, keepdim=True)).square().sum())
        for i, form in enumerate(forms.values()):
            wrong[i, layer] += float((form.attend(projections, **options) - softmax).square().sum())

    hooks = [
        module.register_forward_pre_hook(lambda module, args, layer=layer: compare(layer, module, args[:2]))
        for layer, module in enumerate(layers)
    ]
    images = 0
    for batch in batches:
        model(batch)
        images += len(batch)
    for hook in hooks:
        hook.remove()
    return [LayerErrors(title, images, (row / size).tolist()) for title, row in zip(ROWS, wrong, strict=True)]


def evaluate_layers(data: str, *, device: torch.device, batch_size: int, workers: int) -> list[LayerErrors]:
    """On one of `EVERY` images of each batch"""
    classifier = open_teacher(data, batch_size, workers)
    loader = open_eval_data(classifier.data, class_names=classifier.class_names)
    model = classifier.model.to(device).eval()
    return compare_layers(model, (batch.images[::EVERY].to(device) for batch in loader))


def evaluate_rows(
    data: str, *, device: torch.device, batch_size: int, workers: int, known: Iterable[Row] = ()
) -> Iterator[Row]:
    """Yields the accuracy of each row as soon as it is known, and the known rows at once."""
    found = {row.title: row for row in known}
    classifier = open_teacher(data, batch_size, workers)
    for title, (attention, anchors) in ROWS.items():
        if title in found:
            yield found[title]
            continue
        model = carry_over(classifier.model, attention, anchors).to(device)
        loader = open_eval_data(classifier.data, class_names=classifier.class_names)
        with image_progress(title, total=loader.num_images) as on_images:
            result = evaluate(model, loader, device=device, on_images=on_images)
        yield Row(title, attention, anchors, result.images, result.top1, result.top5)
