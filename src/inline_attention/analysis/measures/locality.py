"""Figure 4 of the paper: how much attention goes to the neighbourhood of the query, layer by layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from inline_attention.analysis.base import LayerAnalysis, OnImages, Subject, Table, option
from inline_attention.analysis.divergence import Divergence
from inline_attention.analysis.hooks import observe
from inline_attention.analysis.neighbours import neighbours
from inline_attention.analysis.record import LayerAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 3


@dataclass(frozen=True)
class LocalityResult:
    """The mean, over the queries on the map, of the weights on the neighbourhood of the query. Weights are those of
    the attention itself: local terms are left out."""

    layers: list[str]
    kinds: list[str]
    by_head: list[np.ndarray]  # for each layer (heads,)
    by_image: np.ndarray = field(metadata={"plain": False})  # (images, layers), over queries and heads
    chance: np.ndarray  # (layers,) side² / N
    uniform: np.ndarray  # (layers,) the value for weights of 1/N, lower because of the borders
    skipped: dict[str, str]  # layer without a definition → reason
    side: int
    images: int
    rows: int
    diverged_rows: int

    @property
    def share(self) -> np.ndarray:
        """(layers,) the mean over heads"""
        return np.array([heads.mean() for heads in self.by_head])

    def summary(self) -> dict[str, Any]:
        over_chance = self.share / self.chance
        return dict(
            images=self.images,
            mean_share=float(self.share.mean()),
            mean_over_chance=float(over_chance.mean()),
            mean_over_uniform=float((self.share / self.uniform).mean()),
            first_layer_over_chance=float(over_chance[0]),
            last_layer_over_chance=float(over_chance[-1]),
            diverged_rows=self.diverged_rows,
            rows=self.rows,
        )


@dataclass
class _Layer:
    kind: str
    total: Tensor  # (heads,)
    chance: float = 0.0
    uniform: float = 0.0
    queries: int = 0
    of_images: list[Tensor] = field(default_factory=list)  # for each batch (images,)


@dataclass
class _Sums:
    layers: dict[str, _Layer] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    divergence: Divergence = field(default_factory=Divergence)
    side: int = SIDE

    def add(self, record: LayerAttention, images: int) -> None:
        if record.key_grid is not None:
            self.skipped[record.name] = "its keys are a reduced map"
            return
        if record.stripes:
            self.skipped[record.name] = "its heads attend in stripes"
            return
        layer = self.layers.setdefault(
            record.name, _Layer(record.kind, torch.zeros(record.num_heads, dtype=torch.float64))
        )
        prefix = record.num_prefix_tokens
        around = neighbours(record.grid, (self.side, self.side), num_prefix_tokens=prefix, device=record.q.device)
        samples, tokens = record.q.shape[:2]
        present = record.token_mask
        if present is None:
            present = torch.ones(samples, tokens, dtype=torch.bool, device=record.q.device)
        count = present.sum(1)  # (S,)
        of_samples = torch.zeros(samples, dtype=torch.float64)
        for rows in record.row_chunks():
            weights = record.weights(rows)
            self.divergence.add(weights)
            at = around[rows]
            index = at.clamp(min=0).expand(*weights.shape[:2], -1, -1)
            near_weight = (weights.gather(3, index) * (at >= 0)).sum(-1)  # (S, heads, rows); zero for prefix tokens
            layer.total += near_weight.sum((0, 2)).cpu().double()
            of_samples += near_weight.sum((1, 2)).cpu().double()
        near = (present[:, around.clamp(min=0)] & (around >= 0)).sum(-1)  # (S, N)
        on_map = present[:, prefix:]
        queries = on_map.sum(1).cpu()
        layer.queries += int(queries.sum())
        of_images, each = (x.view(images, -1).sum(1) for x in (of_samples, queries))
        layer.of_images.append(of_images / (each * record.num_heads))
        layer.chance += float((on_map.sum(1) * self.side**2 / count).sum())
        layer.uniform += float((near[:, prefix:] * on_map / count[:, None]).sum())


def measure_locality(
    model: nn.Module,
    images: Iterable[Tensor],
    *,
    side: int = SIDE,
    layers: Sequence[str | int] | None = None,
    on_images: Callable[[int], None] | None = None,
) -> LocalityResult:
    """Attention to the side×side neighbourhood of the query, over batches of images.

    It is defined for layers whose tokens form a map, or a window of one, and attend to themselves. Others are skipped.
    """
    if side < 1 or side % 2 == 0:
        raise ValueError(f"side={side}; expected an odd number")
    sums = _Sums(side=side)
    seen = 0
    for batch in images:
        observe(model, batch, partial(sums.add, images=len(batch)), layers=layers)
        seen += len(batch)
        if on_images is not None:
            on_images(len(batch))
    if not sums.layers:
        reasons = "; ".join(f"{name}: {why}" for name, why in sums.skipped.items()) or "there are no images"
        raise ValueError(f"locality is not defined here: {reasons}")
    found = sums.layers.values()
    return LocalityResult(
        layers=list(sums.layers),
        kinds=[layer.kind for layer in found],
        by_head=[(layer.total / layer.queries).numpy() for layer in found],
        by_image=torch.stack([torch.cat(layer.of_images) for layer in found], 1).numpy(),
        chance=np.array([layer.chance / layer.queries for layer in found]),
        uniform=np.array([layer.uniform / layer.queries for layer in found]),
        skipped=sums.skipped,
        side=side,
        images=seen,
        rows=sums.divergence.rows,
        diverged_rows=sums.divergence.diverged,
    )


@dataclass(frozen=True, kw_only=True)
class Locality(LayerAnalysis):
    """How local is attention by itself? The mean, over the queries on the map, of the weights on the
    neighbourhood of the query, itself included. Chance is the neighbourhood's share of the tokens: 9/N for 3×3. Local
    terms such as InLine's 3×3 residual are left out.
    """

    least_images = 20

    side: int = option(SIDE, "side of the neighbourhood", type=int)

    def measure(self, subject: Subject, on_images: OnImages) -> LocalityResult:
        return measure_locality(
            subject.model, subject.images(), side=self.side, layers=self.layers, on_images=on_images
        )

    def table(self, results: Mapping[str, LocalityResult]) -> Table:
        """Header and lines of a CSV file: a line for each layer."""
        lines = [
            (label, name, kind, float(share), float(chance), float(uniform))
            for label, r in results.items()
            for name, kind, share, chance, uniform in zip(r.layers, r.kinds, r.share, r.chance, r.uniform, strict=True)
        ]
        return ("model", "layer", "attention", "share", "chance", "uniform"), lines

    def draw(self, results: Mapping[str, LocalityResult]) -> "Figure":
        """Attention to the neighbourhood by layer, with chance: a panel for each model, on one scale."""
        from inline_attention.analysis import figures

        columns = min(len(results), 3)
        rows = -(-len(results) // columns)
        figure = figures.new_figure(max(6.0, figures.WIDTH / 3 * columns), 2.7 * rows + 1.2)
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
        styles, side = figures.styles(results), next(iter(results.values())).side
        for axes, (label, result) in zip(panels, results.items(), strict=False):
            style, place = styles[label], range(1, len(result.layers) + 1)
            axes.plot(place, result.share, **style)
            axes.plot(place, result.chance, linestyle=":", color="0.25", linewidth=1.5, label=f"chance, {side**2}/N")
            axes.plot(place, result.uniform, "-.", color="0.25", linewidth=0.8, label="weights of 1/N")
            low, high = (np.array([f(heads) for heads in result.by_head]) for f in (np.min, np.max))
            axes.fill_between(place, low, high, color=style["color"], alpha=0.15, linewidth=0)
            axes.set(xlabel="layer")
            axes.set_title(label, fontsize=10)
        for axes in panels[len(results) :]:
            axes.set_visible(False)
        figures.add_legend(figure, panels[0])
        figure.supylabel(f"attention to the {side}×{side} (sum of weights)", fontsize=10)
        figures.add_caption(
            figure,
            "Mean over queries and heads; bands: heads from lowest to highest. Without local terms. "
            "Weights of 1/N give less than chance, because queries at the border have fewer neighbours. "
            + figures.images_and_divergence(results),
        )
        return figures.with_grid(figure)
