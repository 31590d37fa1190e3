"""A k-NN probe: how well the features of a model tell classes apart without its classifier.

Images of the training split vote for their class, weighted by exp(cosine similarity / 0.07), as in DINO's evaluation.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.data import EvalLoader
from inline_attention.layers.mode import evaluation_mode
from inline_attention.tasks.evaluation import check_readable
from inline_attention.training.distributed import Ranks

TEMPERATURE = 0.07


@torch.no_grad()
def extract_features(
    model: nn.Module,
    loader: EvalLoader,
    *,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    on_images: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Features (N, C) of unit length, float32 in main memory, and labels (N,) of this rank's images."""
    timm_model: Any = model  # timm's contract
    loader.check_one_label("a vote of the nearest images")
    loader.to(device)
    # A rank may have no images.
    features = [torch.empty(0, timm_model.head_hidden_size)]
    labels = [torch.empty(0, dtype=torch.int64)]
    with evaluation_mode(model):
        for batch in loader:
            with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                rows = timm_model.forward_head(timm_model.forward_features(batch.images), pre_logits=True)
            if rows.ndim > 2:  # a model that does not pool: (B, …, C)
                rows = rows.flatten(1, -2).mean(1)
            features.append(F.normalize(rows.float(), dim=1).cpu())
            labels.append(batch.targets.cpu())
            if on_images is not None:
                on_images(len(batch.images))
    return torch.cat(features), torch.cat(labels)


def vote(queries: Tensor, bank: Tensor, labels: Tensor, *, k: int, num_classes: int) -> Tensor:
    """queries (n, C), bank (N, C), both of unit length, labels (N,) → votes (n, classes) of the k nearest images."""
    similarity, nearest = (queries @ bank.T).topk(min(k, len(bank)), dim=1)  # (n, k)
    votes = torch.zeros(len(queries), num_classes, device=queries.device)
    return votes.scatter_add_(1, labels[nearest], (similarity / TEMPERATURE).exp())


def knn_accuracy(
    model: nn.Module,
    bank: EvalLoader,
    queries: EvalLoader,
    *,
    k: int,
    ranks: Ranks,
    amp_dtype: torch.dtype | None = None,
    on_images: Callable[[int], None] | None = None,
) -> tuple[float, int]:
    """The share in per cent of the images of `queries` that get most votes for their class, and their number.

    Both are over all ranks.
    """
    if bank.class_names != queries.class_names:
        raise ValueError("the images that vote and those that are evaluated have different classes")
    if not 1 <= k <= bank.num_images:
        raise ValueError(f"--knn {k}: expected 1 to {bank.num_images}, the number of training images")
    options: dict[str, Any] = {"device": ranks.device, "amp_dtype": amp_dtype, "on_images": on_images}
    parts = ranks.gather(extract_features(model, bank, **options))
    features = torch.cat([part for part, _ in parts]).to(ranks.device)
    labels = torch.cat([part for _, part in parts]).to(ranks.device)
    check_readable(bank, images=len(features), skipped=int(ranks.sum(torch.tensor(len(bank.skipped)))))
    mine, targets = extract_features(model, queries, **options)
    hits = torch.zeros(2, dtype=torch.int64)
    for rows, own in zip(mine.split(256), targets.split(256), strict=True):
        votes = vote(rows.to(ranks.device), features, labels, k=k, num_classes=len(bank.class_names))
        hits += torch.tensor([int((votes.argmax(dim=1).cpu() == own).sum()), len(own)])
    correct, images = ranks.sum(hits).tolist()
    check_readable(queries, images=images, skipped=int(ranks.sum(torch.tensor(len(queries.skipped)))))
    return 100 * correct / images, images
