"""The paper's claims, each with the rule that makes a verdict of the numbers measured here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inline_attention.study.measures import masking_drops, speed_name
from inline_attention.study.results import Results, Sample, Setting, margin

CONFIRMED, NOT_CONFIRMED = "confirmed", "not confirmed"
NOT_MEASURED, NOT_TESTABLE = "not measured yet", "not testable here"
TWO_DEVIATIONS = "difference > 2 · √(s₁² + s₂²)"


@dataclass(frozen=True)
class Claim:
    claim: str
    rule: str  # when it counts as confirmed
    measured: str = ""
    verdict: str = NOT_MEASURED


def judge(results: Results) -> list[Claim]:
    """Every claim with what was measured and the verdict."""
    return [check(results) for check in _CHECKS] + [
        Claim(
            "Published ImageNet accuracies (InLine-DeiT-T 74.5 against 72.2, and the other models)",
            "none",
            "needs ImageNet and eight GPUs for 300 epochs; recipes of these models are in the package",
            NOT_TESTABLE,
        )
    ]


def _verdict(holds: bool) -> str:
    return CONFIRMED if holds else NOT_CONFIRMED


def exceeds(a: Sample, b: Sample) -> bool:
    return a.mean - b.mean > margin(a, b)


def _evidence(results: Results) -> Setting | None:
    """The setting that verdicts rest on."""
    setting = results.main_setting
    return setting if setting is not None and setting.is_evidence else None


# Accuracy


def _main_rows(results: Results) -> tuple[Setting | None, dict[str, Sample]]:
    setting = _evidence(results)
    return setting, {} if setting is None else results.rows(setting)


def _compare(better: str, worse: str, claim: str) -> Callable[[Results], Claim]:
    def check(results: Results) -> Claim:
        empty = Claim(claim, TWO_DEVIATIONS)
        setting, rows = _main_rows(results)
        if not {better, worse} <= rows.keys():
            return empty
        a, b = rows[better], rows[worse]
        measured = f"{a} against {b} ({setting}, {len(a.values)} seeds)"
        return Claim(claim, empty.rule, measured, _verdict(exceeds(a, b)))

    return check


def _level_with_softmax(results: Results) -> Claim:
    claim, rule = "InLine attention is at least level with softmax attention", "softmax not ahead by 2 · √(s₁² + s₂²)"
    setting, rows = _main_rows(results)
    if not {"inline", "softmax"} <= rows.keys():
        return Claim(claim, rule)
    a, b = rows["inline"], rows["softmax"]
    return Claim(claim, rule, f"{a} against {b} ({setting}, {len(a.values)} seeds)", _verdict(not exceeds(b, a)))


def _windows(results: Results) -> Claim:
    claim = "InLine attention gains from larger windows, up to the whole map"
    rule = "whole map − smallest window > 2 · √(s₁² + s₂²), with the residual"
    for setting in results.settings:
        rows = results.rows(setting)
        found = {int(row.removeprefix("swin_window").split("_")[0]): rows[row] for row in rows
                 if row.startswith("swin_window") and row.endswith("_residual")}  # fmt: skip
        if len(found) > 1:
            measured = ", ".join(f"{window}: {sample}" for window, sample in sorted(found.items()))
            return Claim(
                claim, rule, f"{measured} ({setting})", _verdict(exceeds(found[max(found)], found[min(found)]))
            )
    return Claim(claim, rule)


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
    claim = "… and that limits networks, not only bare layers"
    rule = "linear (ReLU) stays below 90 % also with a bias and with a skip"
    if results.probes is None:
        return Claim(claim, rule)
    bias, skip = (results.probes["length"][variant]["linear, ReLU"]["mean"] for variant in ("bias", "skip"))
    return Claim(claim, rule, f"with a bias {bias:.1f}, with a skip {skip:.1f} %", _verdict(max(bias, skip) < 90))


def _local_probe(results: Results) -> Claim:
    claim = "The 3×3 residual supplies local detail that attention alone does not"
    rule = "with it more than 5 points above without, for InLine"
    if results.probes is None:
        return Claim(claim, rule)
    without, with_it = (results.probes["local"][name]["mean"] for name in ("InLine", "InLine + residual"))
    return Claim(claim, rule, f"{without:.1f} without, {with_it:.1f} % with", _verdict(with_it - without > 5))


def _mean_probe(results: Results) -> Claim:
    claim = "Control: where neither property is needed, all attentions are equal"
    rule = "mean brightness: best − worst < 2 points"
    if results.probes is None:
        return Claim(claim, rule)
    means = [score["mean"] for score in results.probes["mean"].values()]
    measured = f"{min(means):.1f} to {max(means):.1f} %"
    return Claim(claim, rule, measured, _verdict(max(means) - min(means) < 2))


# Analyses of trained models


def _analysed(results: Results, *rows: str) -> tuple[Setting, list[dict[str, Any]]] | None:
    setting = _evidence(results)
    if setting is None:
        return None
    found = [result.analysis for row in rows if (result := results.find(setting, row)) is not None]
    analyses = [analysis for analysis in found if analysis is not None]
    return (setting, analyses) if len(analyses) == len(rows) else None


def _confusion(results: Results) -> Claim:
    claim = "In trained models linear attention confuses queries often, softmax and InLine attention rarely"
    rule = "share of confused pairs: linear more than 10 times that of softmax and of InLine"
    found = _analysed(results, "linear", "inline", "softmax")
    if found is None:
        return Claim(claim, rule)
    linear, inline, softmax = (a["confusion"]["share_of_pairs"] for a in found[1])
    measured = f"linear {linear:.2%}, InLine {inline:.2%}, softmax {softmax:.2%} of the pairs"
    return Claim(claim, rule, measured, _verdict(linear > 10 * max(inline, softmax)))


def _locality(results: Results) -> Claim:
    claim = "Softmax attention has a local bias; linear and InLine attention (without residual) much less"
    rule = "attention to the 3×3 neighbourhood, times chance: softmax above 1.5 and above both others"
    found = _analysed(results, "softmax", "linear", "inline_plain")
    if found is None:
        return Claim(claim, rule)
    softmax, linear, inline = (a["locality"]["mean_over_chance"] for a in found[1])
    measured = f"softmax {softmax:.2f}, linear {linear:.2f}, InLine without residual {inline:.2f} times chance"
    return Claim(claim, rule, measured, _verdict(softmax > 1.5 and softmax > max(linear, inline)))


def _masking(results: Results) -> Claim:
    claim = "Masking local tokens hurts more than masking as many random ones, softmax more than InLine"
    rule = "largest window measured: local − random > 2 points for both, and softmax loses more than InLine"
    found = _analysed(results, "softmax", "inline")
    if found is None:
        return Claim(claim, rule)
    drops = [masking_drops(a["masking"]) for a in found[1]]
    most = max(drops[0]["local"])
    (soft_local, soft_random), (in_local, in_random) = ((d["local"][most], d["random"][most]) for d in drops)
    measured = (
        f"{most} tokens: softmax −{soft_local:.1f} local, −{soft_random:.1f} random; "
        f"InLine −{in_local:.1f}, −{in_random:.1f} points"
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


_CHECKS: tuple[Callable[[Results], Claim], ...] = (
    _length_probe,
    _escape_probe,
    _local_probe,
    _mean_probe,
    _compare("inline", "linear", "InLine attention (with its residual) is ahead of linear attention"),
    _compare("inline_plain", "linear", "Injectivity alone: InLine without residual is ahead of linear attention"),
    _compare("inline", "inline_plain", "Local modelling: InLine gains from its residual"),
    _compare("linear_residual", "linear", "Local modelling: linear attention gains from the residual too"),
    _compare(
        "inline", "linear_residual", "Injectivity beside local modelling: with the residual in both, InLine is ahead"
    ),
    _level_with_softmax,
    _windows,
    _confusion,
    _locality,
    _masking,
    _speed,
)
