"""Classifiers whose images may have several labels: mean average precision and F1 instead of accuracy."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.data import EvalLoader
from inline_attention.layers.mode import evaluation_mode
from inline_attention.tasks.classification.evaluation import check_classes, padded_batches
from inline_attention.training.distributed import is_distributed

THRESHOLD = 0.5  # an image has the labels whose probability is at least this

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MultiLabelResult:
    """Result over all ranks, in per cent."""

    map: float  # mean average precision over the labels that an image of the data has
    f1_micro: float  # F1 of all decisions together
    f1_macro: float  # mean of the F1 of each label, as scikit-learn: 0 for a label that is neither there nor found
    loss: float  # binary cross-entropy
    images: int
    skipped: int  # images that could not be read
    seconds: float
    images_per_second: float
    average_precision: Tensor  # (labels,), NaN for a label that no image has
    f1: Tensor  # (labels,)
    positives: Tensor  # (labels,) int64: images that have the label


@torch.no_grad()
def evaluate_multi_label(
    model: nn.Module,
    loader: EvalLoader,
    *,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    on_images: Callable[[int], None] | None = None,
) -> MultiLabelResult:
    """Run the model in evaluation mode over a loader whose targets are zeros and ones (B, labels).

    Average precision needs the order of all scores, so they are kept in main memory: 4 bytes for each image and label.
    In a process group every rank calls this and gets the result over all ranks.
    """
    if not loader.multi_label:
        raise ValueError("the data give one label for each image, and the model is for several; see docs/training.md")
    device = torch.device(device)
    loader.to(device)
    labels = len(loader.class_names)
    scores, targets = [torch.empty(0, labels)], [torch.empty(0, labels)]  # a rank may have no images
    start = time.perf_counter()
    with evaluation_mode(model):
        for images, batch in padded_batches(loader, device=device):
            with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                logits = model(images)
            check_classes(logits, loader)
            scores.append(logits[: len(batch.images)].float().cpu())
            targets.append(batch.targets.cpu())
            if on_images is not None:
                on_images(len(batch.images))
    logits, truth, skipped = _over_ranks(torch.cat(scores), torch.cat(targets).bool(), len(loader.skipped))
    seconds = time.perf_counter() - start
    if not len(logits):
        raise ValueError(f"nothing to evaluate: none of the {loader.num_images} images could be read")
    loader.skipped.check_limit(skipped)
    if skipped and (not is_distributed() or dist.get_rank() == 0):
        _logger.warning("%d unreadable images are left out: results are over the other %d", skipped, len(logits))
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
        images_per_second=len(logits) / seconds,
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


def _over_ranks(logits: Tensor, truth: Tensor, skipped: int) -> tuple[Tensor, Tensor, int]:
    if not is_distributed():
        return logits, truth, skipped
    parts: list[tuple[Tensor, Tensor, int]] = [(logits, truth, skipped)] * dist.get_world_size()
    dist.all_gather_object(parts, (logits, truth, skipped))
    all_logits, all_truth, all_skipped = zip(*parts, strict=True)
    return torch.cat(all_logits), torch.cat(all_truth), sum(all_skipped)
