"""Table 2 of the paper: predictions when every query loses its neighbours, or as many random tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inline_attention.analysis.base import Analysis, OnImages, Subject, Table, option
from inline_attention.analysis.hooks import observe
from inline_attention.analysis.neighbours import neighbours
from inline_attention.analysis.record import LayerAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDES = (3, 5, 7)


class Condition(NamedTuple):
    what: Literal["none", "local", "random"]
    tokens: int  # masked for each query on the map: side², fewer at a border, for both kinds of mask
    local_terms: Literal["zeroed", "kept", "none"]  # taps on masked tokens; "none": the model has no local terms

    def __str__(self) -> str:
        if self.what == "none":
            return "none"
        return f"{self.what} {self.tokens}" + ("" if self.local_terms == "none" else f", taps {self.local_terms}")


@dataclass(frozen=True)
class Outcome:
    condition: Condition
    agreement: float  # share of images with the prediction of the unmasked model
    top1: float | None  # share of images with the right prediction; None without labels
    logit_change: float  # mean over images of ‖change of logits‖ / ‖logits‖
    # (images,) bool, what `agreement` and `top1` are the means of
    agreed: np.ndarray = field(compare=False, metadata={"plain": False})
    correct: np.ndarray | None = field(compare=False, metadata={"plain": False})


@dataclass(frozen=True)
class MaskingResult:
    """Each query on the map loses the window around it, itself included, or as many random tokens.

    Everything is computed as if those tokens were absent for that query. Prefix tokens are never masked, and nothing is
    masked for them as queries.
    """

    outcomes: list[Outcome]
    top1: float | None  # of the unmasked model
    images: int
    masked_layers: dict[int, list[str]]  # by the number of tokens: the layers whose map is larger than that
    skipped: dict[str, str]  # layers that are never masked, and why
    seed: int

    def summary(self) -> dict[str, Any]:
        agreement = {str(outcome.condition): outcome.agreement for outcome in self.outcomes}
        top1 = {str(outcome.condition): outcome.top1 for outcome in self.outcomes if outcome.top1 is not None}
        return dict(images=self.images, agreement=agreement, top1=top1 or None)


def window_mask(record: LayerAttention, side: int) -> Callable[[slice], Tensor]:
    """Which tokens chosen rows see when the side×side window around each query is masked: (rows, N) bool"""
    tokens = record.k.shape[1]
    around = neighbours(record.grid, (side, side), num_prefix_tokens=record.num_prefix_tokens, device=record.q.device)

    def mask(rows: slice) -> Tensor:
        at = around[rows]
        seen = torch.ones(len(at), tokens + 1, dtype=torch.bool, device=at.device)  # the last: beyond the border
        return seen.scatter_(1, torch.where(at < 0, tokens, at), False)[:, :tokens]

    return mask


def random_mask(record: LayerAttention, side: int, generator: torch.Generator) -> Callable[[slice], Tensor]:
    """Which tokens chosen rows see when each query loses random tokens of the map.

    A query loses as many as `window_mask` hides from it: fewer at a border, and no padding. → (S or 1, rows, N) bool
    """
    prefix, tokens = record.num_prefix_tokens, record.k.shape[1]
    around = neighbours(record.grid, (side, side), num_prefix_tokens=prefix)
    present = torch.ones(1, tokens, dtype=torch.bool) if record.token_mask is None else record.token_mask.cpu()
    counts = (present[:, around.clamp(min=0)] & (around >= 0)).sum(-1)  # (S or 1, N), none for prefix tokens

    def mask(rows: slice) -> Tensor:
        count = counts[:, rows]
        # Drawn on the CPU: the same tokens on every device. Absent tokens come last.
        draws = torch.rand(*count.shape, tokens - prefix, generator=generator)
        draws.masked_fill_(~present[:, None, prefix:], -1)
        chosen = draws.topk(side**2).indices + prefix
        hidden = torch.where(torch.arange(side**2) < count[..., None], chosen, tokens)  # the last: none
        seen = torch.ones(*count.shape, tokens + 1, dtype=torch.bool).scatter_(2, hidden, False)
        return seen[..., :tokens].to(record.q.device)

    return mask


@dataclass
class _Tally:
    agreed: list[Tensor] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    change: float = 0.0

    def add(self, logits: Tensor, plain: Tensor, targets: Tensor | None) -> None:
        predicted = logits.argmax(1)
        self.agreed.append(predicted == plain.argmax(1))
        self.change += float(((logits - plain).norm(dim=1) / plain.norm(dim=1)).sum())
        if targets is not None:
            self.correct.append(predicted == targets)

    def outcome(self, condition: Condition, *, labelled: bool) -> Outcome:
        agreed = torch.cat(self.agreed).cpu().numpy()
        correct = torch.cat(self.correct).cpu().numpy() if labelled else None
        top1 = None if correct is None else float(correct.mean())
        return Outcome(condition, float(agreed.mean()), top1, self.change / len(agreed), agreed, correct)


@dataclass
class _Masker:
    """Replaces the output of each layer by its output under a condition."""

    condition: Condition
    side: int
    seed: int
    masked: dict[int, list[str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def start(self, batch: int) -> None:
        self.generator = torch.Generator().manual_seed(self.seed + batch)

    def __call__(self, record: LayerAttention) -> Tensor | None:
        if self.condition.what == "none":
            return record.recompute_output()
        if record.key_grid is not None:
            self.skipped[record.name] = "its keys are a reduced map"
            return None
        count = self.side**2
        if count >= record.grid[0] * record.grid[1]:  # no token would be left
            return None
        names = self.masked.setdefault(count, [])
        if record.name not in names:
            names.append(record.name)
        if self.condition.what == "local":
            mask = window_mask(record, self.side)
        else:
            mask = random_mask(record, self.side, self.generator)
        return record.recompute_output(mask=mask, mask_local=self.condition.local_terms != "kept")


def measure_masking(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor | None]],
    *,
    sides: Sequence[int] = SIDES,
    seed: int = 0,
    on_images: Callable[[int], None] | None = None,
) -> MaskingResult:
    """Predictions under masks, over batches of images and their labels, if there are any.

    Args:
        sides: sides of the windows, odd. Random masks hide as many tokens of each query as its window has.
        seed: seed of the random tokens, which differ for every query, layer and batch.

    Layers whose map is not larger than a window are not masked. A window that fits no layer has no outcome. ValueError
    if none of the windows fits a layer.
    """
    if any(side < 1 or side % 2 == 0 for side in sides):
        raise ValueError(f"sides={tuple(sides)}; expected odd numbers")
    maskers: list[_Masker] = []
    tallies: list[_Tally] = []
    images, labelled = 0, True
    for number, (batch, targets) in enumerate(batches):
        has_local = False

        def find_local_terms(record: LayerAttention) -> None:
            nonlocal has_local
            has_local = has_local or bool(record.local)

        plain = observe(model, batch, find_local_terms)
        if not maskers:
            maskers = [_Masker(condition, side, seed) for condition, side in _conditions(sides, has_local)]
            tallies = [_Tally() for _ in maskers]
        labelled = labelled and targets is not None
        for masker, tally in zip(maskers, tallies, strict=True):
            masker.start(number)
            tally.add(observe(model, batch, masker), plain, targets)
        if not any(masker.masked or masker.skipped for masker in maskers):
            raise ValueError(f"sides={tuple(sides)}: no layer has a map larger than such a window; give smaller sides")
        images += len(batch)
        if on_images is not None:
            on_images(len(batch))
    if not images:
        raise ValueError("there are no images to mask")
    outcomes = [
        t.outcome(m.condition, labelled=labelled)
        for m, t in zip(maskers, tallies, strict=True)
        if m.masked or m.condition.what == "none"  # leave out windows that masked nothing
    ]
    masked, skipped = ({k: v for m in maskers for k, v in getattr(m, name).items()} for name in ("masked", "skipped"))
    return MaskingResult(outcomes, outcomes[0].top1, images, masked, skipped, seed)


def _conditions(sides: Sequence[int], has_local: bool) -> list[tuple[Condition, int]]:
    variants: tuple[Literal["zeroed", "kept", "none"], ...] = ("zeroed", "kept") if has_local else ("none",)
    kinds: tuple[Literal["local", "random"], ...] = ("local", "random")
    found = [(Condition("none", 0, "none"), 0)]
    return found + [(Condition(kind, side**2, terms), side) for kind in kinds for side in sides for terms in variants]


@dataclass(frozen=True, kw_only=True)
class Masking(Analysis):
    """What does a prediction rest on? Each query loses the window around it, or as many random tokens: everything is
    computed as if they were absent for that query. The taps of local terms on masked tokens are zeroed, or kept.
    """

    least_images = 100  # so that one image is at most one point of accuracy

    sides: tuple[int, ...] = option(SIDES, "sides of the windows", type=int, nargs="+")
    seed: int = option(0, "seed of the random tokens", type=int)

    def measure(self, subject: Subject, on_images: OnImages) -> MaskingResult:
        return measure_masking(subject.model, subject.batches(), sides=self.sides, seed=self.seed, on_images=on_images)

    def warn_of_few(self, images: int) -> str | None:
        warning = super().warn_of_few(images)
        return warning and f"{warning}; each image is {100 / images:.3g} points"

    def table(self, results: Mapping[str, MaskingResult]) -> Table:
        """Header and lines of a CSV file: a line for each condition."""
        lines = [
            (label, *outcome.condition, outcome.agreement, outcome.top1, outcome.logit_change)
            for label, result in results.items()
            for outcome in result.outcomes
        ]
        return ("model", "masked", "tokens", "local_terms", "agreement", "top1", "logit_change"), lines

    def draw(self, results: Mapping[str, MaskingResult]) -> "Figure":
        """Accuracy, or agreement with the unmasked model, for each mask; hatched where local terms keep their taps."""
        from inline_attention.analysis import figures

        labelled = all(result.top1 is not None for result in results.values())
        masks = list(
            dict.fromkeys((o.condition.what, o.condition.tokens) for r in results.values() for o in r.outcomes)
        )
        series: dict[tuple[str, str], dict[int, float]] = {}
        for label, result in results.items():
            for outcome in result.outcomes:
                what, tokens, terms = outcome.condition
                value = outcome.top1 if labelled and outcome.top1 is not None else outcome.agreement
                # Without a mask there are no taps to keep.
                variants: tuple[str, ...] = ("zeroed", "kept") if what == "none" and _has_taps(result) else (terms,)
                for variant in variants:
                    series.setdefault((label, variant), {})[masks.index((what, tokens))] = 100 * value
        figure = figures.new_figure(max(figures.WIDTH, 0.3 * len(masks) * len(series)), 4.4)
        axes = figure.subplots()
        width = 0.85 / len(series)
        styles = figures.styles(results)
        for i, ((label, variant), values) in enumerate(series.items()):
            places = [place + (i - (len(series) - 1) / 2) * width for place in values]
            style: dict[str, Any] = dict(color=styles[label]["color"], edgecolor="white")
            if variant == "kept":
                style.update(hatch="////", alpha=0.75)
            name = label if variant == "none" else f"{label}, taps {variant}"
            bars = axes.bar(places, list(values.values()), width, label=name, **style)
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_xticks(range(len(masks)), [what if what == "none" else f"{what} {tokens}" for what, tokens in masks])
        ylabel = "top-1 (%)" if labelled else "same prediction as unmasked (%)"
        axes.set(xlabel="tokens masked for each query", ylabel=ylabel)
        figures.add_legend(figure, axes)
        images = ", ".join(map(str, sorted({result.images for result in results.values()})))
        figures.add_caption(
            figure,
            "local n: the window of n tokens around each query, cut at borders; random n: as many random tokens. Both "
            f"as if absent for that query, in every layer. Taps: of local terms on masked tokens. Images: {images}.",
        )
        return figures.with_grid(figure, axis="y")


def _has_taps(result: MaskingResult) -> bool:
    return any(outcome.condition.local_terms == "kept" for outcome in result.outcomes)
