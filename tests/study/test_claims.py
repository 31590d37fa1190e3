"""Verdicts are what their rules make of the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from study_results import LINEAR, analysis, write_runs

from study.claims import CONTRADICTED, EARLIER, INCONCLUSIVE, NOT_TESTABLE, SUPPORTED, Claim, explain, judge
from study.grid import BASELINES, FAMILY, FEATURE_MAPS, MAIN, build_runs
from study.report import remake
from study.results import Results, RunResult, collect


def claim(out: Path, name: str) -> Claim:
    (found,) = (claim for claim in judge(collect(out)) if claim.name == name)
    return found


def verdict(out: Path, name: str) -> str:
    return claim(out, name).verdict


# Differences of 0.9, 1.0 and 1.1 by seed: 0.1·4.303/√3, so the interval is ± 0.248.


@pytest.mark.parametrize(
    ("by", "expected"), [(1.0, SUPPORTED), (0.26, SUPPORTED), (0.24, INCONCLUSIVE), (-0.24, INCONCLUSIVE),
                         (-0.26, CONTRADICTED)]
)  # fmt: skip
def test_the_interval_of_paired_differences_decides(tmp_path: Path, by: float, expected: str) -> None:
    """The seeds themselves differ by far more."""
    linear = [40.0, 45.0, 42.0]
    write_runs(
        tmp_path, {"inline": [x + by + d for x, d in zip(linear, (-0.1, 0, 0.1), strict=True)], "linear": linear}
    )
    found = claim(tmp_path, "inline_linear")
    assert found.verdict == expected
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(by)
    assert found.effect.margin == pytest.approx(0.248, abs=1e-3)
    assert found.where == "60 epochs, 3 seeds"


@pytest.mark.parametrize(("by", "expected"), [(-0.7, SUPPORTED), (-0.8, INCONCLUSIVE), (-1.3, CONTRADICTED)])
def test_level_is_not_further_behind_than_a_point(tmp_path: Path, by: float, expected: str) -> None:
    write_runs(tmp_path, {"inline": [40 + by + d for d in (-0.1, 0.1, 0)], "softmax": [40.0, 40.0, 40.0]})
    assert verdict(tmp_path, "inline_softmax") == expected


def test_noise_decides_nothing(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [40.0, 44.0, 42.0], "linear": LINEAR, "softmax": [42.0, 40.0, 44.0]})
    assert verdict(tmp_path, "inline_softmax") == verdict(tmp_path, "inline_linear") == INCONCLUSIVE


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [60.0], "linear": [40.0]})
    found = claim(tmp_path, "inline_linear")
    assert (found.verdict, found.reading) == (INCONCLUSIVE, "There is one seed, so there is no interval.")


def test_what_is_not_measured_is_inconclusive(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [60.0]})
    found = claim(tmp_path, "gap")
    assert (found.verdict, found.effect, found.reading) == (INCONCLUSIVE, None, "This is not measured yet.")


def test_every_verdict_is_one_of_four(tmp_path: Path) -> None:
    write_runs(tmp_path, dict.fromkeys(MAIN, LINEAR))
    found = judge(collect(tmp_path))
    assert {c.verdict for c in found} <= {SUPPORTED, CONTRADICTED, INCONCLUSIVE, NOT_TESTABLE}
    assert len({c.name for c in found}) == len(found)
    assert EARLIER.keys() <= {c.name for c in found}


def test_verdicts_rest_on_the_most_seeds_then_the_longest_training(tmp_path: Path) -> None:
    rows = {"inline": [40.0, 40.1, 40.2], "linear": [39.0, 39.2, 39.1]}
    write_runs(tmp_path, rows, epochs=40)
    write_runs(tmp_path, {row: values[:2] for row, values in rows.items()}, epochs=120)
    assert claim(tmp_path, "inline_linear").where == "40 epochs, 3 seeds"
    write_runs(tmp_path / "all", rows, epochs=40)
    write_runs(tmp_path / "all", rows, epochs=120)
    assert claim(tmp_path / "all", "inline_linear").where == "120 epochs, 3 seeds"


def test_injectivity_is_judged_at_equal_feature_maps(tmp_path: Path) -> None:
    """The published pair, InLine with the identity against linear with ReLU, does not count."""
    same = {"linear": LINEAR, "linear_relu_affine": LINEAR}
    ahead = [value + 1 + d for value, d in zip(LINEAR, (0.0, 0.1, -0.1), strict=True)]
    write_runs(tmp_path, {**same, "inline_plain": [20.0] * 3, "inline_relu": ahead, "inline_relu_affine": ahead})
    found = claim(tmp_path, "injectivity")
    assert found.verdict == SUPPORTED
    assert {name: effect.mean for name, effect in found.parts.items()} == {
        "φ = ReLU": pytest.approx(1), "φ = ReLU(A·x + b)": pytest.approx(1),
    }  # fmt: skip
    assert verdict(tmp_path, "injectivity_residual") == INCONCLUSIVE  # not trained


# Differences of three seeds with the same spread: their interval is their mean ± 0.248.
@pytest.mark.parametrize(
    ("relu", "learned", "expected", "reading"),
    [
        (1.0, 0.3, SUPPORTED, "All of 2 intervals are above zero."),
        (5.0, 0.2, INCONCLUSIVE, "Not all of 2 intervals are above zero."),  # their mean would be far above zero
        (5.0, -0.3, CONTRADICTED, "The lowest interval is below zero."),
    ],
)
def test_all_comparisons_of_a_claim_count(
    tmp_path: Path, relu: float, learned: float, expected: str, reading: str
) -> None:
    def ahead(by: float) -> list[float]:
        return [value + by + d for value, d in zip(LINEAR, (0.0, 0.1, -0.1), strict=True)]

    rows = {"linear": LINEAR, "linear_relu_affine": LINEAR}
    write_runs(tmp_path, {**rows, "inline_relu": ahead(relu), "inline_relu_affine": ahead(learned)})
    found = claim(tmp_path, "injectivity")
    assert (found.verdict, found.reading) == (expected, reading)
    assert [effect.mean for effect in found.parts.values()] == [pytest.approx(relu), pytest.approx(learned)]
    assert found.effect == found.parts["φ = ReLU(A·x + b)"]  # the lower


def test_a_comparison_with_a_higher_mean_and_a_wide_interval_counts(tmp_path: Path) -> None:
    """The lowest mean alone would be certain."""
    write_runs(tmp_path, {"inline": [40.0, 40.2, 40.1], "mala": [39.0, 39.1, 39.2], "focused": [30.0, 39.0, 42.0]})
    found = claim(tmp_path, "other_linear")
    assert found.effect == found.parts["against MALA"]
    assert found.effect is not None
    assert found.effect.low is not None
    assert found.effect.low > 0
    assert found.verdict == INCONCLUSIVE


def test_the_grid_gives_every_claim_its_interval() -> None:
    """If all planned runs finish, claims and explanations about accuracies have several seeds, and all rivals."""
    runs = [
        RunResult(
            run, Path(run.name), 40.0 + len(run.row) % 7 + run.seed / 10, best=50.0, images=5000, curve=[], seconds=1.0,
            analysis=None, changed=[], commit="1 (abc)", machine="a cpu",
        )
        for run in build_runs()
    ]  # fmt: skip
    results = Results(runs, again=[], failures={}, sessions=[], probes=None, speed=None, sweep=None)
    found = {c.name: c for c in [*judge(results), *explain(results)] if "epochs" in c.where}
    assert {"feature_maps", "mapped_softmax", "windows", "why_start", "why_data", "why_augmentation"} <= found.keys()
    assert {name: c.effect.seeds for name, c in found.items() if c.effect} == dict.fromkeys(found, 3)
    assert found["other_linear"].missing == 0
    assert found["why_data"].where == "40 epochs, 3 seeds"


def test_a_map_that_is_missing_decides_nothing(tmp_path: Path) -> None:
    write_runs(tmp_path, {"linear": LINEAR, "inline_relu": [60.0] * 3})
    assert claim(tmp_path, "injectivity").effect is None


def test_a_command_has_the_settings_of_its_run(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [40.0]}, changes=("optim.lr=1e-3", "data.workers=0"))
    write_runs(tmp_path, {"linear": [40.0]})
    plain, changed = (remake(result) for result in sorted(collect(tmp_path).runs, key=lambda r: len(r.changed)))
    assert "optim.lr" not in plain
    assert changed.endswith(" data.workers=0 optim.lr=0.001")


@pytest.mark.parametrize(("focused", "expected"), [(29.0, INCONCLUSIVE), (31.0, CONTRADICTED)])
def test_other_linear_attentions(tmp_path: Path, focused: float, expected: str) -> None:
    """Each of them counts, wherever there are the most seeds. Being ahead of some is not being ahead of all."""
    write_runs(tmp_path, {"inline": [30.0], **{row: [45.0] for row in BASELINES}}, epochs=20)
    write_runs(tmp_path, {"inline": [30.0, 30.1], "mala": [25.0, 25.1], "focused": [focused, focused + 0.1]}, epochs=40)
    found = claim(tmp_path, "other_linear")
    assert found.verdict == expected
    assert found.where == "40 epochs, 2 seeds"
    assert found.parts.keys() == {"against MALA", "against Focused"}
    if expected == INCONCLUSIVE:
        assert found.reading == "All of 2 intervals are above zero, and 7 are missing."
        rivals = [row for row in (*BASELINES, *FAMILY) if not row.endswith("_residual")]
        write_runs(tmp_path / "all", {"inline": [30.0, 30.1], **{row: [25.0, 25.1] for row in rivals}}, epochs=40)
        assert claim(tmp_path / "all", "other_linear").verdict == SUPPORTED


@pytest.mark.parametrize(("linear", "expected"), [(2.0, SUPPORTED), (27.0, CONTRADICTED)])
def test_feature_maps(tmp_path: Path, linear: float, expected: str) -> None:
    rows = {row: [30.0, 30.1] for row in [*MAIN, *FEATURE_MAPS]}
    write_runs(tmp_path, {**rows, "linear_identity": [linear, linear], "inline_exp": [25.0, 25.2]}, epochs=20)
    assert verdict(tmp_path, "feature_maps") == expected


@pytest.mark.parametrize(("largest", "expected"), [(31.0, SUPPORTED), (29.0, CONTRADICTED)])
def test_windows(tmp_path: Path, largest: float, expected: str) -> None:
    rows = {"swin_window2_residual": [30.0, 30.1], "swin_window16_residual": [largest, largest + 0.1]}
    write_runs(tmp_path, rows, epochs=20)
    assert verdict(tmp_path, "windows") == expected


# Analyses and probes


def analysed(out: Path, **by_row: dict[str, Any]) -> None:
    """Two seeds, with the same analysis."""
    usual = dict.fromkeys(MAIN, analysis(local=0.0, random=0.0))
    write_runs(out, dict.fromkeys(MAIN, LINEAR[:2]), analyses={**usual, **by_row})


@pytest.mark.parametrize(
    ("strict", "loose", "expected"),
    [(2e-5, 2e-4, SUPPORTED), (2e-5, 1e-6, INCONCLUSIVE), (0.0, 1e-6, CONTRADICTED)],
)
def test_confusion_at_all_thresholds(tmp_path: Path, strict: float, loose: float, expected: str) -> None:
    analysed(tmp_path, linear=analysis(strict=strict, loose=loose, local=0.0, random=0.0))
    assert verdict(tmp_path, "confusion") == expected


def test_early_analyses_decide_nothing(tmp_path: Path) -> None:
    """They compared rows with the norm of a row, which counts flat attention as confused."""
    early = analysis(local=0.1, random=0.0)
    early["confusion"] = {"share_of_pairs": 1e-6, "by_layer": [1e-6], "tau": 1e-3}
    del early["confused"]
    analysed(tmp_path, softmax=early, inline=early)
    for name in ("confusion", "locality", "masking"):
        assert claim(tmp_path, name).effect is None


def test_an_analysis_of_one_seed_decides_nothing(tmp_path: Path) -> None:
    found = analysis(layers=(1.9, 0.9), local=0.1, random=0.0)
    write_runs(tmp_path, {row: [40.0] for row in MAIN}, analyses=dict.fromkeys(MAIN, found))
    assert claim(tmp_path, "masking").effect == (pytest.approx(10.0), None, 1)
    assert verdict(tmp_path, "masking") == INCONCLUSIVE


def test_a_part_that_is_missing_decides_nothing(tmp_path: Path) -> None:
    """An interrupted analysis is used for what it has."""
    found = analysis(layers=(1.9, 0.9), local=0.1, random=0.0)
    del found["masking"]
    analysed(tmp_path, softmax=found)
    assert verdict(tmp_path, "locality") == SUPPORTED
    assert claim(tmp_path, "masking").effect is None


def test_locality_of_the_first_layer_and_of_all(tmp_path: Path) -> None:
    analysed(tmp_path, softmax=analysis(layers=(1.9, 0.0), local=0.0, random=0.0))
    assert verdict(tmp_path, "locality") == SUPPORTED
    assert verdict(tmp_path, "locality_mean") == CONTRADICTED


@pytest.mark.parametrize(("inline", "more"), [(0.06, SUPPORTED), (0.11, CONTRADICTED)])
def test_masking_of_attention_alone(tmp_path: Path, inline: float, more: str) -> None:
    """Softmax loses 8 points more by local masks. What zeroed taps cost InLine, 40, does not count."""
    analysed(tmp_path, softmax=analysis(local=0.10, random=0.02), inline=analysis(local=inline, random=0.0))
    assert verdict(tmp_path, "masking") == SUPPORTED
    assert verdict(tmp_path, "masking_softmax") == more


# Explanations


def explanation(out: Path, name: str) -> Claim:
    (found,) = (claim for claim in explain(collect(out)) if claim.name == name)
    return found


def test_an_explanation_is_not_measured_before_its_experiment(tmp_path: Path) -> None:
    write_runs(tmp_path, dict.fromkeys(MAIN, LINEAR))
    assert {(c.effect, c.verdict) for c in explain(collect(tmp_path))} == {(None, INCONCLUSIVE)}


@pytest.mark.parametrize(
    ("quarter", "half", "expected"),
    [(36.0, 36.0, SUPPORTED), (40.0, 36.0, CONTRADICTED), (36.0, 37.95, INCONCLUSIVE)],
)
def test_data_explain_the_gap_if_it_is_smaller_with_more(
    tmp_path: Path, quarter: float, half: float, expected: str
) -> None:
    """The gap is −1 with all images. Fewer images are seen more often, so the lengths differ."""
    # More seeds, and more updates: these decide nothing.
    write_runs(tmp_path, {"inline": [50.0] * 3, "linear_residual": [40.0] * 3}, epochs=120)
    write_runs(tmp_path, {"inline": [40.0, 40.1], "linear_residual": [41.0, 41.12]}, epochs=40)
    few = {"inline_quarter_data": [quarter, quarter], "linear_residual_quarter_data": [39.0, 39.0]}
    write_runs(tmp_path, few, epochs=160)
    assert explanation(tmp_path, "why_data").effect is None  # before the second comparison
    write_runs(tmp_path, {"inline_half_data": [half] * 2, "linear_residual_half_data": [39.0, 39.0]}, epochs=80)
    found = explanation(tmp_path, "why_data")
    assert {part: effect.mean for part, effect in found.parts.items()} == {
        "quarter": pytest.approx(-1.01 - (quarter - 39)), "half": pytest.approx(-1.01 - (half - 39)),
    }  # fmt: skip
    assert found.effect is not None
    assert (found.verdict, found.effect.seeds, found.where) == (expected, 2, "40 epochs, 2 seeds")


def test_augmentation_is_judged_at_as_many_epochs(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [40.0] * 3, "linear_residual": [41.0] * 3}, epochs=120)
    published = {"inline_published": [52.0, 52.1], "linear_residual_published": [50.0, 50.12]}
    write_runs(tmp_path, published, epochs=300)
    assert explanation(tmp_path, "why_augmentation").effect is None
    write_runs(tmp_path, published, epochs=120)
    found = explanation(tmp_path, "why_augmentation")
    assert (found.verdict, found.where) == (SUPPORTED, "120 epochs, 2 seeds")
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(2.99)


def test_a_start_is_compared_with_the_same_gain(tmp_path: Path) -> None:
    """A learned gain helps by ten points here, and its start by nothing."""
    ahead = [50.0, 50.1, 50.2]
    write_runs(tmp_path, {"inline": LINEAR, "inline_gain": ahead, "inline_larger_start": ahead})
    assert explanation(tmp_path, "why_gain").verdict == SUPPORTED
    found = explanation(tmp_path, "why_start")
    assert (found.verdict, found.effect) == (INCONCLUSIVE, (0.0, 0.0, 3))


def test_what_predictions_rest_on_is_compared(tmp_path: Path) -> None:
    less, more = (analysis(local=0.0, random=0.0, without_residual=lost) for lost in (20.0, 35.0))
    analysed(tmp_path, inline=less, linear_residual=more)
    found = explanation(tmp_path, "why_residual")
    assert (found.verdict, found.effect) == (SUPPORTED, (pytest.approx(30.0), pytest.approx(0.0), 2))


def test_a_more_accurate_model_has_more_to_lose(tmp_path: Path) -> None:
    """Linear attention loses more points here, and InLine a larger share of its accuracy."""
    analysed(
        tmp_path,
        inline=analysis(local=0.0, random=0.0, without_residual=30.0, whole=40.0),
        linear_residual=analysis(local=0.0, random=0.0, without_residual=35.0, whole=50.0),
    )
    found = explanation(tmp_path, "why_residual")
    assert (found.verdict, found.effect) == (CONTRADICTED, (pytest.approx(-5.0), pytest.approx(0.0), 2))
    assert found.unit == "% of the accuracy"


def probes(
    *, linear: float, escaped: float, relu_after: float, softmax_local: float, residual: float, worst_mean: float
) -> dict[str, Any]:
    def score(mean: float, bound: float = 100.0) -> dict[str, Any]:
        return {"mean": mean, "std": 0.1, "bound": bound, "values": [mean - 0.1, mean, mean + 0.1]}

    # InLine with the identity: another φ than that of linear attention, so no verdict rests on it.
    bare = {"linear, ReLU": score(linear, 25.0), "InLine, ReLU": score(98.0), "InLine": score(10.0)}
    after = {"linear, ReLU": score(escaped), "InLine, ReLU": score(relu_after), "InLine": score(10.0)}
    local = {"softmax": softmax_local, "linear, ReLU": 55.0, "InLine": 58.0, "InLine + residual": residual}
    return {
        "chance": 25.0,
        "length": {"bare": bare, "bias": after, "skip": after},
        "local": {name: score(value) for name, value in local.items()},
        "mean": {"softmax": score(98.0), "InLine": score(worst_mean)},
    }


PROBED = {
    "length": ("linear", 25.7, 27.0),
    "length_inline": ("linear", 26.0, 99.0),
    "length_skip": ("escaped", 25.0, 90.0),  # far behind InLine, but far above chance
    "length_skip_inline": ("relu_after", 99.5, 98.0),
    "local_softmax": ("softmax_local", 61.0, 50.0),
    "local_residual": ("residual", 70.0, 50.0),
    "control": ("worst_mean", 97.0, 90.0),
}


@pytest.mark.parametrize("name", PROBED)
def test_probes(tmp_path: Path, name: str) -> None:
    argument, good, bad = PROBED[name]
    usual = {
        "linear": 25.0,
        "escaped": 99.0,
        "relu_after": 99.0,
        "softmax_local": 57.0,
        "residual": 77.0,
        "worst_mean": 98.0,
    }
    for value, expected in ((good, SUPPORTED), (bad, CONTRADICTED)):
        (tmp_path / "probes.json").write_text(json.dumps(probes(**{**usual, argument: value})))
        assert verdict(tmp_path, name) == expected


@pytest.mark.parametrize(("inline", "expected"), [(200.0, SUPPORTED), (102.0, INCONCLUSIVE), (90.0, CONTRADICTED)])
def test_cost(tmp_path: Path, inline: float, expected: str) -> None:
    write_runs(tmp_path, dict.fromkeys(MAIN, LINEAR))
    rows = {"tiny_imagenet-p4-inline": {"infer": inline}, "tiny_imagenet-p4-softmax": {"infer": 100.0}}
    (tmp_path / "speed.json").write_text(json.dumps({"machine": "a GPU", "rows": rows}))
    assert verdict(tmp_path, "cost") == expected


@pytest.mark.parametrize(("large", "expected"), [(6.0, SUPPORTED), (4.7, INCONCLUSIVE), (4.0, CONTRADICTED)])
def test_published_ratios_of_speed(tmp_path: Path, large: float, expected: str) -> None:
    """Each side counts in its faster mode; sizes and models that the paper does not name do not."""

    def result(side: int, contender: str, mode: str, rate: float | None, **other: Any) -> dict[str, Any]:
        fixed = {"model": "inline_deit_tiny", "task": "infer", "error": None if rate else "out of memory"}
        what = {"img_size": side, "contender": contender, "mode": mode, "images_per_second": rate}
        return {**fixed, **what, **other}

    results = [
        result(640, "peer_math", "a", 50.0), result(640, "peer_math", "b", 100.0), result(640, "fused", "a", 280.0),
        result(1024, "peer_math", "a", 10.0), result(1024, "fused", "a", 1.0), result(1024, "fused", "b", 10 * large),
        result(2048, "peer", "a", None), result(2048, "fused", "a", 9.0), result(640, "fused", "a", 1e6, task="train"),
        result(640, "fused", "a", 1e6, model="inline_swin_tiny"),
    ]  # fmt: skip
    facts = {"inline-attention": "1 (abc)", "cpu": "a cpu", "gpu 1": "a GPU"}
    write_runs(tmp_path, {"linear": LINEAR})
    (tmp_path / "sweep.json").write_text(json.dumps({"kind": "model", "facts": facts, "results": results}))
    found = claim(tmp_path, "speed_math")
    assert found.verdict == expected
    assert list(found.parts) == ["640 px", "1024 px"]
    # The size that falls short by most
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(2.8 if expected == SUPPORTED else large)
    assert found.effect == found.parts["640 px" if expected == SUPPORTED else "1024 px"]
    assert found.where == "a GPU"
    assert found.reading == ("The ratio is within 5 % of 4.8." if expected == INCONCLUSIVE else "")
    assert claim(tmp_path, "speed_flash").effect is None  # FlashAttention was not timed
    (tmp_path / "sweep.json").write_text(json.dumps({"kind": "op", "facts": facts, "results": results}))
    with pytest.raises(ValueError, match="a record of kind 'op'; expected model"):
        collect(tmp_path)


@pytest.mark.parametrize(("whole", "expected"), [(96.0, SUPPORTED), (80.0, CONTRADICTED), (None, INCONCLUSIVE)])
def test_speed_of_windows(tmp_path: Path, whole: float | None, expected: str) -> None:
    write_runs(tmp_path, {"linear": LINEAR})
    speeds = {2: 100.0, 4: 60.0, 8: 120.0, 16: whole}
    rows = {f"tiny_imagenet-p4-swin_window{size}_residual": {"infer": speed} for size, speed in speeds.items()}
    (tmp_path / "speed.json").write_text(json.dumps({"machine": "a GPU", "rows": rows}))
    assert verdict(tmp_path, "window_speed") == expected
