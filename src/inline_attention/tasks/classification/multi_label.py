"""Classifiers whose images may have several labels: mean average precision and F1 instead of accuracy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.data import Batch, EvalLoader
from inline_attention.tasks.classification.evaluation import LoaderResult, run_batches
from inline_attention.tasks.evaluation import check_readable, over_ranks

THRESHOLD = 0.5  # an image has the labels whose probability is at least this


@dataclass(frozen=True, kw_only=True)
class MultiLabelResult(LoaderResult):
    """Figures in per cent, and the binary cross-entropy."""

    map: float  # mean average precision over the labels that an image of the data has
    f1_micro: float  # F1 of all decisions together
    f1_macro: float  # mean of the F1 of each label, as scikit-learn: 0 for a label that is neither there nor found
    average_precision: Tensor  # (labels,), NaN for a label that no image has
    f1: Tensor  # (labels,)
    positives: Tensor  # (labels,) int64: images that have the label

    def summary(self) -> str:
        f1 = f"F1 {self.f1_micro:.3f}% micro, {self.f1_macro:.3f}% macro"
        return f"mAP {self.map:.3f}%  {f1}  loss {self.loss:.4f}"

    def class_table(self, names: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """The header and the rows of a table of the labels that an image has."""
        columns = zip(names, self.positives.tolist(), self.average_precision, self.f1, strict=True)
        rows = [(name, count, f"{precision:.4f}", f"{f1:.4f}") for name, count, precision, f1 in columns if count]
        return ("class", "images", "average_precision", "f1"), rows


@torch.no_grad()
def evaluate_multi_label(
    model: nn.Module,
    loader: EvalLoader,
    *,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    on_images: Callable[[int], None] | None = None,
) -> MultiLabelResult:
    """Precision of a model over a loader whose targets are zeros and ones (B, labels). See `evaluate`.

    Average precision needs the order of all scores, so they are kept in main memory: 4 bytes for each image and label.
    """
    if not loader.multi_label:
        raise ValueError("the data give one label for each image, and the model is for several; see docs/training.md")
    labels = len(loader.class_names)
    scores, targets = [torch.empty(0, labels)], [torch.empty(0, labels)]  # a rank may have no images

    def add(logits: Tensor, batch: Batch) -> None:
        scores.append(logits.cpu())
        targets.append(batch.targets.cpu())

    start = time.perf_counter()
    run_batches(model, loader, add, device=torch.device(device), amp_dtype=amp_dtype, on_images=on_images)
    parts = over_ranks((torch.cat(scores), torch.cat(targets).bool(), len(loader.skipped)))
    of_scores, of_targets, of_skipped = zip(*parts, strict=True)
    logits, truth, skipped = torch.cat(of_scores), torch.cat(of_targets), sum(of_skipped)
    seconds = time.perf_counter() - start
    check_readable(loader, images=len(logits), skipped=skipped)
    if not truth.any():
        raise ValueError(f"nothing to evaluate: none of the {len(logits)} images has a label")
    precision = torch.stack([average_precision(logits[:, label], truth[:, label]) for label in range(labels)])
    found = logits.sigmoid() >= THRESHOLD
    hits, wrong = (found & truth).sum(0), (found ^ truth).sum(0)
    f1 = _f1(hits, wrong)
    return MultiLabelResult(
        map=100 * float(precision.nanmean()),
        f1_micro=100 * float(_f1(hits.sum(), wrong.sum())),
        f1_macro=100 * float(f1.mean()),
        loss=float(F.binary_cross_entropy_with_logits(logits, truth.float())),
        images=len(logits),
        skipped=skipped,
        seconds=seconds,
        average_precision=precision,
        f1=f1,
        positives=truth.sum(0),
    )


def average_precision(scores: Tensor, truth: Tensor) -> Tensor:
    """The area under the precision–recall steps: scores (n,), truth (n,) bool → (); NaN if nothing is true.

    Images of equal score count together, so that their order does not matter.
    """
    scores, order = scores.sort(descending=True)
    hits = truth[order].cumsum(0)  # among the first 1 … n images
    last = scores.diff(append=scores.new_full((1,), torch.nan)) != 0  # of the images of equal score
    hits, ranks = hits[last], torch.arange(1, len(scores) + 1)[last]
    new = hits.diff(prepend=hits.new_zeros(1))
    return (new * hits / ranks).sum() / hits[-1]


def _f1(hits: Tensor, wrong: Tensor) -> Tensor:
    """2·hits/(2·hits + wrong), where wrong labels are those missed and those found in error"""
    return 2 * hits / (2 * hits + wrong).clamp(min=1)
