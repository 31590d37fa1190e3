"""Tables and pictures of the study say what the runs' files say."""

from pathlib import Path

import pytest
from study_results import LINEAR, SOFTMAX, analysis, write_runs

from inline_attention.study.grid import BASELINES, FEATURE_MAPS, MAIN, WINDOWS
from inline_attention.study.report import gap_table, page, write_report
from inline_attention.study.results import collect


def test_gaps_beyond_two_standard_errors_are_bold(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [43.0, 43.4, 43.2], "linear": LINEAR, "softmax": SOFTMAX})
    # One seed of another length varies as the main rows do: 2 · 0.173 · √2. The first difference: softmax − linear.
    write_runs(tmp_path, {"inline": [30.4], "linear": [30.0], "softmax": [31.0]}, epochs=20)
    short, main = gap_table(collect(tmp_path)).splitlines()[2:]
    assert main.endswith("| 3 | **+3.30 ± 0.28** | **+3.00 ± 0.28** | **−0.30 ± 0.28** | – | – | – | – |")
    assert short.endswith("| 1 | **+1.00 ± 0.49** | +0.40 ± 0.49 | **−0.60 ± 0.49** | – | – | – | – |")


def test_gaps_under_another_condition_have_a_line_of_their_own(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [30.4], "linear": [30.0], "inline_deep": [33.0], "linear_deep": [31.0]}, epochs=20)
    write_runs(tmp_path, {"inline_half_rate": [29.0], "linear_half_rate": [29.5], "softmax_deep": [32.0]}, epochs=20)
    lines = [line.split(" | ") for line in gap_table(collect(tmp_path)).splitlines()[2:]]
    assert [line[0].split(", ")[-1] for line in lines] == ["20 epochs", "twice as deep", "half the rate"]
    assert [line[2:5] for line in lines] == [["–", "+0.40", "–"], ["+1.00", "+2.00", "+1.00"], ["–", "−0.50", "–"]]


def test_windows_too_small_for_a_mask(tmp_path: Path) -> None:
    """A mask as large as a window would leave nothing of it: smaller windows have smaller masks, or none."""
    usual = analysis(local=0.03, random=0.01)
    smaller = analysis(local=0.02, random=0.0)
    for outcome in smaller["masking"]["outcomes"]:
        outcome["tokens"] = min(outcome["tokens"], 9)
    unmasked = analysis(local=0.0, random=0.0)
    unmasked["masking"]["outcomes"] = [o for o in unmasked["masking"]["outcomes"] if o["what"] == "none"]
    found = {"linear": usual, "swin_window2": unmasked, "swin_window4": smaller, "swin_window8": usual}
    write_runs(tmp_path, {row: [30.0] for row in found}, analyses=found)
    text = page(collect(tmp_path), [], [])
    lines = {line.split(" | ")[0]: line.split(" | ")[8] for line in text.splitlines() if line.startswith("| InLine-S")}
    assert list(lines.values()) == ["–", "2.0 / 0.0 (9 tokens)", "3.0 / 1.0"]
    deit, swin = text.split("InLine-Swin instead of DeiT")
    assert "| linear (ReLU) | 30.00 |" in deit
    assert "| linear (ReLU) | 30.00 |" not in swin
    assert deit.count("masks of 49 tokens") == swin.count("masks of 49 tokens") == 1


@pytest.mark.parametrize("group", [FEATURE_MAPS, BASELINES, WINDOWS, {**FEATURE_MAPS, **BASELINES, **WINDOWS}])
def test_variants_are_drawn_where_there_are_some(tmp_path: Path, group: dict[str, object]) -> None:
    pytest.importorskip("matplotlib")
    write_runs(tmp_path, {row: [40.0, 41.0] for row in MAIN}, epochs=40)
    assert "variants.png" not in [path.name for path in write_report(collect(tmp_path), tmp_path)]
    write_runs(tmp_path, {row: [30.0] for row in (*MAIN, *group)}, epochs=20)
    assert "variants.png" in [path.name for path in write_report(collect(tmp_path), tmp_path)]
    assert (tmp_path / "variants.png").stat().st_size > 5000
    assert "(variants.png)" in (tmp_path / "results.md").read_text()


def test_a_longer_training_is_told_first(tmp_path: Path) -> None:
    write_runs(tmp_path, {row: [40.0, 40.1, 40.2] for row in MAIN}, epochs=40)
    assert "After 120 epochs" not in page(collect(tmp_path), [], [])
    write_runs(tmp_path, {"inline": [50.0], "linear": [45.0]}, epochs=120)
    start = page(collect(tmp_path), [], []).split("[Claims]")[0]
    assert "After 120 epochs (one seed each): linear (ReLU) 45.00, InLine (with residual) 50.00." in start
