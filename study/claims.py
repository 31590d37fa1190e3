"""The paper's claims, each with the rule that turns our measurements into a verdict."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from study.grid import BASELINES, PHI, ROWS, SEEDS, WINDOW_SIZES, feature_map_row
from study.measures import masking_changes, masking_drops, speed_name
from study.results import Gap, Results, Sample, Setting, describe_seeds

CONFIRMED, NOT_CONFIRMED = "confirmed", "not confirmed"
NOT_MEASURED, NOT_TESTABLE = "not measured yet", "not testable here"
TWO_ERRORS = "ahead by more than two standard errors of the difference"
LEVEL_POINTS = 1.0  # largest distance that counts as level
ALIKE_POINTS = 5.0  # largest distance of feature maps that all work
PUBLISHED_RATIOS = {640: 2.4, 1024: 4.8}  # side of the images → speed of InLine-DeiT-T over that of DeiT-T


@dataclass(frozen=True)
class Claim:
    claim: str
    rule: str  # the condition for "confirmed"
    measured: str = ""
    verdict: str = NOT_MEASURED


def judge(results: Results) -> list[Claim]:
    """Every claim with its measurement and verdict."""
    others = [Claim(claim, "none", why, NOT_TESTABLE) for claim, why in _NOT_TESTABLE_HERE]
    return [check(results) for check in _CHECKS] + others


def _verdict(holds: bool) -> str:
    return CONFIRMED if holds else NOT_CONFIRMED


def _evidence(results: Results) -> Setting | None:
    """The setting that decides verdicts."""
    setting = results.main_setting
    return setting if setting is not None and setting.is_evidence else None


# Accuracy


def _ahead(gap: Gap) -> str:
    return NOT_MEASURED if gap.margin is None else _verdict(gap.points > gap.margin)


def _compare(
    better: str, worse: str, claim: str, *, rule: str = TWO_ERRORS, least: float = 0.0
) -> Callable[[Results], Claim]:
    """Compare two main rows, which need all their seeds.

    Args:
        least: lower limit, in points, of the difference minus two standard errors.
    """

    def check(results: Results) -> Claim:
        setting = _evidence(results)
        rows = {} if setting is None else results.rows(setting)
        if not {better, worse} <= rows.keys():
            return Claim(claim, rule)
        a, b = rows[better], rows[worse]
        gap = results.gap(a, b)
        measured = f"{a} against {b}: {gap} points ({setting}; {describe_seeds((a, b))})"
        for longer in results.longer_settings:  # for information: the verdict needs all seeds
            rows = results.rows(longer)
            if {better, worse} <= rows.keys():
                c, d = rows[better], rows[worse]
                measured += f"; {longer.epochs} epochs, {describe_seeds((c, d))}: {results.gap(c, d)}"
        if gap.margin is None or min(a.seeds, b.seeds) < len(SEEDS):
            return Claim(claim, rule, measured)
        return Claim(claim, rule, measured, _verdict(gap.points - gap.margin > least))

    return check


def _variants(results: Results, names: Iterable[str]) -> tuple[Setting, dict[str, Sample]] | None:
    """The first setting that has all of these rows."""
    wanted = set(names)
    for setting in filter(lambda s: s.is_evidence, results.settings):
        rows = results.rows(setting)
        if wanted <= rows.keys():
            return setting, rows
    return None


def _windows(results: Results) -> Claim:
    claim = "InLine attention gains from larger windows, up to the whole map"
    rule = f"whole map, with the residual, {TWO_ERRORS} to the smallest window"
    names = {window: f"swin_window{window}_residual" for window in WINDOW_SIZES}
    found = _variants(results, names.values())
    if found is None:
        return Claim(claim, rule)
    setting, rows = found
    samples = {window: rows[name] for window, name in names.items()}
    gap = results.gap(samples[max(samples)], samples[min(samples)])
    each = ", ".join(f"{window}: {sample}" for window, sample in samples.items())
    measured = f"{each}; {gap} ({setting.describe(class_token=False)})"
    return Claim(claim, rule, measured, _ahead(gap))


def _feature_maps(results: Results) -> Claim:
    claim = "InLine attention works with every feature map; linear attention depends on it"
    rule = f"without residual, best φ − worst φ: less than {ALIKE_POINTS:g} points for InLine, more for linear"
    names = {kind: [feature_map_row(kind, name) for name in PHI] for kind in ("inline", "linear")}
    found = _variants(results, [*names["inline"], *names["linear"]])
    if found is None:
        return Claim(claim, rule)
    setting, rows = found
    ends = {kind: sorted(rows[name].mean for name in names[kind])[:: len(names[kind]) - 1] for kind in names}
    (low, high), (linear_low, linear_high) = ends["inline"], ends["linear"]
    measured = f"InLine {low:.1f} to {high:.1f}, linear {linear_low:.1f} to {linear_high:.1f} % ({setting})"
    return Claim(claim, rule, measured, _verdict(high - low < ALIKE_POINTS < linear_high - linear_low))


def _other_linear(results: Results) -> Claim:
    claim = "InLine attention is ahead of the other linear attentions"
    rule = f"{TWO_ERRORS} to the best of them"
    found = _variants(results, ["inline", *BASELINES])
    if found is None:
        return Claim(claim, rule)
    setting, rows = found
    best = max(BASELINES, key=lambda name: rows[name].mean)
    gap = results.gap(rows["inline"], rows[best])
    each = ", ".join(f"{ROWS[name].title} {rows[name]}" for name in BASELINES)
    measured = f"InLine {rows['inline']}, {each}; {gap} to {ROWS[best].title} ({setting})"
    return Claim(claim, rule, measured, _ahead(gap))


def _mapped_softmax(results: Results) -> Claim:
    claim = "Softmax attention loses accuracy behind a function that is not injective"
    rule = f"softmax {TWO_ERRORS} to softmax after ReLU"
    found = _variants(results, ["softmax", "softmax_relu"])
    if found is None:
        return Claim(claim, rule)
    setting, rows = found
    gap = results.gap(rows["softmax"], rows["softmax_relu"])
    measured = f"{rows['softmax']} against {rows['softmax_relu']}: {gap} points ({setting})"
    return Claim(claim, rule, measured, _ahead(gap))


# Probes


def _length_probe(results: Results) -> Claim:
    claim = "Linear attention cannot tell collinear queries apart; softmax and InLine attention can"
    rule = "bare layer: linear (ReLU) at most its bound + 2 points, InLine and softmax above 90 %"
    if results.probes is None:
        return Claim(claim, rule)
    bare = results.probes["length"]["bare"]
    linear, inline, softmax = (bare[name] for name in ("linear, ReLU", "InLine", "softmax"))
    measured = (
        f"linear {linear['mean']:.1f} (bound {linear['bound']:.1f}), InLine {inline['mean']:.1f}, "
        f"softmax {softmax['mean']:.1f} %"
    )
    bounded = linear["mean"] <= linear["bound"] + 2 and linear["bound"] < 50
    return Claim(claim, rule, measured, _verdict(bounded and min(inline["mean"], softmax["mean"]) > 90))


def _escape_probe(results: Results) -> Claim:
    claim = "Linear attention cannot tell collinear queries apart where a layer has a bias or a skip, as in networks"
    rule = "linear (ReLU) below 90 % with a bias and with a skip"
    if results.probes is None:
        return Claim(claim, rule)
    bias, skip = (results.probes["length"][variant]["linear, ReLU"]["mean"] for variant in ("bias", "skip"))
    return Claim(claim, rule, f"with a bias {bias:.1f}, with a skip {skip:.1f} %", _verdict(max(bias, skip) < 90))


def _local_probe(better: str, worse: str, claim: str) -> Callable[[Results], Claim]:
    rule = f"probe of local detail: {better} more than 5 points above {worse}"

    def check(results: Results) -> Claim:
        if results.probes is None:
            return Claim(claim, rule)
        a, b = (results.probes["local"][name]["mean"] for name in (better, worse))
        return Claim(claim, rule, f"{better} {a:.1f}, {worse} {b:.1f} %", _verdict(a - b > 5))

    return check


def _mean_probe(results: Results) -> Claim:
    claim = "Control: where neither property is needed, all attentions are equal"
    rule = "mean brightness: best − worst < 2 points"
    if results.probes is None:
        return Claim(claim, rule)
    means = [score["mean"] for score in results.probes["mean"].values()]
    measured = f"{min(means):.1f} to {max(means):.1f} %"
    return Claim(claim, rule, measured, _verdict(max(means) - min(means) < 2))


# Analyses of trained models


def _analysed(results: Results, *rows: str) -> list[dict[str, Any]] | None:
    """The analyses of these rows in the main setting, or None."""
    setting = _evidence(results)
    if setting is None:
        return None
    found = [result.analysis for row in rows if (result := results.find(setting, row)) is not None]
    analyses = [analysis for analysis in found if analysis is not None]
    return analyses if len(analyses) == len(rows) else None


def _confusion(results: Results) -> Claim:
    claim = "In trained models linear attention confuses queries often, softmax and InLine attention rarely"
    rule = "confused pairs of linear at both pairs of thresholds: more than 10 times those of softmax and of InLine"
    found = _analysed(results, "linear", "inline", "softmax")
    if found is None or any("confused" not in analysis for analysis in found):  # early runs used another definition
        return Claim(claim, rule)
    measured, holds = [], []
    for counts in zip(*(analysis["confused"] for analysis in found), strict=True):
        linear, inline, softmax = (1e6 * count["share_of_pairs"] for count in counts)
        thresholds = f"τ = {counts[0]['tau']:g}, ρ = {counts[0]['rho']:g}"
        measured.append(f"{thresholds}: linear {linear:.1f}, InLine {inline:.1f}, softmax {softmax:.1f}")
        holds.append(linear > 10 * max(inline, softmax))
    return Claim(claim, rule, f"pairs in a million, {'; '.join(measured)}", _verdict(all(holds)))


def _over_chance(analysis: dict[str, Any]) -> list[float]:
    """Attention to the 3×3 neighbourhood by layer, as a multiple of chance."""
    locality = analysis["locality"]
    return [share / chance for share, chance in zip(locality["by_layer"], locality["chance"], strict=True)]


def _locality(claim: str, where: str, layers: Callable[[list[float]], float]) -> Callable[[Results], Claim]:
    rule = (
        f"attention to the 3×3 neighbourhood {where}, times chance: softmax above 1.5, both others less than half as "
        "far above 1"
    )

    def check(results: Results) -> Claim:
        found = _analysed(results, "softmax", "linear", "inline_plain")
        if found is None:
            return Claim(claim, rule)
        softmax, linear, inline = (layers(_over_chance(analysis)) for analysis in found)
        measured = f"softmax {softmax:.2f}, linear {linear:.2f}, InLine without residual {inline:.2f} times chance"
        holds = softmax > 1.5 and max(linear, inline) - 1 < (softmax - 1) / 2
        return Claim(claim, rule, measured, _verdict(holds))

    return check


def _masking(results: Results) -> Claim:
    claim = "Masking local tokens hurts more than masking as many random ones, softmax more than InLine"
    rule = (
        "attention alone masked, largest window: local − random > 2 points for both, and softmax loses more than InLine"
    )
    found = _analysed(results, "softmax", "inline")
    if found is None:
        return Claim(claim, rule)
    drops, changes = ([share(analysis["masking"]) for analysis in found] for share in (masking_drops, masking_changes))
    most = max(drops[0]["local"])
    (soft_local, soft_random), (in_local, in_random) = ((d["local"][most], d["random"][most]) for d in drops)
    changed = [f"{by['local'][most]:.1f} and {by['random'][most]:.1f}" for by in changes]
    measured = (
        f"points lost by {most} tokens, local and random: softmax {soft_local:.1f} and {soft_random:.1f}, "
        f"InLine {in_local:.1f} and {in_random:.1f}, of {found[0]['masking']['images']} images; "
        f"predictions that change: softmax {changed[0]}, InLine {changed[1]} %"
    )
    holds = soft_local - soft_random > 2 and in_local - in_random > 2 and soft_local > in_local
    return Claim(claim, rule, measured, _verdict(holds))


def _speed(results: Results) -> Claim:
    claim = "InLine attention costs less than softmax attention where there are many tokens"
    rule = "images a second in inference at the most tokens measured: InLine above softmax"
    if results.speed is None:
        return Claim(claim, rule)
    rows = results.speed["rows"]
    pairs = []
    for setting in filter(lambda s: s.is_evidence, results.settings):
        names = [speed_name(setting.dataset, setting.patch, row) for row in ("inline", "softmax")]
        if all(rows.get(name, {}).get("infer") for name in names):
            pairs.append((setting.tokens, *(rows[name]["infer"] for name in names)))
    if not pairs:
        return Claim(claim, rule)
    tokens, inline, softmax = max(pairs)
    measured = f"{tokens} tokens: {inline:,.0f} against {softmax:,.0f} images/s ({results.speed['machine']})"
    return Claim(claim, rule, measured, _verdict(inline > softmax))


def _resolution(results: Results) -> Claim:
    published = " and ".join(f"{ratio:g} times at {side} px" for side, ratio in PUBLISHED_RATIOS.items())
    claim = f"InLine-DeiT-T is faster than DeiT-T: {published}"
    rule = "inference, against DeiT-T with FlashAttention (the published one was without): at least these ratios"
    sweep = results.sweep
    if sweep is None or not PUBLISHED_RATIOS.keys() <= sweep.ratios.keys():
        return Claim(claim, rule)
    found = {side: sweep.ratios[side] for side in PUBLISHED_RATIOS}
    each = ", ".join(f"{ratio:.2f} times at {side} px" for side, ratio in found.items())
    measured = f"{each} (`inline bench sweep`, `{sweep.commit}` on {sweep.machine})"
    return Claim(claim, rule, measured, _verdict(all(found[side] >= PUBLISHED_RATIOS[side] for side in found)))


def _window_speed(results: Results) -> Claim:
    claim = "InLine-Swin does not get slower by larger windows"
    rule = "images a second in inference, with the residual: whole map at least 0.9 times the smallest window"
    rows = {} if results.speed is None else results.speed["rows"]
    names = {size: speed_name("tiny_imagenet", 4, f"swin_window{size}_residual") for size in WINDOW_SIZES}
    speeds = {size: rows.get(name, {}).get("infer") for size, name in names.items()}
    if not all(speeds.values()):
        return Claim(claim, rule)
    assert results.speed is not None
    each = ", ".join(f"window {size}: {speed:,.0f}" for size, speed in speeds.items())
    measured = f"{each} images/s ({results.speed['machine']})"
    return Claim(claim, rule, measured, _verdict(speeds[max(speeds)] >= 0.9 * speeds[min(speeds)]))


# Claims that cannot be decided here: claim, reason
_NOT_TESTABLE_HERE = (
    (
        "No continuous feature map makes linear attention injective",
        "a theorem; the length probe shows it for ReLU and LeakyReLU. With exp linear attention tells those queries "
        "apart and confuses others, which differ by a constant",
    ),
    (
        "Published ImageNet accuracies (InLine-DeiT-T 74.5 against 72.2, and the other models)",
        "needs ImageNet and eight GPUs for 300 epochs; recipes of these models are in the package",
    ),
    (
        "Published segmentation and detection (InLine-Swin-T with UperNet 45.6 against 44.5 mIoU on ADE20K, and more)",
        "needs ADE20K and COCO, and backbones trained on ImageNet; heads and recipes are in the package",
    ),
)

_CHECKS: tuple[Callable[[Results], Claim], ...] = (
    _length_probe,
    _escape_probe,
    _local_probe("InLine + residual", "InLine", "The 3×3 residual supplies local detail that attention alone does not"),
    _local_probe("softmax", "linear, ReLU", "Softmax attention gets at local detail better than linear attention"),
    _mean_probe,
    _compare("softmax", "linear", "The gap to be explained: softmax attention is ahead of linear attention"),
    _compare("inline", "linear", "InLine attention (with its residual) is ahead of linear attention"),
    _compare("inline_plain", "linear", "Injectivity alone: InLine without residual is ahead of linear attention"),
    _compare("inline", "inline_plain", "Local modelling: InLine gains from its residual"),
    _compare("linear_residual", "linear", "Local modelling: linear attention gains from the residual too"),
    _compare(
        "inline", "linear_residual", "Injectivity beside local modelling: with the residual in both, InLine is ahead"
    ),
    _compare(
        "inline",
        "softmax",
        "InLine attention is at least level with softmax attention",
        rule=f"the difference less two standard errors is above −{LEVEL_POINTS:g} point",
        least=-LEVEL_POINTS,
    ),
    _other_linear,
    _feature_maps,
    _mapped_softmax,
    _windows,
    _confusion,
    _locality(
        "Softmax attention is local in the first layer; linear and InLine attention (without residual) much less",
        "in the first layer",
        lambda layers: layers[0],
    ),
    _locality(
        "Softmax attention is local in the mean of all layers; linear and InLine attention much less",
        "in the mean of the layers",
        statistics.fmean,
    ),
    _masking,
    _speed,
    _resolution,
    _window_speed,
)
