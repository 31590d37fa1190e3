"""Figure 2 of the paper: how often different queries of an image get the same attention row."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from inline_attention.analysis.base import LayerAnalysis, OnImages, Subject, Table, option
from inline_attention.analysis.divergence import Divergence
from inline_attention.analysis.hooks import observe
from inline_attention.analysis.record import LayerAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# With τ as large as ρ, pairs that are near in both respects would count. Every attention has such pairs.
TAUS, RHOS = (0.03, 0.1, 0.3), (0.3, 1.0)
MAX_BYTES = 256 * 2**20
MEDIAN_TOKENS = 512
# Weights are computed in float32. Rows that are closer than this share of a row's norm differ only by rounding.
ROUNDING = 1e-6
# Bytes of a row while two blocks are compared: scores, mask and result in float32, and the result in float64.
_BYTES_PER_WEIGHT = 2 * (4 * 4 + 8)
# Bytes of a pair of tokens: its distances, a masked copy, the copy that is sorted for the median, and masks.
_BYTES_PER_DISTANCE = 6 * 4
_BlockPair = tuple[slice, slice, Tensor, Tensor]  # rows i, rows j, their distances (…, i, j), norms of rows i (…, i)


@dataclass(frozen=True)
class ConfusionResult:
    """Confused pairs of queries of one image, head and layer.

    A pair is confused if its rows are closer than τ times the median distance of two rows, while its queries are
    further apart than ρ times the median distance of two queries. Both distances are relative, so nearly uniform
    attention does not count as confused. There is a count for every τ and ρ.
    """

    layers: list[str]
    kinds: list[str]
    taus: tuple[float, ...]
    rhos: tuple[float, ...]
    by_image: np.ndarray  # (images, taus, rhos) confused pairs of all layers and heads
    by_layer: np.ndarray  # (layers, taus, rhos) confused pairs of all images and heads
    pairs: np.ndarray  # (layers,) all pairs of all images and heads
    rows: int
    diverged_rows: int

    @property
    def tau(self) -> float:
        """The largest threshold, at which images and layers are compared."""
        return max(self.taus)

    @property
    def rho(self) -> float:
        """The largest threshold, at which images and layers are compared."""
        return max(self.rhos)

    def count_by_image(self) -> np.ndarray:
        """(images,) confused pairs at `tau` and `rho`"""
        return self.by_image[:, self.taus.index(self.tau), self.rhos.index(self.rho)]

    def share_by_layer(self, tau: float, rho: float) -> np.ndarray:
        """(layers,) confused pairs of all pairs at two of the thresholds"""
        return self.by_layer[:, self.taus.index(tau), self.rhos.index(rho)] / np.maximum(self.pairs, 1)

    @property
    def per_million(self) -> np.ndarray:
        """(taus, rhos) confused pairs in a million"""
        return 1e6 * self.by_layer.sum(0) / max(int(self.pairs.sum()), 1)

    def summary(self) -> dict[str, Any]:
        per_million = {
            f"rows < {tau:g}, queries > {rho:g}": float(self.per_million[t, r])
            for t, tau in enumerate(self.taus)
            for r, rho in enumerate(self.rhos)
        }
        return dict(
            images=len(self.by_image),
            pairs=int(self.pairs.sum()),
            pairs_in_a_million=per_million,
            share_of_images_with_any=float((self.count_by_image() > 0).mean()),
            diverged_rows=self.diverged_rows,
            rows=self.rows,
        )


@dataclass
class _Layer:
    kind: str
    confused: np.ndarray  # (taus, rhos)
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
    taus: Sequence[float] = TAUS,
    rhos: Sequence[float] = RHOS,
    layers: Sequence[str | int] | None = None,
    max_bytes: int = MAX_BYTES,
    on_images: Callable[[int], None] | None = None,
) -> ConfusionResult:
    """Counts confused pairs over batches of images.

    Args:
        taus: thresholds of the rows, relative to the median distance of two rows.
        rhos: thresholds of the queries, relative to the median distance of two queries.
        max_bytes: memory besides the model's own and the q, k, v of one layer. It does not grow with the number of
            images or tokens, but two rows of every head of an image must fit.
    """
    if not taus or not rhos or min(taus) <= 0 or min(rhos) < 0:
        raise ValueError(f"taus={tuple(taus)}, rhos={tuple(rhos)}; expected taus above 0 and rhos of 0 or more")
    counts = _Counts()
    for batch in images:
        total = np.zeros((len(batch), len(taus), len(rhos)), dtype=np.int64)

        def on_layer(record: LayerAttention, total: np.ndarray = total) -> None:
            for rows in record.row_chunks(max_bytes // 4):
                counts.divergence.add(record.weights(rows))
            confused, pairs = confused_pairs(record, taus=taus, rhos=rhos, max_bytes=max_bytes)
            of_images = confused.cpu().numpy().reshape(len(total), -1, len(taus), len(rhos)).sum(1)
            total += of_images
            layer = counts.layers.setdefault(record.name, _Layer(record.kind, np.zeros_like(total[0])))
            layer.confused += of_images.sum(0)
            layer.pairs += pairs * record.num_heads

        observe(model, batch, on_layer, layers=layers)
        counts.by_image.append(total)
        if on_images is not None:
            on_images(len(batch))
    if not counts.by_image:
        raise ValueError("there are no images to count confusion over")
    return ConfusionResult(
        layers=list(counts.layers),
        kinds=[layer.kind for layer in counts.layers.values()],
        taus=tuple(taus),
        rhos=tuple(rhos),
        by_image=np.concatenate(counts.by_image),
        by_layer=np.stack([layer.confused for layer in counts.layers.values()]),
        pairs=np.array([layer.pairs for layer in counts.layers.values()]),
        rows=counts.divergence.rows,
        diverged_rows=counts.divergence.diverged,
    )


@torch.no_grad()
def confused_pairs(
    record: LayerAttention,
    *,
    taus: Sequence[float] = TAUS,
    rhos: Sequence[float] = RHOS,
    max_bytes: int = MAX_BYTES,
) -> tuple[Tensor, int]:
    """Confused pairs (S, heads, taus, rhos) of one layer, and the number of pairs of a head over all samples."""
    samples, tokens, heads, _ = record.q.shape
    present = record.token_mask
    if present is None:
        present = torch.ones(samples, tokens, dtype=torch.bool, device=record.q.device)
    pair_bytes = _BYTES_PER_DISTANCE * heads * min(tokens, MEDIAN_TOKENS) ** 2
    group = max(1, max_bytes // (2 * pair_bytes))  # samples at a time
    confused = [
        _confused(record, slice(start, start + group), present, taus, rhos, max_bytes)
        for start in range(0, samples, group)
    ]
    count = present.sum(1)
    return torch.cat(confused), int((count * (count - 1) // 2).sum())


def _confused(
    record: LayerAttention,
    samples: slice,
    present: Tensor,
    taus: Sequence[float],
    rhos: Sequence[float],
    max_bytes: int,
) -> Tensor:
    """Confused pairs of some samples → (samples, heads, taus, rhos)"""
    q, seen = record.q[samples].transpose(1, 2), present[samples]
    tokens = q.shape[2]
    step = -(-tokens // MEDIAN_TOKENS)  # of the tokens that medians are taken over
    size = max(1, max_bytes // (2 * _BYTES_PER_WEIGHT * q.shape[0] * q.shape[1] * record.k.shape[1]))

    some = torch.empty(*q.shape[:2], *(len(range(0, tokens, step)),) * 2, device=q.device)
    norms = torch.empty(some.shape[:3], device=q.device)
    for i, j, distances, norm in _row_distances(record, samples, size=size, step=step):
        some[:, :, i, j], norms[:, :, i] = distances, norm
    norm_median = norms.masked_fill(~seen[:, None, ::step], torch.nan).nanmedian(-1).values
    # If all rows are equal, their median distance is only rounding.
    floor = ROUNDING * norm_median
    row_median = _median(some, seen[:, ::step])
    query_median = _median(torch.cdist(q[:, :, ::step], q[:, :, ::step]), seen[:, ::step])
    row_limits = [torch.maximum(tau * row_median, floor)[..., None, None] for tau in taus]
    query_limits = [(rho * query_median)[..., None, None] for rho in rhos]

    everything = slice(0, tokens)
    pairs: Iterable[_BlockPair] = [(everything, everything, some, norms)]
    if step > 1:
        pairs = _row_distances(record, samples, size=size)
    confused = torch.zeros(*q.shape[:2], len(taus), len(rhos), dtype=torch.int64, device=q.device)
    for i, j, distances, _ in pairs:
        both = (seen[:, i, None] & seen[:, None, j])[:, None]
        if i == j:
            both = both & torch.ones(both.shape[-2:], dtype=torch.bool, device=q.device).triu(1)  # each pair once
        queries = torch.cdist(q[:, :, i], q[:, :, j])
        apart = [(queries > limit) & both for limit in query_limits]
        for t, limit in enumerate(row_limits):
            near = distances < limit
            for r, far in enumerate(apart):
                confused[:, :, t, r] += (near & far).sum((-2, -1))
    return confused


def _median(distances: Tensor, seen: Tensor) -> Tensor:
    """Over the pairs i < j of tokens that are present: (S, heads, n, n), (S, n) → (S, heads); NaN without a pair."""
    pair = (seen[:, None, :, None] & seen[:, None, None, :]).triu(1)
    return distances.masked_fill(~pair, torch.nan).flatten(2).nanmedian(-1).values


def _row_distances(record: LayerAttention, samples: slice, *, size: int, step: int = 1) -> Iterator[_BlockPair]:
    """Distances of every `step`-th row, for every pair of blocks of `size` rows once.

    Weights are widened to float64 first, because a difference of rows is far smaller than the rows.
    """
    count = len(range(0, record.q.shape[1], step))
    blocks = [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def weights(block: slice) -> Tensor:
        found = record.weights(slice(block.start * step, block.stop * step, step), samples=samples)
        return (found.cpu() if found.device.type == "mps" else found).double()  # MPS has no float64

    for n, i in enumerate(blocks):
        ours = weights(i)
        norm = ours.norm(dim=-1).float().to(record.q.device)
        for j in blocks[n:]:
            distances = _distances(ours, ours if i == j else weights(j))
            yield i, j, distances.to(record.q.device), norm


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


@dataclass(frozen=True, kw_only=True)
class Confusion(LayerAnalysis):
    """How often do different queries of an image get the same row? A pair of queries of one head and layer is confused
    if its rows are closer than τ times the median distance of two rows, while its queries are further apart than ρ
    times the median distance of two queries. Choose τ well below ρ: with τ = ρ a pair is merely close in both respects.
    """

    least_images = 20

    taus: tuple[float, ...] = option(TAUS, "rows are closer than this times their median", type=float, nargs="+")
    rhos: tuple[float, ...] = option(
        RHOS, "queries are further apart than this times their median", type=float, nargs="+"
    )

    def measure(self, subject: Subject, on_images: OnImages) -> ConfusionResult:
        return measure_confusion(
            subject.model,
            subject.images(),
            taus=self.taus,
            rhos=self.rhos,
            layers=self.layers,
            on_images=on_images,
        )

    def table(self, results: Mapping[str, ConfusionResult]) -> Table:
        """Header and lines of a CSV file: a line for each pair of thresholds."""
        lines = [
            (
                label,
                tau,
                rho,
                int(result.by_layer[:, t, r].sum()),
                int(result.pairs.sum()),
                float(result.per_million[t, r]),
                float((result.by_image[:, t, r] > 0).mean()),
            )
            for label, result in results.items()
            for t, tau in enumerate(result.taus)
            for r, rho in enumerate(result.rhos)
        ]
        header = ("model", "tau", "rho", "confused_pairs", "pairs", "pairs_in_a_million", "share_of_images_with_any")
        return header, lines

    def draw(self, results: Mapping[str, ConfusionResult]) -> "Figure":
        """Confused pairs by threshold, by image and by layer."""
        from inline_attention.analysis import figures

        figure = figures.new_figure(figures.WIDTH, 7)
        (over_thresholds, key), (histogram, by_layer) = figure.subplots(2, 2)
        first = next(iter(results.values()))
        most = max(int(result.count_by_image().max()) for result in results.values())
        edges = histogram_edges(most)
        labels = ["0", *(f"{a}–{b - 1}" if b > a + 1 else str(a) for a, b in itertools.pairwise(edges[1:]))]
        width = 0.8 / len(results)
        styles = figures.styles(results)
        for i, (label, result) in enumerate(results.items()):
            style = styles[label]
            for rho, line, counts in zip(result.rhos, itertools.cycle("-:"), result.per_million.T, strict=False):
                name = f"{label}, ρ = {rho:g}"
                over_thresholds.plot(result.taus, counts, linestyle=line, **style, label=name)
            shares = np.histogram(result.count_by_image(), bins=edges)[0] / len(result.by_image)
            place = np.arange(len(shares)) + (i - (len(results) - 1) / 2) * width
            histogram.bar(place, 100 * shares, width, color=style["color"])
            share = 1e6 * result.share_by_layer(result.tau, result.rho)
            by_layer.plot(range(1, len(share) + 1), share, **style)
        over_thresholds.set_xscale("log")
        over_thresholds.set_xticks(first.taus, [f"{tau:g}" for tau in first.taus])
        over_thresholds.minorticks_off()
        for axes in (over_thresholds, by_layer):
            axes.set_yscale("symlog", linthresh=1)
            axes.set_ylim(bottom=-0.1)
        over_thresholds.set(
            title="At every threshold", xlabel="τ (median distances)", ylabel="confused pairs in a million"
        )
        key.axis("off")
        key.legend(*over_thresholds.get_legend_handles_labels(), loc="center", frameon=False)
        at = f"τ = {first.tau:g}, ρ = {first.rho:g}"
        histogram.set_xticks(range(len(labels)), labels, rotation=45, ha="right", fontsize=8)
        histogram.set(title=f"By image, {at}", xlabel="confused pairs, all layers and heads", ylabel="% of images")
        by_layer.set(title=f"By layer, {at}", xlabel="layer", ylabel="confused pairs in a million")
        figures.add_caption(
            figure,
            "A pair of queries is confused if its rows are closer than τ times the median distance of two rows, "
            "while its queries are further apart than ρ times the median distance of two queries. "
            + figures.images_and_divergence(results),
        )
        return figures.with_grid(figure)


def histogram_edges(most: int) -> np.ndarray:
    """Bins of counts up to `most`: 0 alone, then half a decade each: 1–3, 4–9, 10–31, 32–99, …"""
    edges = [0, 1]
    while edges[-1] <= most:
        edges.append(math.ceil(10 ** ((len(edges) - 1) / 2)))
    return np.array(edges)
