"""What a trained model's predictions rest on: its residual, its attention, or neither.

The weights stay as they are. Parts of every block are taken away, and predictions are compared image by image.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inline_attention.data import EvalLoader, open_eval_data
from inline_attention.layers import Attention
from inline_attention.ops import Grid, local_residual
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import zero_absent
from inline_attention.tasks.classification.classifier import load_classifier
from study.intervals import bootstrap

IMAGES = 1000  # evenly spaced in the validation split
SHIPPED = "inline_deit_study"


class Row(NamedTuple):
    title: str
    images: int
    top1: float
    lost: float  # points of top-1, against the whole model
    lost_interval: tuple[float, float]  # 95 %, over images
    changed: float  # predictions, in per cent
    changed_interval: tuple[float, float]


def attend_to_all_alike(
    self: Attention,
    projections: Sequence[Tensor],
    *,
    grid: Grid,
    token_mask: Tensor | None,
    local_weight: Tensor | None,
    **_: Any,
) -> Tensor:
    """`Attention.attend` with the mean of all values instead of attention."""
    v = zero_absent(unstack(projections)[2], token_mask)
    tokens = v.shape[1] if token_mask is None else token_mask.sum(1)[:, None, None, None]
    out = (v.sum(1, keepdim=True) / tokens).expand_as(v)
    if local_weight is None:
        return out
    layout: dict[str, Any] = dict(grid=grid, num_prefix_tokens=self.num_prefix_tokens, token_mask=token_mask)
    return out + local_residual(v, local_weight, **layout)


@contextmanager
def ablated(model: nn.Module, *, residual: bool, attention: bool) -> Iterator[None]:
    """Inside the block, the named parts of every attention are missing."""
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    kept = [module.local for module in modules]
    for module in modules:
        if residual:
            module.local = None
        if attention:
            module.attend = types.MethodType(attend_to_all_alike, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, local in zip(modules, kept, strict=True):
            module.local = local
            module.__dict__.pop("attend", None)


WITHOUT_RESIDUAL, SPREAD_EVENLY = "without the residual", "attention spread evenly"
CONDITIONS = {
    "the whole model": dict(residual=False, attention=False),
    WITHOUT_RESIDUAL: dict(residual=True, attention=False),
    SPREAD_EVENLY: dict(residual=False, attention=True),
    "without both": dict(residual=True, attention=True),
}


def open_model(
    name: str | None, weights: str, *, path: str, device: torch.device, images: int, batch_size: int
) -> tuple[nn.Module, EvalLoader]:
    """A trained classifier, and `images` of its validation images, evenly spaced."""
    classifier = load_classifier(name, weights)
    config = classifier.data
    config.path, config.batch_size, config.workers, config.in_memory = path, batch_size, 0, True
    loader = open_eval_data(config, class_names=classifier.class_names, max_images=images)
    loader.to(device)
    return classifier.model.to(device).eval(), loader


def ablate(model: nn.Module, loader: EvalLoader, *, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Accuracy and changed predictions for each part that is taken away. A model without residual has fewer rows."""
    has_residual = any(isinstance(module, Attention) and module.local is not None for module in model.modules())
    rows: list[Row] = []
    whole: tuple[np.ndarray, np.ndarray] | None = None  # predictions, correct
    for title, parts in CONDITIONS.items():
        if parts["residual"] and not has_residual:
            continue
        with ablated(model, **parts), torch.inference_mode():
            found = [(model(batch.images).argmax(1).cpu(), batch.targets.cpu()) for batch in loader]
        predicted, targets = (torch.cat(column).numpy() for column in zip(*found, strict=True))
        correct = predicted == targets
        whole = whole or (predicted, correct)
        lost, changed = 100.0 * (whole[1].astype(float) - correct), 100.0 * (predicted != whole[0])
        rows.append(
            Row(title, len(correct), 100 * float(correct.mean()), lost.mean(), _interval(lost), changed.mean(),
                _interval(changed))
        )  # fmt: skip
        on_row(rows[-1])
    return rows


def _interval(by_image: np.ndarray) -> tuple[float, float]:
    low, high = bootstrap(by_image)
    return float(low), float(high)
