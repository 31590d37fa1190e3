"""Numerical and effective rank of attention matrices, by layer and head."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from inline_attention.analysis.base import LayerAnalysis, OnImages, Subject, Table
from inline_attention.analysis.divergence import Divergence
from inline_attention.analysis.hooks import observe
from inline_attention.analysis.record import DEFAULT_CHUNK_BYTES, LayerAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RankResult:
    """Numerical: singular values above torch's default tolerance, N·ε·σ₁. Effective: exp of the entropy of σ / Σσ.

    A matrix with a non-finite entry has no rank: it counts in `diverged_rows` and is left out of the means.
    """

    layers: list[str]
    kinds: list[str]
    tokens: np.ndarray  # (layers,) N, the largest rank there could be
    numerical: list[np.ndarray]  # for each layer (matrices, heads); a matrix an image, or a window of one
    effective: list[np.ndarray]
    images: int
    rows: int
    diverged_rows: int

    def means(self, ranks: list[np.ndarray]) -> np.ndarray:
        """(layers,) over matrices and heads"""
        return np.array([np.nanmean(layer) for layer in ranks])

    def summary(self) -> dict[str, Any]:
        return dict(
            images=self.images,
            mean_numerical=float(self.means(self.numerical).mean()),
            mean_effective=float(self.means(self.effective).mean()),
            mean_effective_share=float((self.means(self.effective) / self.tokens).mean()),
            diverged_rows=self.diverged_rows,
            rows=self.rows,
        )


def effective_rank(singular_values: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (…, n) → (…)"""
    shares = singular_values / singular_values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def numerical_rank(singular_values: Tensor, *, size: int) -> Tensor:
    """As `torch.linalg.matrix_rank` counts: (…, n) of matrices whose longer side is `size` → (…)"""
    tolerance = size * torch.finfo(singular_values.dtype).eps * singular_values.amax(-1, keepdim=True)
    return (singular_values > tolerance).sum(-1)


@dataclass
class _Layer:
    kind: str
    tokens: int
    numerical: list[np.ndarray] = field(default_factory=list)
    effective: list[np.ndarray] = field(default_factory=list)


def measure_rank(
    model: nn.Module,
    images: Iterable[Tensor],
    *,
    layers: Sequence[str | int] | None = None,
    on_images: Callable[[int], None] | None = None,
) -> RankResult:
    """Ranks of every attention matrix over batches of images.

    Large matrices are decomposed one at a time, which takes memory for a few times N² numbers.
    """
    found: dict[str, _Layer] = {}
    divergence = Divergence()

    def on_layer(record: LayerAttention) -> None:
        keys = record.k.shape[1]
        layer = found.setdefault(record.name, _Layer(record.kind, min(record.q.shape[1], keys)))
        one = record.q.shape[1] * keys * torch.float32.itemsize
        at_once = max(1, DEFAULT_CHUNK_BYTES // one)
        heads = min(at_once, record.num_heads)
        samples = max(1, at_once // heads)
        for start in range(0, record.q.shape[0], samples):
            ranks = []
            for first in range(0, record.num_heads, heads):
                weights = record.weights(samples=slice(start, start + samples), heads=slice(first, first + heads))
                divergence.add(weights)
                ranks.append(_ranks(weights))
            layer.numerical.append(np.concatenate([numerical for numerical, _ in ranks], axis=1))
            layer.effective.append(np.concatenate([effective for _, effective in ranks], axis=1))

    seen = 0
    for batch in images:
        observe(model, batch, on_layer, layers=layers)
        seen += len(batch)
        if on_images is not None:
            on_images(len(batch))
    if not seen:
        raise ValueError("there are no images to measure rank on")
    return RankResult(
        layers=list(found),
        kinds=[layer.kind for layer in found.values()],
        tokens=np.array([layer.tokens for layer in found.values()]),
        numerical=[np.concatenate(layer.numerical) for layer in found.values()],
        effective=[np.concatenate(layer.effective) for layer in found.values()],
        images=seen,
        rows=divergence.rows,
        diverged_rows=divergence.diverged,
    )


def _ranks(weights: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Numerical and effective rank of (S, heads, N, N) → (S, heads) each, NaN where a matrix is not finite"""
    finite = weights.isfinite().all(-1).all(-1)
    values = torch.linalg.svdvals(torch.where(finite[..., None, None], weights, 0))
    numerical = numerical_rank(values, size=max(weights.shape[-2:])).float()
    effective = effective_rank(values)
    numerical, effective = (torch.where(finite, x, torch.nan) for x in (numerical, effective))
    return numerical.cpu().numpy(), effective.cpu().numpy()


@dataclass(frozen=True, kw_only=True)
class Rank(LayerAnalysis):
    """How many different rows are there? Numerical rank counts the singular values above torch's default tolerance.
    Effective rank is exp of the entropy of the normalised singular values. The matrix of a linear attention has at most
    d + 1 singular values.
    """

    least_images = 10

    def measure(self, subject: Subject, on_images: OnImages) -> RankResult:
        return measure_rank(subject.model, subject.images(), layers=self.layers, on_images=on_images)

    def table(self, results: Mapping[str, RankResult]) -> Table:
        """Header and lines of a CSV file: a line for each layer and head, means over matrices."""
        lines = [
            (label, name, r.kinds[i], head, int(r.tokens[i]), float(numerical), float(effective))
            for label, r in results.items()
            for i, name in enumerate(r.layers)
            for head, (numerical, effective) in enumerate(
                zip(np.nanmean(r.numerical[i], 0), np.nanmean(r.effective[i], 0), strict=True)
            )
        ]
        return ("model", "layer", "attention", "head", "tokens", "numerical_rank", "effective_rank"), lines

    def draw(self, results: Mapping[str, RankResult]) -> "Figure":
        """Numerical and effective rank by layer."""
        from inline_attention.analysis import figures

        figure, styles = figures.new_figure(figures.WIDTH, 4), figures.styles(results)
        for axes, what in zip(figure.subplots(1, 2), ("numerical", "effective"), strict=True):
            for label, result in results.items():
                style, place = styles[label], range(1, len(result.layers) + 1)
                colour = style["color"]
                ranks: list[np.ndarray] = getattr(result, what)
                axes.plot(place, result.means(ranks), **style, label=label)
                heads = [np.nanmean(layer, 0) for layer in ranks]
                axes.fill_between(
                    place, [h.min() for h in heads], [h.max() for h in heads], color=colour, alpha=0.12, linewidth=0
                )
                if what == "numerical":
                    axes.plot(place, result.tokens, linestyle=":", color="0.25", linewidth=1.5)
            axes.set(title=f"{what.capitalize()} rank", xlabel="layer", ylabel="rank", ylim=(0, None))
        figures.add_legend(figure, axes)
        figures.add_caption(
            figure,
            "Mean over images and heads; bands: heads from lowest to highest; dotted: N. Numerical: σ > N·ε·σ₁; "
            f"effective: exp of the entropy of σ/Σσ. {figures.images_and_divergence(results)}",
        )
        return figures.with_grid(figure)
