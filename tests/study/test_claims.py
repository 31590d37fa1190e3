"""Verdicts are what their rules make of the numbers."""

import json
from pathlib import Path

import pytest

from inline_attention.study.claims import CONFIRMED, NOT_CONFIRMED, NOT_MEASURED, judge
from inline_attention.study.grid import MAIN, Run
from inline_attention.study.report import gap_table
from inline_attention.study.results import Sample, collect


def write_runs(out: Path, accuracies: dict[str, list[float]]) -> None:
    for row, values in accuracies.items():
        for seed, value in enumerate(values):
            folder = out / Run("tiny_imagenet", row, 60, seed, 4).name
            folder.mkdir(parents=True)
            summary = {"val_top1": value, "best_top1": value + 0.1, "seconds": 10.0}
            record = {"kind": "eval", "epoch": 60, "update": 1, "val_top1": value, "val_images": 5000}
            start = {"inline-attention": "1 (abc)", "device": "cpu", "cpu": "a cpu"}
            (folder / "summary.json").write_text(json.dumps(summary))
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            (folder / "environment.json").write_text(json.dumps([start]))


def verdicts(out: Path) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in judge(collect(out))}


AHEAD = "InLine attention (with its residual) is ahead of linear attention"
LEVEL = "InLine attention is at least level with softmax attention"


@pytest.mark.parametrize(("inline", "expected"), [([43.0, 43.4, 43.2], CONFIRMED), ([41.0, 40.2, 40.6], NOT_CONFIRMED)])
def test_ahead_by_more_than_two_deviations(tmp_path: Path, inline: list[float], expected: str) -> None:
    write_runs(tmp_path, {"inline": inline, "linear": [40.0, 40.4, 40.2], "softmax": [43.5, 43.6, 43.4]})
    assert verdicts(tmp_path)[AHEAD] == expected


@pytest.mark.parametrize(
    ("softmax", "expected"), [([43.5, 43.4, 43.3], CONFIRMED), ([45.0, 45.1, 45.2], NOT_CONFIRMED)]
)
def test_level_with_softmax(tmp_path: Path, softmax: list[float], expected: str) -> None:
    write_runs(tmp_path, {"inline": [43.0, 43.4, 43.2], "linear": [40.0, 40.4, 40.2], "softmax": softmax})
    assert verdicts(tmp_path)[LEVEL] == expected


def test_gaps_beyond_two_deviations_are_bold(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [43.0, 43.4, 43.2], "linear": [40.0, 40.4, 40.2], "softmax": [43.5, 43.6, 43.4]})
    (line,) = gap_table(collect(tmp_path)).splitlines()[2:]
    # Standard deviations of 0.2, 0.2 and 0.1.
    assert line.endswith("| 3 | **+3.00 ± 0.57** | −0.30 ± 0.45 | – | – | – |")


def test_what_is_missing_is_not_judged(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [43.0], "linear": [40.0]})
    found = verdicts(tmp_path)
    assert found[LEVEL] == NOT_MEASURED
    assert found[AHEAD] == CONFIRMED  # 3 points: over twice the error that 5,000 images leave, 2 · 0.98


def test_one_seed_has_the_error_of_its_images() -> None:
    assert Sample([40.0], images=5000).spread == pytest.approx(100 * (0.4 * 0.6 / 5000) ** 0.5)
    assert Sample([40.0, 42.0], images=5000).spread == pytest.approx(2**0.5)


def test_verdicts_rest_on_the_setting_with_most_seeds(tmp_path: Path) -> None:
    write_runs(tmp_path, {row: [40.0, 40.1] for row in MAIN})
    for row in MAIN:
        (tmp_path / Run("tiny_imagenet", row, 60, 0, 4).name).rename(
            tmp_path / Run("tiny_imagenet", row, 120, 0, 4).name
        )
    setting = collect(tmp_path).main_setting
    assert setting is not None
    assert setting.epochs == 120  # equal numbers of seeds: the longer one
