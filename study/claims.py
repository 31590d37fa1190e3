"""The paper's claims. Each has an effect with its 95 % interval, and the interval makes the verdict."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from study.ablation import WITHOUT_RESIDUAL
from study.grid import (
    BASELINES,
    DATA_SHARES,
    DATASETS,
    FAMILY,
    PHI,
    ROWS,
    SHARED_MAPS,
    WINDOW_SIZES,
    epochs_of,
    feature_map_row,
    shared_map_row,
)
from study.intervals import Effect, effect_of, paired
from study.measures import CONFUSED_AT, masking_drops, speed_name
from study.results import Results, Setting

SUPPORTED, CONTRADICTED = "supported", "contradicted"
INCONCLUSIVE, NOT_TESTABLE = "inconclusive", "not testable here"
LEVEL_POINTS = 1.0  # largest distance that counts as level
PUBLISHED_RATIOS = {640: 2.4, 1024: 4.8}  # side of the images → speed of InLine-DeiT-T over that of DeiT-T
# Speeds that were measured twice on one H200 differ by at most 1.4 % (models-second-h200.json, batches of 8 or more).
TIMING_ERROR = 0.05
POINTS = "points"

Check = Callable[[Results], "Claim"]


@dataclass(frozen=True)
class Claim:
    name: str  # the same in every report
    claim: str
    about: str  # what was compared, for people
    effect: Effect | None = None  # None: not measured
    unit: str = POINTS
    limit: float = 0.0  # the claim says that the effect is above it
    where: str = ""  # the setting of the effect
    verdict: str = INCONCLUSIVE
    parts: Mapping[str, Effect] = field(default_factory=dict)  # of several comparisons; `effect` is the lowest
    missing: int = 0  # comparisons without which the claim cannot be supported

    @property
    def reading(self) -> str:
        """How the effect makes the verdict, as a sentence."""
        if self.verdict == NOT_TESTABLE:
            return ""
        if self.effect is None:
            return "This is not measured yet."
        if self.effect.seeds == 0:
            near = f"The ratio is within {100 * TIMING_ERROR:g} % of {self.limit:g}."
            return near if self.verdict == INCONCLUSIVE else ""
        unit = self.unit.removesuffix("s") if abs(self.limit) == 1 else self.unit
        limit = "zero" if self.limit == 0 else f"{self.limit:+g} {unit}".replace("-", "−")
        if self.effect.margin is None:
            return "There is one seed, so there is no interval."
        if self.parts and self.verdict != CONTRADICTED:
            above = {verdict_on(effect, limit=self.limit) for effect in self.parts.values()} == {SUPPORTED}
            missing = f", and {self.missing} are missing" if self.missing else ""
            return f"{'All' if above else 'Not all'} of {len(self.parts)} intervals are above {limit}{missing}."
        if self.verdict == INCONCLUSIVE:
            return f"The interval contains {limit}."
        which = "lowest" if self.parts else "whole"
        return f"The {which} interval is {'above' if self.verdict == SUPPORTED else 'below'} {limit}."

    def judged(self, effect: Effect | None, where: str = "") -> "Claim":
        """The same claim with this effect, and what its interval says."""
        return replace(self, effect=effect, where=where, verdict=verdict_on(effect, limit=self.limit))

    def judged_by_all(self, parts: Mapping[str, Effect], where: str = "", *, missing: int = 0) -> "Claim":
        """The same claim, resting on several comparisons by name.

        It is supported if all of them support it and none is missing. It is contradicted if the one with the lowest
        mean contradicts it. That any interval is below would be too weak a reason: of nine rivals that are all level,
        chance puts one there in one of six studies.
        """
        lowest = self.judged(min(parts.values(), key=lambda effect: effect.mean), where)
        supports = {verdict_on(effect, limit=self.limit) for effect in parts.values()} == {SUPPORTED}
        verdict = CONTRADICTED if lowest.verdict == CONTRADICTED else INCONCLUSIVE
        verdict = SUPPORTED if supports and not missing else verdict
        return replace(lowest, verdict=verdict, parts=dict(parts), missing=missing)


def verdict_on(effect: Effect | None, *, limit: float = 0.0) -> str:
    """Supported: the whole interval is above the limit. Contradicted: it is below."""
    if effect is None or effect.low is None or effect.high is None:
        return INCONCLUSIVE
    if effect.low > limit:
        return SUPPORTED
    return CONTRADICTED if effect.high < limit else INCONCLUSIVE


def judge(results: Results) -> list[Claim]:
    """Every claim with its effect and verdict."""
    return [check(results) for check in _CHECKS] + [
        Claim(name, claim, why, verdict=NOT_TESTABLE) for name, claim, why in _NOT_TESTABLE_HERE
    ]


def _at(setting: Setting, effect: Effect) -> str:
    seeds = "one seed" if effect.seeds == 1 else f"{effect.seeds} seeds"
    data = "" if setting.dataset == "tiny_imagenet" else f"{DATASETS[setting.dataset].title}, "
    return f"{data}{setting.epochs} epochs, {seeds}"


# Accuracy


def _compare(name: str, better: str, worse: str, claim: str, about: str, *, limit: float = 0.0) -> Check:
    """The difference of two rows, in the setting where both have the most seeds."""
    empty = Claim(name, claim, about, limit=limit)

    def check(results: Results) -> Claim:
        for setting in results.settings_of(better, worse):
            effect = results.difference(setting, better, worse)
            assert effect is not None
            return empty.judged(effect, _at(setting, effect))
        return empty

    return check


def _equal_maps(name: str, claim: str, about: str, *, residual: bool) -> Check:
    """InLine − linear attention with the same φ, for each feature map."""
    empty = Claim(name, claim, about)

    def check(results: Results) -> Claim:
        pairs = {
            f"φ = {PHI[phi]}": [shared_map_row(attention, phi, residual=residual) for attention in ("inline", "linear")]
            for phi in SHARED_MAPS
        }
        names = [row for pair in pairs.values() for row in pair]
        for setting in results.settings_of(*names):
            top1 = results.common_seeds(setting, names).items()
            parts = {phi: effect_of({seed: of[a] - of[b] for seed, of in top1}) for phi, (a, b) in pairs.items()}
            return empty.judged_by_all(parts, _at(setting, next(iter(parts.values()))))
        return empty

    return check


def _feature_maps(results: Results) -> Claim:
    empty = Claim(
        "feature_maps",
        "InLine attention works with every feature map; linear attention depends on it",
        "The effect is how much further apart the best and the worst of five φ are in linear attention than in InLine "
        "attention, both without the residual. With the identity, the divisor of linear attention passes through zero.",
    )
    inline, linear = ([feature_map_row(kind, name) for name in PHI] for kind in ("inline", "linear"))

    def reach(top1: Mapping[str, float], rows: Sequence[str]) -> float:
        values = [top1[row] for row in rows]
        return max(values) - min(values)

    for setting in results.settings_of(*inline, *linear):
        top1 = results.common_seeds(setting, [*inline, *linear])
        effect = effect_of({seed: reach(of, linear) - reach(of, inline) for seed, of in top1.items()})
        return empty.judged(effect, _at(setting, effect))
    return empty


def _other_linear(results: Results) -> Claim:
    empty = Claim(
        "other_linear",
        "InLine attention is ahead of the other linear attentions",
        "InLine is compared with each of them, at equal parameters. The best of several is partly the luckiest, so "
        "chance contradicts this claim more often than it supports it.",
    )
    others = [row for row in (*BASELINES, *FAMILY) if not row.endswith("_residual")]
    rivals: dict[Setting, dict[str, Effect]] = {}
    for row in others:
        for setting in results.settings_of("inline", row):
            effect = results.difference(setting, "inline", row)
            assert effect is not None
            rivals.setdefault(setting, {})[row] = effect
    if not rivals:
        return empty

    def evidence(setting: Setting) -> tuple[int, int, int]:
        found = rivals[setting]
        return min(effect.seeds for effect in found.values()), len(found), setting.epochs

    setting = max(rivals, key=evidence)
    parts = {f"against {ROWS[row].title}": effect for row, effect in rivals[setting].items()}
    lowest = min(parts.values(), key=lambda effect: effect.mean)
    return empty.judged_by_all(parts, _at(setting, lowest), missing=len(others) - len(parts))


# Probes


def _probe(
    name: str, claim: str, about: str, difference: Callable[[dict[str, Any]], Effect], *, limit: float = 0.0
) -> Check:
    empty = Claim(name, claim, about, limit=limit)

    def check(results: Results) -> Claim:
        if results.probes is None:
            return empty
        effect = difference(results.probes)
        return empty.judged(effect, f"probe; {effect.seeds} seeds")

    return check


def _probed(scores: Mapping[str, Any], better: str, worse: str) -> Effect:
    effect = paired(*(dict(enumerate(scores[name]["values"])) for name in (better, worse)))
    assert effect is not None
    return effect


def _below_chance(probes: dict[str, Any], variant: str) -> Effect:
    """Chance less the accuracy of linear attention with ReLU in the length probe."""
    values = probes["length"][variant]["linear, ReLU"]["values"]
    return effect_of({seed: probes["chance"] - value for seed, value in enumerate(values)})


def _control(probes: dict[str, Any]) -> Effect:
    """How much less than two points the attentions are apart, by seed."""
    by_seed = zip(*(score["values"] for score in probes["mean"].values()), strict=True)
    return effect_of({seed: 2 - (max(values) - min(values)) for seed, values in enumerate(by_seed)})


# Analyses of trained models


def _analysed(
    name: str,
    claim: str,
    about: str,
    rows: Sequence[str],
    part: str,
    compare: Callable[..., Mapping[str, float]],
    *,
    unit: str = POINTS,
) -> Check:
    """Quantities of one part of the analyses of these rows by name, for each seed that all rows have."""
    empty = Claim(name, claim, about, unit=unit)

    def check(results: Results) -> Claim:
        best: dict[int, Mapping[str, float]] = {}  # by seed
        at: Setting | None = None
        for setting in results.settings_of(*rows):
            found = [results.analyses(setting, row, part) for row in rows]
            seeds = set.intersection(*map(set, found))
            if len(seeds) > len(best):
                at, best = setting, {seed: compare(*(of[seed][part] for of in found)) for seed in sorted(seeds)}
        if at is None:
            return empty
        names = next(iter(best.values()))
        effects = {name: effect_of({seed: values[name] for seed, values in best.items()}) for name in names}
        first, *others = effects.values()
        return empty.judged_by_all(effects, _at(at, first)) if others else empty.judged(first, _at(at, first))

    return check


def _confusion_at(index: int) -> Callable[..., dict[str, float]]:
    tau, rho = CONFUSED_AT[index]

    def more(*models: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        linear, inline, softmax = (1e6 * thresholds[index]["share_of_pairs"] for thresholds in models)
        at = f"τ = {tau:g}, ρ = {rho:g}"
        return {f"linear − InLine, {at}": linear - inline, f"linear − softmax, {at}": linear - softmax}

    return more


def _confusion(results: Results) -> Claim:
    """Judged at every pair of thresholds: all must agree."""
    checks = [
        _analysed(
            "confusion",
            "In trained models linear attention confuses more queries than softmax and InLine attention",
            "A pair of queries is confused if its rows are much closer than usual while its queries are not. All pairs "
            "of thresholds must agree. The models are as published, so φ differs too.",
            ("linear", "inline", "softmax"),
            "confused",
            _confusion_at(index),
            unit="pairs in a million",
        )(results)
        for index in range(len(CONFUSED_AT))
    ]
    verdicts = {claim.verdict for claim in checks}
    lowest = min(checks, key=lambda claim: 0 if claim.effect is None else claim.effect.mean)
    parts = {name: effect for claim in checks for name, effect in claim.parts.items()}
    return replace(lowest, parts=parts, verdict=lowest.verdict if len(verdicts) == 1 else INCONCLUSIVE)


def _more_local(layers: Callable[[list[float]], float]) -> Callable[..., dict[str, float]]:
    """How much more of its attention softmax has in the neighbourhood than each other, as a multiple of chance."""

    def more(*models: Mapping[str, Any]) -> dict[str, float]:
        softmax, linear, inline = (layers(_over_chance(locality)) for locality in models)
        return {"softmax − linear": softmax - linear, "softmax − InLine without residual": softmax - inline}

    return more


def _over_chance(locality: Mapping[str, Any]) -> list[float]:
    """Attention to the 3×3 neighbourhood by layer, as a multiple of chance."""
    return [share / chance for share, chance in zip(locality["by_layer"], locality["chance"], strict=True)]


def _lost_locally(masking: Mapping[str, Any]) -> float:
    """What the largest local mask costs more than as many random tokens, attention alone masked."""
    drops = masking_drops(masking)
    most = max(drops["local"])
    return drops["local"][most] - drops["random"][most]


def _lost_without_residual(ablation: Sequence[Mapping[str, Any]]) -> float:
    """In per cent of the accuracy of the whole model: a more accurate model has more points to lose."""
    without = next(row for row in ablation if row["title"] == WITHOUT_RESIDUAL)
    return 100 * without["lost"] / (without["top1"] + without["lost"])


# Speed: one measurement on one machine


def _timed(empty: Claim, ratio: float, where: str) -> Claim:
    """Supported if the ratio is above the claim's limit by more than timings differ."""
    verdict = INCONCLUSIVE
    if abs(ratio / empty.limit - 1) > TIMING_ERROR:
        verdict = SUPPORTED if ratio > empty.limit else CONTRADICTED
    return replace(empty, effect=Effect(ratio, None, 0), where=where, verdict=verdict)


def _short(machine: str) -> str:
    """The name of a machine, without its memory and capability."""
    return machine.partition(", ")[0]


def _speed(results: Results) -> Claim:
    empty = Claim(
        "cost",
        "InLine attention costs less than softmax attention where there are many tokens",
        "Images a second of the two models in inference, at the most tokens measured. Softmax runs on FlashAttention.",
        unit="times as fast",
        limit=1.0,
    )
    if results.speed is None:
        return empty
    rows = results.speed["rows"]
    found = []
    for setting in filter(lambda s: s.is_evidence, results.settings):
        names = [speed_name(setting.dataset, setting.patch, row) for row in ("inline", "softmax")]
        if all(rows.get(name, {}).get("infer") for name in names):
            found.append((setting.tokens, rows[names[0]]["infer"] / rows[names[1]]["infer"]))
    if not found:
        return empty
    tokens, ratio = max(found)
    return _timed(empty, ratio, f"{tokens} tokens, {_short(results.speed['machine'])}")


def _resolution(name: str, claim: str, about: str, attribute: str, wanted: Mapping[int, float]) -> Check:
    """The speed of InLine-DeiT-T over that of DeiT-T; the size that misses its ratio by most decides."""
    empty = Claim(name, claim, about, unit="times as fast")

    def check(results: Results) -> Claim:
        ratios = {} if results.sweep is None else getattr(results.sweep, attribute)
        if not wanted.keys() <= ratios.keys():
            return replace(empty, limit=wanted[max(wanted)])
        assert results.sweep is not None
        side = min(wanted, key=lambda side: ratios[side] / wanted[side])
        parts = {f"{side} px": Effect(ratios[side], None, 0) for side in wanted}
        here = replace(empty, limit=wanted[side], parts=parts)
        return _timed(here, ratios[side], _short(results.sweep.machine))

    return check


def _window_speed(results: Results) -> Claim:
    empty = Claim(
        "window_speed",
        "InLine-Swin does not get slower by larger windows",
        "Images a second of the whole map over those of the smallest window, in inference, with the residual. A tenth "
        "slower would still be as fast.",
        unit="times as fast",
        limit=0.9,
    )
    rows = {} if results.speed is None else results.speed["rows"]
    ends = (max(WINDOW_SIZES), min(WINDOW_SIZES))
    whole, small = (
        rows.get(speed_name("tiny_imagenet", 4, f"swin_window{size}_residual"), {}).get("infer") for size in ends
    )
    if not whole or not small:
        return empty
    assert results.speed is not None
    return _timed(empty, whole / small, _short(results.speed["machine"]))


# Claims that cannot be decided here: name, claim, reason
_NOT_TESTABLE_HERE = (
    (
        "theorem",
        "No continuous feature map makes linear attention injective",
        "This is a theorem. The length probe shows it for ReLU and LeakyReLU. With exp, linear attention tells those "
        "queries apart and confuses others.",
    ),
    (
        "imagenet",
        "InLine-DeiT-T has 74.5 % on ImageNet, DeiT-T 72.2 %, and so on for the other models",
        "This needs ImageNet and eight GPUs for 300 epochs. Recipes are in the package.",
    ),
    (
        "dense",
        "InLine-Swin-T is ahead of Swin-T in segmentation and detection",
        "This needs ADE20K and COCO, and backbones trained on ImageNet. Heads and recipes are in the package.",
    ),
)


_CHECKS: tuple[Check, ...] = (
    _compare(
        "gap", "softmax", "linear",
        "There is a gap: softmax attention is ahead of linear attention",
        "Softmax against linear attention with ReLU, both without a residual.",
    ),
    _compare(
        "inline_linear", "inline", "linear",
        "InLine attention is ahead of linear attention",
        "Both as published: InLine has the identity as φ and the residual, linear attention has ReLU and none. "
        "So three things differ.",
    ),
    _compare(
        "inline_softmax", "inline", "softmax",
        "InLine attention is at least level with softmax attention",
        f"InLine with its residual against softmax. Level means not more than {LEVEL_POINTS:g} point behind.",
        limit=-LEVEL_POINTS,
    ),
    _equal_maps(
        "injectivity",
        "Injectivity alone raises accuracy",
        "InLine against linear attention with the same φ, once ReLU and once the learned map, both without the "
        "residual. Subtraction, which makes attention injective, is all that differs.",
        residual=False,
    ),
    _equal_maps(
        "injectivity_residual",
        "Injectivity raises accuracy beside local modelling",
        "The same, with the residual in both.",
        residual=True,
    ),
    _compare(
        "residual_inline", "inline", "inline_plain",
        "InLine attention gains from its local residual",
        "InLine with and without the 3×3 residual, at equal parameters.",
    ),
    _compare(
        "residual_linear", "linear_residual", "linear",
        "Linear attention gains from the same residual",
        "Linear attention with and without the 3×3 residual, at equal parameters.",
    ),
    _compare(
        "inline_linear_residual", "inline", "linear_residual",
        "InLine attention is ahead of linear attention with the same residual",
        "Both with the residual. φ differs: the identity in InLine, ReLU in linear attention.",
    ),
    _other_linear,
    _feature_maps,
    _compare(
        "mapped_softmax", "softmax", "softmax_relu",
        "Softmax attention loses accuracy behind a function that is not injective",
        "Softmax against softmax of ReLU(q) and ReLU(k).",
    ),
    _compare(
        "windows", f"swin_window{max(WINDOW_SIZES)}_residual", f"swin_window{min(WINDOW_SIZES)}_residual",
        "InLine attention gains from larger windows, up to the whole map",
        "InLine-Swin with the residual: the whole map against the smallest window.",
    ),
    _probe(
        "length",
        "Linear attention cannot tell collinear queries apart",
        "A bare layer of linear attention with ReLU must name the length of a query. The effect is chance less its "
        f"accuracy; level means not more than {LEVEL_POINTS:g} point above chance.",
        lambda probes: _below_chance(probes, "bare"),
        limit=-LEVEL_POINTS,
    ),
    _probe(
        "length_inline",
        "InLine attention can tell collinear queries apart",
        "The same layer with InLine attention against linear attention, both with ReLU as φ.",
        lambda probes: _probed(probes["length"]["bare"], "InLine, ReLU", "linear, ReLU"),
    ),
    _probe(
        "length_skip",
        "Linear attention cannot tell them apart in a network either, where there is a skip",
        "The layer of linear attention has a skip connection beside it, which every published network has. It is "
        "compared with chance again.",
        lambda probes: _below_chance(probes, "skip"),
        limit=-LEVEL_POINTS,
    ),
    _probe(
        "length_skip_inline",
        "InLine attention tells them apart better, where there is a skip",
        "InLine against linear attention, both with ReLU as φ and with the skip connection.",
        lambda probes: _probed(probes["length"]["skip"], "InLine, ReLU", "linear, ReLU"),
    ),
    _probe(
        "local_residual",
        "The 3×3 residual supplies local detail that attention alone does not",
        "One block must say which neighbour of a token is the brightest: InLine with against InLine without residual.",
        lambda probes: _probed(probes["local"], "InLine + residual", "InLine"),
    ),
    _probe(
        "local_softmax",
        "Softmax attention gets at local detail better than linear attention",
        "The same block: softmax against linear attention with ReLU.",
        lambda probes: _probed(probes["local"], "softmax", "linear, ReLU"),
    ),
    _probe(
        "control",
        "Control: where neither property is needed, all attentions are within two points",
        "One block must name the mean brightness. The effect is how much less than two points they are apart.",
        _control,
    ),
    _confusion,
    _analysed(
        "locality",
        "Softmax attention is local in the first layer; linear and InLine attention less",
        "Attention to the 3×3 neighbourhood, as a multiple of chance: softmax less linear attention, and less InLine "
        "without residual.",
        ("softmax", "linear", "inline_plain"),
        "locality",
        _more_local(lambda layers: layers[0]),
        unit="times chance",
    ),
    _analysed(
        "locality_mean",
        "Softmax attention is local in the mean of all layers; linear and InLine attention less",
        "The same, as the mean over the layers.",
        ("softmax", "linear", "inline_plain"),
        "locality",
        _more_local(statistics.fmean),
        unit="times chance",
    ),
    _analysed(
        "masking",
        "Masking local tokens costs more than masking as many random ones",
        "Every query loses its 7×7 window, or as many random tokens, in softmax and in InLine attention.",
        ("softmax", "inline"),
        "masking",
        lambda softmax, inline: {"softmax": _lost_locally(softmax), "InLine": _lost_locally(inline)},
    ),
    _analysed(
        "masking_softmax",
        "Local tokens matter more to softmax than to InLine attention",
        "What local masks cost more than random ones: softmax less InLine, the taps of the residual kept.",
        ("softmax", "inline"),
        "masking",
        lambda softmax, inline: {"softmax − InLine": _lost_locally(softmax) - _lost_locally(inline)},
    ),
    _speed,
    _resolution(
        "speed_math",
        "InLine-DeiT-T is as much faster than DeiT-T as published",
        "Inference, against DeiT-T with softmax written out, as in the paper. "
        + " ".join(f"At {side} px the paper has {x:g} times its speed." for side, x in PUBLISHED_RATIOS.items()),
        "math_ratios",
        PUBLISHED_RATIOS,
    ),
    _resolution(
        "speed_flash",
        "InLine-DeiT-T is faster than DeiT-T with FlashAttention",
        "Inference, against the counterpart as it is run today.",
        "ratios",
        dict.fromkeys(PUBLISHED_RATIOS, 1.0),
    ),
    _window_speed,
)  # fmt: skip

# Why linear attention with the residual is ahead of InLine. Each explanation has an experiment and is judged like a
# claim: the effect is above zero if the explanation holds. The gap is InLine − linear attention, both with residual.


def _gap_change(
    name: str, claim: str, about: str, rows: tuple[str, str], others: Mapping[str, tuple[str, str]]
) -> Check:
    """The gap of two rows less that of each other two, by seed. All of them are trained with as many updates."""
    empty = Claim(name, claim, about)

    def gap(results: Results, setting: Setting, pair: tuple[str, str]) -> dict[int, float]:
        there = setting._replace(epochs=epochs_of(pair[0], setting.epochs))
        top1 = results.common_seeds(there, pair) if set(pair) <= results.rows(there).keys() else {}
        return {seed: of[pair[0]] - of[pair[1]] for seed, of in top1.items()}

    def check(results: Results) -> Claim:
        found = []
        for setting in results.settings_of(*rows):
            effects = {
                part: paired(gap(results, setting, rows), gap(results, setting, o)) for part, o in others.items()
            }
            known = {part: effect for part, effect in effects.items() if effect is not None}
            if known.keys() == others.keys():
                found.append((min(effect.seeds for effect in known.values()), setting.epochs, setting, known))
        if not found:
            return empty
        *_, setting, known = max(found, key=lambda of: of[:2])
        first = next(iter(known.values()))
        where = _at(setting, first)
        return empty.judged_by_all(known, where) if len(known) > 1 else empty.judged(first, where)

    return check


_EXPLANATIONS: tuple[Check, ...] = (
    _compare(
        "why_map", "inline_relu_residual", "inline",
        "InLine's φ is the identity, and linear attention has ReLU",
        "InLine with ReLU against InLine with the identity, both with the residual (`shared_maps`).",
    ),
    _compare(
        "why_gain", "inline_gain", "inline",
        "InLine's attention is too flat: its scores need a scale",
        "A learned gain per head against none (`gain`).",
    ),
    _compare(
        "why_start", "inline_larger_start", "inline_gain",
        "InLine's attention starts too flat",
        "A learned gain that starts at 8 against one that starts at 1 (`gain`).",
    ),
    _analysed(
        "why_residual",
        "InLine rests less on its residual than linear attention",
        "The share of its accuracy that each loses without the residual: linear attention less InLine (`long`).",
        ("linear_residual", "inline"),
        "ablation",
        lambda linear, inline: {"linear − InLine": _lost_without_residual(linear) - _lost_without_residual(inline)},
        unit="% of the accuracy",
    ),
    _gap_change(
        "why_augmentation",
        "Models overfit, and this favours linear attention",
        "The gap is InLine less linear attention, both with the residual. The gap with the published augmentation is "
        "compared with the gap without, at as many epochs (`augmentation`).",
        ("inline_published", "linear_residual_published"),
        {"all images": ("inline", "linear_residual")},
    ),
    _gap_change(
        "why_data",
        "InLine needs more images",
        "The same gap with all images against a quarter and a half of them, at as many updates (`data_size`).",
        ("inline", "linear_residual"),
        {part: (f"inline_{part}_data", f"linear_residual_{part}_data") for part in DATA_SHARES},
    ),
)  # fmt: skip


def explain(results: Results) -> list[Claim]:
    """Explanations of the main result, each with the effect of its experiment."""
    return [check(results) for check in _EXPLANATIONS]


# What the report of version 0.1 said: name → verdict. It called a difference of means larger than two standard errors
# "confirmed" and every other "not confirmed", with one standard deviation for all rows.
EARLIER = {
    "gap": "not confirmed", "inline_linear": "not confirmed", "inline_softmax": "confirmed",
    "injectivity": "not confirmed", "injectivity_residual": "not confirmed", "residual_inline": "confirmed",
    "residual_linear": "confirmed", "inline_linear_residual": "not confirmed", "other_linear": "not confirmed",
    "feature_maps": "confirmed", "mapped_softmax": "not confirmed", "windows": "not confirmed",
    "length": "confirmed", "length_skip": "not confirmed",
    "local_residual": "confirmed", "local_softmax": "not confirmed",
    "control": "confirmed", "locality": "confirmed", "locality_mean": "not confirmed", "masking": "not confirmed",
    "cost": "confirmed", "speed_math": "not confirmed", "window_speed": "confirmed",
}  # fmt: skip
