"""Verdicts are what their rules make of the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from study_results import LINEAR, SOFTMAX, analysis, write_runs

from study.claims import CONFIRMED, NOT_CONFIRMED, NOT_MEASURED, judge
from study.grid import BASELINES, FEATURE_MAPS, MAIN
from study.report import remake
from study.results import collect


def verdict(out: Path, start: str) -> str:
    (found,) = (claim.verdict for claim in judge(collect(out)) if claim.claim.startswith(start))
    return found


AHEAD = "InLine attention (with its residual) is ahead of linear attention"
LEVEL = "InLine attention is at least level with softmax attention"


# Standard deviations of 0.2, 0.2 and 0.1: 0.173 together, so two standard errors of three seeds each are 0.283.


@pytest.mark.parametrize(("by", "expected"), [(0.30, CONFIRMED), (0.26, NOT_CONFIRMED), (-3.0, NOT_CONFIRMED)])
def test_ahead_by_two_standard_errors(tmp_path: Path, by: float, expected: str) -> None:
    write_runs(tmp_path, {"inline": [value + by for value in LINEAR], "linear": LINEAR, "softmax": SOFTMAX})
    assert verdict(tmp_path, AHEAD) == expected


@pytest.mark.parametrize(("by", "expected"), [(0.0, CONFIRMED), (-0.70, CONFIRMED), (-0.75, NOT_CONFIRMED)])
def test_level_is_not_further_behind_than_a_point(tmp_path: Path, by: float, expected: str) -> None:
    """Noise does not make rows level: the lower end of the difference counts."""
    mean = sum(SOFTMAX) / 3
    write_runs(tmp_path, {"inline": [mean + by + d for d in (-0.2, 0.2, 0)], "linear": LINEAR, "softmax": SOFTMAX})
    assert verdict(tmp_path, LEVEL) == expected


def test_the_gap_to_be_explained_is_a_claim_of_its_own(tmp_path: Path) -> None:
    start = "The gap to be explained: softmax"
    write_runs(tmp_path / "there", {"inline": LINEAR, "linear": LINEAR, "softmax": SOFTMAX})
    assert verdict(tmp_path / "there", start) == CONFIRMED
    write_runs(tmp_path / "not", {"inline": LINEAR, "linear": SOFTMAX, "softmax": LINEAR})
    assert verdict(tmp_path / "not", start) == NOT_CONFIRMED


def test_noise_is_no_evidence_for_level(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [40.0, 44.0, 42.0], "linear": LINEAR, "softmax": [42.0, 40.0, 44.0]})
    assert verdict(tmp_path, LEVEL) == NOT_CONFIRMED


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_are_not_judged(tmp_path: Path, seeds: int) -> None:
    """Two seeds that happen to agree would make everything different."""
    write_runs(tmp_path, {"inline": [43.0, 43.01][:seeds], "linear": [40.0, 40.01][:seeds]})
    assert verdict(tmp_path, LEVEL) == NOT_MEASURED
    assert verdict(tmp_path, AHEAD) == NOT_MEASURED


def test_verdicts_rest_on_the_setting_with_most_seeds(tmp_path: Path) -> None:
    write_runs(tmp_path, {row: [40.0, 40.1, 40.2] for row in MAIN}, epochs=40)
    write_runs(tmp_path, {row: [50.0, 51.0] for row in MAIN}, epochs=120)
    setting = collect(tmp_path).main_setting
    assert setting is not None
    assert setting.epochs == 40


def test_a_longer_training_is_told_beside_the_verdict(tmp_path: Path) -> None:
    """With fewer seeds it decides nothing."""
    write_runs(tmp_path, {"inline": LINEAR, "linear": LINEAR, "softmax": SOFTMAX}, epochs=40)
    write_runs(tmp_path, {"inline": [50.0], "linear": [45.0], "softmax": [46.0]}, epochs=120)
    write_runs(tmp_path, {"inline": [20.0], "linear": [25.0]}, epochs=10)
    (claim,) = (claim for claim in judge(collect(tmp_path)) if claim.claim == AHEAD)
    assert claim.verdict == NOT_CONFIRMED
    assert claim.measured.endswith("40 epochs; 3 seeds each); 120 epochs, one seed each: +5.00 ± 0.49")


def test_a_command_has_the_settings_of_its_run(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [40.0]}, changes=("optim.lr=1e-3", "data.workers=0"))
    write_runs(tmp_path, {"linear": [40.0]})
    plain, changed = (remake(result) for result in sorted(collect(tmp_path).runs, key=lambda r: len(r.changed)))
    assert "optim.lr" not in plain
    assert changed.endswith(" data.workers=0 optim.lr=0.001")


# One seed each, beside main rows that say what a seed changes


@pytest.mark.parametrize(("focused", "expected"), [(29.0, CONFIRMED), (30.5, NOT_CONFIRMED)])
def test_other_linear_attentions(tmp_path: Path, focused: float, expected: str) -> None:
    write_runs(tmp_path, dict.fromkeys(MAIN, LINEAR))
    write_runs(tmp_path, {"inline": [30.0], **{row: [25.0] for row in BASELINES}, "focused": [focused]}, epochs=20)
    assert verdict(tmp_path, "InLine attention is ahead of the other linear attentions") == expected


@pytest.mark.parametrize(
    ("worst", "linear", "expected"), [(26.0, 20.0, CONFIRMED), (24.0, 2.0, NOT_CONFIRMED), (28.0, 26.0, NOT_CONFIRMED)]
)
def test_feature_maps(tmp_path: Path, worst: float, linear: float, expected: str) -> None:
    """That linear attention breaks down with one map is no evidence for InLine."""
    rows = {row: [30.0] for row in [*MAIN, *FEATURE_MAPS]}
    write_runs(tmp_path, {**rows, "linear_identity": [linear], "inline_exp": [worst]}, epochs=20)
    assert verdict(tmp_path, "InLine attention works with every feature map") == expected


@pytest.mark.parametrize(("largest", "expected"), [(31.0, CONFIRMED), (30.2, NOT_CONFIRMED)])
def test_windows(tmp_path: Path, largest: float, expected: str) -> None:
    write_runs(tmp_path, dict.fromkeys(MAIN, LINEAR))
    names = {f"swin_window{window}_residual": [30.0] for window in (2, 4, 8)}
    write_runs(tmp_path, {**names, "swin_window16_residual": [largest]}, epochs=20)
    start = "InLine attention gains from larger windows"
    assert verdict(tmp_path, start) == expected
    (claim,) = (claim for claim in judge(collect(tmp_path)) if claim.claim.startswith(start))
    assert "64 px, 256 tokens, 20 epochs" in claim.measured  # a Swin has no class token


# Analyses and probes


def analysed(out: Path, **by_row: dict[str, Any]) -> None:
    usual = dict.fromkeys(MAIN, analysis(local=0.0, random=0.0))
    write_runs(out, dict.fromkeys(MAIN, LINEAR), analyses={**usual, **by_row})


@pytest.mark.parametrize(("loose", "expected"), [(2e-4, CONFIRMED), (9e-5, NOT_CONFIRMED)])
def test_confusion_at_both_thresholds(tmp_path: Path, loose: float, expected: str) -> None:
    analysed(tmp_path, linear=analysis(strict=2e-5, loose=loose, local=0.0, random=0.0))
    assert verdict(tmp_path, "In trained models linear attention confuses") == expected


def test_confusion_of_early_analyses_decides_nothing(tmp_path: Path) -> None:
    """They compared rows with the norm of a row, which counts flat attention as confused."""
    early = analysis(local=0.0, random=0.0)
    early["confusion"] = {"share_of_pairs": 1e-6, "by_layer": [1e-6], "tau": 1e-3}
    del early["confused"]
    analysed(tmp_path, softmax=early)
    assert verdict(tmp_path, "In trained models linear attention confuses") == NOT_MEASURED


def test_locality_of_the_first_layer_and_of_all(tmp_path: Path) -> None:
    analysed(tmp_path, softmax=analysis(layers=(1.9, 0.9), local=0.0, random=0.0))
    assert verdict(tmp_path, "Softmax attention is local in the first layer") == CONFIRMED
    assert verdict(tmp_path, "Softmax attention is local in the mean") == NOT_CONFIRMED


@pytest.mark.parametrize(("inline", "expected"), [(0.06, CONFIRMED), (0.11, NOT_CONFIRMED), (0.01, NOT_CONFIRMED)])
def test_masking_of_attention_alone(tmp_path: Path, inline: float, expected: str) -> None:
    """Softmax loses 10 points. What zeroed taps cost InLine, 40, does not count."""
    analysed(
        tmp_path, softmax=analysis(local=0.10, random=0.02), inline=analysis(local=inline, random=0.0)
    )  # fmt: skip
    assert verdict(tmp_path, "Masking local tokens hurts more") == expected
    (claim,) = (claim for claim in judge(collect(tmp_path)) if claim.claim.startswith("Masking"))
    assert claim.measured.endswith(
        f"of 200 images; predictions that change: softmax 10.0 and 2.0, InLine {100 * inline:.1f} and 0.0 %"
    )


def probes(
    *, linear: float, escaped: float, softmax_local: float, residual: float, worst_mean: float
) -> dict[str, Any]:
    def score(mean: float, bound: float = 100.0) -> dict[str, float]:
        return {"mean": mean, "std": 0.1, "bound": bound}

    bare = {"linear, ReLU": score(linear, 25.0), "InLine": score(97.0), "softmax": score(96.0)}
    after = {"linear, ReLU": score(escaped)}
    local = {"softmax": softmax_local, "linear, ReLU": 55.0, "InLine": 58.0, "InLine + residual": residual}
    return {
        "length": {"bare": bare, "bias": after, "skip": after},
        "local": {name: score(value) for name, value in local.items()},
        "mean": {"softmax": score(98.0), "InLine": score(worst_mean)},
    }


PROBED = {
    "Linear attention cannot tell collinear queries apart; softmax": ("linear", 26.0, 40.0),
    "Linear attention cannot tell collinear queries apart where": ("escaped", 60.0, 99.0),
    "Softmax attention gets at local detail better": ("softmax_local", 61.0, 57.0),
    "The 3×3 residual supplies local detail": ("residual", 70.0, 60.0),
    "Control:": ("worst_mean", 97.0, 90.0),
}


@pytest.mark.parametrize("claim", PROBED)
def test_probes(tmp_path: Path, claim: str) -> None:
    name, good, bad = PROBED[claim]
    usual = {"linear": 25.0, "escaped": 99.0, "softmax_local": 57.0, "residual": 77.0, "worst_mean": 98.0}
    for value, expected in ((good, CONFIRMED), (bad, NOT_CONFIRMED)):
        (tmp_path / "probes.json").write_text(json.dumps(probes(**{**usual, name: value})))
        assert verdict(tmp_path, claim) == expected


@pytest.mark.parametrize(("inline", "expected"), [(200.0, CONFIRMED), (90.0, NOT_CONFIRMED)])
def test_cost(tmp_path: Path, inline: float, expected: str) -> None:
    write_runs(tmp_path, dict.fromkeys(MAIN, LINEAR))
    rows = {"tiny_imagenet-p4-inline": {"infer": inline}, "tiny_imagenet-p4-softmax": {"infer": 100.0}}
    (tmp_path / "speed.json").write_text(json.dumps({"machine": "a GPU", "rows": rows}))
    assert verdict(tmp_path, "InLine attention costs less") == expected


@pytest.mark.parametrize(("large", "expected"), [(5.0, CONFIRMED), (4.0, NOT_CONFIRMED)])
def test_published_ratios_of_speed(tmp_path: Path, large: float, expected: str) -> None:
    """Each side counts in its faster mode; sizes and models that the paper does not name do not."""

    def result(side: int, contender: str, mode: str, rate: float | None, **other: Any) -> dict[str, Any]:
        fixed = {"model": "inline_deit_tiny", "task": "infer", "error": None if rate else "out of memory"}
        what = {"img_size": side, "contender": contender, "mode": mode, "images_per_second": rate}
        return {**fixed, **what, **other}

    results = [
        result(640, "peer", "a", 50.0), result(640, "peer", "b", 100.0), result(640, "fused", "a", 250.0),
        result(1024, "peer", "a", 10.0), result(1024, "fused", "a", 1.0), result(1024, "fused", "b", 10 * large),
        result(2048, "peer", "a", None), result(2048, "fused", "a", 9.0), result(640, "fused", "a", 1e6, task="train"),
        result(640, "fused", "a", 1e6, model="inline_swin_tiny"),
    ]  # fmt: skip
    facts = {"inline-attention": "1 (abc)", "cpu": "a cpu", "gpu 1": "a GPU"}
    write_runs(tmp_path, {"linear": LINEAR})
    (tmp_path / "sweep.json").write_text(json.dumps({"kind": "model", "facts": facts, "results": results}))
    assert verdict(tmp_path, "InLine-DeiT-T is faster than DeiT-T: 2.4 times at 640 px and 4.8 times") == expected
    (claim,) = (claim for claim in judge(collect(tmp_path)) if claim.claim.startswith("InLine-DeiT-T"))
    assert claim.measured.startswith(f"2.50 times at 640 px, {large:.2f} times at 1024 px (")
    assert claim.measured.endswith("`1 (abc)` on a GPU)")
    (tmp_path / "sweep.json").write_text(json.dumps({"kind": "op", "facts": facts, "results": results}))
    with pytest.raises(ValueError, match="a record of kind 'op'; expected model"):
        collect(tmp_path)


@pytest.mark.parametrize(("whole", "expected"), [(95.0, CONFIRMED), (80.0, NOT_CONFIRMED), (None, NOT_MEASURED)])
def test_speed_of_windows(tmp_path: Path, whole: float | None, expected: str) -> None:
    write_runs(tmp_path, {"linear": LINEAR})
    speeds = {2: 100.0, 4: 60.0, 8: 120.0, 16: whole}
    rows = {f"tiny_imagenet-p4-swin_window{size}_residual": {"infer": speed} for size, speed in speeds.items()}
    (tmp_path / "speed.json").write_text(json.dumps({"machine": "a GPU", "rows": rows}))
    assert verdict(tmp_path, "InLine-Swin does not get slower") == expected
