"""Figure 2 of the paper: how often different queries of an image get the same attention row."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .divergence import Divergence
from .extract import LayerAttention, observe

TAU, RHO = 1e-3, 0.1
MAX_BYTES = 256 * 2**20
MEDIAN_QUERIES = 1024
# What a row costs while two blocks of it are compared: scores, mask and result in float32, and the result in float64.
_BYTES_PER_WEIGHT = 2 * (4 * 4 + 8)


@dataclass(frozen=True)
class ConfusionResult:
    """Confused pairs: rows of one head and layer that differ by less than τ times the mean row norm, while their
    queries differ by more than ρ times the median distance of queries."""

    layers: list[str]
    kinds: list[str]
    by_image: np.ndarray  # (images,) confused pairs of all layers and heads
    by_head: list[np.ndarray]  # for each layer (heads,), of all images
    pairs: np.ndarray  # (layers,) pairs of each head, of all images
    tau: float
    rho: float
    rows: int
    diverged_rows: int

    @property
    def share_by_layer(self) -> np.ndarray:
        """(layers,) confused pairs of all pairs"""
        heads = np.array([len(counts) for counts in self.by_head])
        return np.array([counts.sum() for counts in self.by_head]) / np.maximum(self.pairs * heads, 1)

    def summary(self) -> dict[str, Any]:
        counts = self.by_image
        total = int(sum(p * len(h) for p, h in zip(self.pairs, self.by_head, strict=True)))
        return dict(
            images=len(counts),
            occurrences=int(counts.sum()),
            pairs=total,
            share_of_pairs=float(counts.sum() / max(total, 1)),
            mean_per_image=float(counts.mean()),
            median_per_image=float(np.median(counts)),
            share_of_images_with_any=float((counts > 0).mean()),
            diverged_rows=self.diverged_rows,
            rows=self.rows,
        )


@dataclass
class _Layer:
    kind: str
    by_head: np.ndarray
    pairs: int = 0


@dataclass
class _Counts:
    layers: dict[str, _Layer] = field(default_factory=dict)
    by_image: list[np.ndarray] = field(default_factory=list)
    divergence: Divergence = field(default_factory=Divergence)


def measure_confusion(
    model: nn.Module,
    images: Iterable[Tensor],
    *,
    tau: float = TAU,
    rho: float = RHO,
    layers: Sequence[str | int] | None = None,
    max_bytes: int = MAX_BYTES,
    on_images: Callable[[int], None] | None = None,
) -> ConfusionResult:
    """Counts confused pairs over batches of images.

    Memory: besides the model's own and the q, k, v of one layer, about `max_bytes`, whatever the number of images and
    tokens (but not less than two rows of every head and image of a batch).
    """
    if tau <= 0 or rho < 0:
        raise ValueError(f"tau={tau}, rho={rho}; expected tau above 0 and rho of 0 or more")
    counts = _Counts()
    for batch in images:
        total = np.zeros(len(batch), dtype=np.int64)

        def on_layer(record: LayerAttention, total: np.ndarray = total) -> None:
            confused, pairs = confused_pairs(
                record, tau=tau, rho=rho, max_bytes=max_bytes, divergence=counts.divergence
            )
            by_sample = confused.cpu().numpy().reshape(len(total), -1, record.num_heads).sum(1)  # (B, heads)
            total += by_sample.sum(1)
            empty = np.zeros(record.num_heads, dtype=np.int64)
            layer = counts.layers.setdefault(record.name, _Layer(record.kind, empty))
            layer.by_head = layer.by_head + by_sample.sum(0)
            layer.pairs += pairs

        observe(model, batch, on_layer, layers=layers)
        counts.by_image.append(total)
        if on_images is not None:
            on_images(len(batch))
    if not counts.by_image:
        raise ValueError("there are no images to count confusion over")
    return ConfusionResult(
        layers=list(counts.layers),
        kinds=[layer.kind for layer in counts.layers.values()],
        by_image=np.concatenate(counts.by_image),
        by_head=[layer.by_head for layer in counts.layers.values()],
        pairs=np.array([layer.pairs for layer in counts.layers.values()]),
        tau=tau,
        rho=rho,
        rows=counts.divergence.rows,
        diverged_rows=counts.divergence.diverged,
    )


@torch.no_grad()
def confused_pairs(
    record: LayerAttention,
    *,
    tau: float = TAU,
    rho: float = RHO,
    max_bytes: int = MAX_BYTES,
    divergence: Divergence | None = None,
) -> tuple[Tensor, int]:
    """Of one layer: confused pairs (S, heads), and how many pairs a head has in all samples together."""
    samples, tokens, heads, _ = record.q.shape
    present = record.token_mask
    if present is None:
        present = torch.ones(samples, tokens, dtype=torch.bool, device=record.q.device)
    size = max(1, max_bytes // (_BYTES_PER_WEIGHT * samples * heads * record.k.shape[1]))
    blocks = [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]

    norms = []
    for rows in blocks:
        weights = record.weights(rows)
        norms.append(weights.norm(dim=-1))
        if divergence is not None:
            divergence.add(weights)
    seen = present[:, None, :]  # (S, 1, N)
    mean_norm = (torch.cat(norms, -1) * seen).sum(-1) / seen.sum(-1)
    least_row = (tau * mean_norm)[..., None, None]  # (S, heads, 1, 1)
    q = record.q.transpose(1, 2)
    least_query = (rho * _median_distance(q, present))[..., None, None]

    confused = torch.zeros(samples, heads, dtype=torch.int64, device=q.device)
    for i, j, ours, theirs in _block_pairs(record, blocks):
        apart = torch.cdist(q[:, :, i], q[:, :, j]) > least_query
        near = _distances(ours, theirs) < least_row
        both = seen[:, :, i, None] & seen[:, :, None, j]
        if i == j:  # each pair once
            both = both & torch.ones(both.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        confused += (apart & near.to(q.device) & both).sum((-2, -1))
    count = present.sum(1)
    return confused, int((count * (count - 1) // 2).sum())


def _block_pairs(record: LayerAttention, blocks: Sequence[slice]) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Every pair of blocks of rows once, weights in float64: a difference of rows is far smaller than they are."""
    for n, i in enumerate(blocks):
        ours = _exact(record.weights(i))
        for j in blocks[n:]:
            yield i, j, ours, ours if i == j else _exact(record.weights(j))


def _exact(x: Tensor) -> Tensor:
    return (x.cpu() if x.device.type == "mps" else x).double()  # MPS has no float64


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Of rows a (…, n, N) and b (…, m, N) → (…, n, m) float32, through their products."""
    squares = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :]
    return (
        torch.baddbmm(squares.flatten(0, -3), a.flatten(0, -3), b.flatten(0, -3).mT, alpha=-2)
        .view_as(squares)
        .clamp_(min=0)
        .sqrt_()
        .float()
    )


def _median_distance(q: Tensor, present: Tensor) -> Tensor:
    """Median distance of two queries, of at most MEDIAN_QUERIES evenly spaced ones; NaN where there are no two.

    q (S, heads, N, d), present (S, N) → (S, heads)
    """
    samples, heads, tokens, _ = q.shape
    step = -(-tokens // MEDIAN_QUERIES)
    queries = q[:, :, ::step].flatten(0, 1)  # (S·heads, n, d)
    seen = present[:, ::step].repeat_interleave(heads, 0)
    at_once = max(1, MEDIAN_QUERIES**2 // seen.shape[1] ** 2)
    medians = []
    for some, there in zip(queries.split(at_once), seen.split(at_once), strict=True):
        pair = (there[:, :, None] & there[:, None, :]).triu(1)
        medians.append(torch.cdist(some, some).masked_fill(~pair, torch.nan).flatten(1).nanmedian(1).values)
    return torch.cat(medians).view(samples, heads)


def table(results: dict[str, ConfusionResult]) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Header and lines of a CSV file: a line for each image."""
    lines = [(label, i, int(n)) for label, result in results.items() for i, n in enumerate(result.by_image)]
    return ("model", "image", "confused_pairs"), lines
