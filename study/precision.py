"""What half precision changes in the predictions of the package's models.

Under autocast the matrix products are in half precision, and the residual stream, to which every block adds, stays in
float32. A model whose weights are cast has its stream in half precision too.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_attention.data import EvalLoader

MODELS = ("softmax_deit_study", "linear_deit_study", "inline_deit_study")
HALF = torch.bfloat16


class Condition(NamedTuple):
    title: str
    dtype: torch.dtype  # of weights and stream
    autocast: bool = False


EXACT = Condition("float64", torch.float64)
CONDITIONS = (
    Condition("float32", torch.float32),
    Condition("bf16 products, float32 stream", torch.float32, autocast=True),
    Condition("bf16 weights and stream", HALF),
)


class Row(NamedTuple):
    model: str
    condition: str
    images: int
    top1: float
    changed: float  # predictions that differ from those in float64, in per cent
    error: float  # ‖logits − float64‖ / ‖float64‖


def measure(
    name: str, model: nn.Module, loader: EvalLoader, *, on_row: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """A row for each condition, on the same images."""
    targets = torch.cat([batch.targets.cpu() for batch in loader])
    exact = logits_of(model, loader, EXACT)
    rows = []
    for condition in CONDITIONS:
        found = logits_of(model, loader, condition)
        predicted = found.argmax(1)
        top1, changed = (
            100 * same.double().mean().item() for same in (predicted == targets, predicted != exact.argmax(1))
        )
        error = ((found - exact).norm() / exact.norm()).item()
        rows.append(Row(name, condition.title, len(targets), top1, changed, error))
        on_row(rows[-1])
    return rows


@torch.inference_mode()
def logits_of(model: nn.Module, loader: EvalLoader, condition: Condition) -> Tensor:
    """(images, classes) float64 on the CPU"""
    model = deepcopy(model).to(condition.dtype)
    rows = []
    for batch in loader:
        with torch.autocast(batch.images.device.type, HALF, enabled=condition.autocast):
            rows.append(model(batch.images.to(condition.dtype)).double().cpu())
    return torch.cat(rows)
