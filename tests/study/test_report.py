"""Tables and pictures of the study say what the runs' files say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import commands
from study_results import LINEAR, SOFTMAX, analysis, write_runs

from study import pages
from study.__main__ import build_parser
from study.claims import NOT_TESTABLE, explain, judge
from study.grid import BASELINES, FAMILY_ROWS, FEATURE_MAPS, MAIN, WINDOWS, Run
from study.pages import fill
from study.report import (
    analysis_table,
    answers,
    claim_table,
    described,
    front,
    gap_table,
    leader,
    leaderboard,
    missing_table,
    page,
    part_table,
    shared_map_table,
    tables,
    to_json,
    verdict_table,
    write_report,
)
from study.results import collect

DOCS = Path(__file__).parents[2] / "docs"


def test_gaps_whose_interval_does_not_contain_zero_are_bold(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [43.0, 43.4, 43.2], "linear": LINEAR, "softmax": [43.5, 40.0, 43.4]})
    write_runs(tmp_path, {"inline": [30.4], "linear": [30.0], "softmax": [31.0]}, epochs=20)
    short, main = gap_table(collect(tmp_path)).splitlines()[2:]
    assert main.endswith("| 3 | +2.10 ± 5.39 | **+3.00 ± 0.00** | +0.90 ± 5.39 | – | – | – | – |")
    assert short.endswith("| 1 | +1.00 | +0.40 | −0.60 | – | – | – | – |")  # one seed has no interval


def test_gaps_under_another_condition_have_a_line_of_their_own(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [30.4], "linear": [30.0], "inline_deep": [33.0], "linear_deep": [31.0]}, epochs=20)
    write_runs(tmp_path, {"inline_half_rate": [29.0], "linear_half_rate": [29.5], "softmax_deep": [32.0]}, epochs=20)
    lines = [line.split(" | ") for line in gap_table(collect(tmp_path)).splitlines()[2:]]
    assert [line[0].split(", ")[-1] for line in lines] == ["20 epochs", "twice as deep", "half the rate"]
    assert [line[2:5] for line in lines] == [["–", "+0.40", "–"], ["+1.00", "+2.00", "+1.00"], ["–", "−0.50", "–"]]


def test_windows_too_small_for_a_mask(tmp_path: Path) -> None:
    """A mask as large as a window would hide all of it, so smaller windows have smaller masks or none."""
    usual = analysis(local=0.03, random=0.01)
    smaller = analysis(local=0.02, random=0.0)
    for outcome in smaller["masking"]["outcomes"]:
        outcome["tokens"] = min(outcome["tokens"], 9)
    unmasked = analysis(local=0.0, random=0.0)
    unmasked["masking"]["outcomes"] = [o for o in unmasked["masking"]["outcomes"] if o["what"] == "none"]
    found = {"linear": usual, "swin_window2": unmasked, "swin_window4": smaller, "swin_window8": usual}
    write_runs(tmp_path, {row: [30.0] for row in found}, analyses=found)
    text = tables(collect(tmp_path), [], [])
    lines = {line.split(" | ")[0]: line.split(" | ")[8] for line in text.splitlines() if line.startswith("| InLine-S")}
    assert list(lines.values()) == ["–", "2.0 / 0.0 (9 tokens)", "3.0 / 1.0"]
    deit, swin = text.split("InLine-Swin instead of DeiT")
    assert "| linear (ReLU) | 30.00 |" in deit
    assert "| linear (ReLU) | 30.00 |" not in swin
    assert deit.count("Masks of 49 tokens") == swin.count("Masks of 49 tokens") == 1


@pytest.mark.slow
def test_variants_are_drawn_where_there_are_some(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_runs(tmp_path, {row: [40.0, 41.0] for row in MAIN}, epochs=40)
    assert "variants.png" not in [path.name for path in write_report(collect(tmp_path), tmp_path)]
    write_runs(tmp_path, {row: [30.0] for row in (*MAIN, *FEATURE_MAPS, *BASELINES, *WINDOWS)}, epochs=20)
    assert "variants.png" in [path.name for path in write_report(collect(tmp_path), tmp_path)]
    assert (tmp_path / "variants.png").stat().st_size > 5000
    assert "(variants.png)" in (tmp_path / "tables.md").read_text()


@pytest.mark.parametrize("row", [next(iter(FEATURE_MAPS)), "softmax_relu", next(iter(BASELINES)), next(iter(WINDOWS))])
def test_a_variant_alone_is_drawn(tmp_path: Path, row: str) -> None:
    """The main rows, which all other figures of runs show, are missing."""
    pytest.importorskip("matplotlib")
    write_runs(tmp_path, {row: [30.0]}, epochs=20)
    assert [path.name for path in write_report(collect(tmp_path), tmp_path)] == [
        "results.json", "results.md", "tables.md", "variants.png",
    ]  # fmt: skip


def test_evenly_spread_attention_is_told_of_maps_of_one_size(tmp_path: Path) -> None:
    """Elsewhere the ratio of means depends on the weights, not on the maps alone."""
    found = {row: analysis(local=0.0, random=0.0) for row in ("linear", "swin_window8")}
    found["swin_window8"]["locality"]["chance"] = [0.1, 0.2]
    write_runs(tmp_path, {row: [30.0] for row in found}, analyses=found)
    deit, swin = tables(collect(tmp_path), [], []).split("InLine-Swin instead of DeiT")
    assert "spread evenly has 0.91 times chance" in deit
    assert "spread evenly" not in swin


def test_a_longer_training_is_a_column_of_the_first_table(tmp_path: Path) -> None:
    write_runs(tmp_path, {row: [40.0, 40.1, 40.2] for row in MAIN}, epochs=40)
    assert "120 epochs" not in front(collect(tmp_path))
    write_runs(tmp_path, {"inline": [50.0], "linear": [45.0]}, epochs=120)
    text = front(collect(tmp_path))
    assert "top-1 (%), 40 epochs, 3 seeds each | top-1 (%), 120 epochs, one seed each" in text
    assert "| linear (ReLU) | 40.10 ± 0.10 | 45.00 |" in text
    assert "| softmax | 40.10 ± 0.10 | – |" in text


def test_a_longer_training_of_other_rows_is_not_in_the_first_table(tmp_path: Path) -> None:
    write_runs(tmp_path, {row: [40.0, 40.1, 40.2] for row in MAIN}, epochs=40)
    write_runs(tmp_path, {"focused": [50.0]}, epochs=120)
    assert "120 epochs" not in front(collect(tmp_path))


def test_each_comparison_of_a_claim_is_shown(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [40.0, 40.2, 40.1], "mala": [39.0, 39.1, 39.2], "focused": [30.0, 39.0, 42.0]})
    lines = part_table(judge(collect(tmp_path))).splitlines()[2:]
    assert [line.split(" | ")[1:4:2] for line in lines] == [
        ["against Focused", "−12.24 to +18.44"], ["against MALA", "+0.75 to +1.25"],
    ]  # fmt: skip
    assert all(line.endswith("| inconclusive |") for line in lines)


def test_nothing_is_said_of_what_is_not_known(tmp_path: Path) -> None:
    """There are no timings, and no record of the training calls."""
    write_runs(tmp_path, {"inline": [40.0], "linear": [39.0]})
    text = tables(collect(tmp_path), [], [])
    assert "minutes" not in text
    assert "Images a second" not in text


def test_claims_for_people(tmp_path: Path) -> None:
    """Answers come first. Every claim is in a table once, and is explained; what has changed is told after it."""
    write_runs(tmp_path, {"inline": [43.0, 43.5, 43.1], "linear": LINEAR, "softmax": SOFTMAX})
    results = collect(tmp_path)
    claims = judge(results)
    text = page(results, claims, ["answer.png"])
    assert text.startswith(
        "Linear attention is behind softmax attention here. Whether injectivity alone raises accuracy is open. "
        "Whether local modelling raises the accuracy of linear attention is open.\n\n| question | answer |"
    )
    assert (
        "\n| Is softmax attention ahead of linear attention? | **Yes** | +3.30 points | +2.87 to +3.73 | – |\n"
        "| Does injectivity alone raise accuracy? | **Not decided** | not measured | – | – |\n"
    ) in text
    assert "| +3.00 points | +2.75 to +3.25 | 60 epochs, 3 seeds | **supported** |" in text
    assert text.index("![Above: accuracy") < text.index("| claim | effect |")
    before, changed = text.split("## What has changed")
    for claim in [*claims, *explain(results)]:
        if claim.verdict == NOT_TESTABLE:
            assert f"\n- *{claim.claim}*: {claim.about}" in before
            continue
        (number,) = re.findall(rf"^\| (\d+)\. {re.escape(claim.claim)} \|", before, flags=re.MULTILINE)
        assert f"\n{number}. {claim.about}" in before
    assert "- InLine attention is ahead of linear attention: not confirmed then, supported now." in changed
    assert "- InLine attention gains from its local residual: confirmed then, inconclusive now." in changed
    assert "- InLine attention gains from larger windows" not in changed  # "not confirmed" and inconclusive agree
    assert "All others that were" in changed
    assert "- trainings: `1 (abc)` on a cpu" in tables(results, claims, [])
    assert "abc" not in text


def test_a_claim_is_explained_in_four_sentences() -> None:
    results = collect(DOCS, onto=DOCS / "results" / "study.json")
    for claim in [*judge(results), *explain(results)]:
        (line,) = described([claim]).splitlines()
        assert 1 <= len(sentences(line)) <= 4, line


def test_both_of_two_comparisons_are_shown(tmp_path: Path) -> None:
    """A small one alone would hide the other."""
    ahead = [value + 1 + d for value, d in zip(LINEAR, (0.0, 0.1, -0.1), strict=True)]
    rows = {"linear": LINEAR, "linear_relu_affine": LINEAR}
    write_runs(tmp_path, {**rows, "inline_relu": LINEAR, "inline_relu_affine": ahead})
    claims = [claim for claim in judge(collect(tmp_path)) if claim.name == "injectivity"]
    assert [line.split(" | ")[:2] for line in claim_table(claims).splitlines()[2:]] == [
        ["| 1. Injectivity alone raises accuracy", "+0.00 points"], ["| ", "+1.00 points"],
    ]  # fmt: skip
    assert "| **Not decided** | +0.00 points | +0.00 to +0.00 | φ = ReLU |\n|  |  | +1.00 points |" in answers(claims)


def test_verdicts_are_counted_in_a_table(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [43.0, 43.5, 43.1], "linear": LINEAR})
    claims = judge(collect(tmp_path))
    open_ = len(claims) - 4  # three cannot be tested
    assert verdict_table(claims).splitlines()[2:] == [f"| 1 | 0 | {open_} |"]


def test_the_highest_mean_is_of_the_rows_that_are_shown(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [43.0], "linear": [40.0], "mala_residual": [60.0]})
    results = collect(tmp_path)
    assert "is that of InLine (with residual)." in front(results)
    assert "is that of InLine (with residual)." in page(results, judge(results), [])


def test_unequal_kernels_are_named(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [43.0], "linear": [40.0]})
    speed = {"machine": "a GPU", "rows": {"tiny_imagenet-p4-inline": {"infer": 9.0, "batch": 1}}, "mode": "eager"}
    for commit, expected in (("0.1.0.dev0 (05a71da56ed1)", True), ("0.3.0 (abc)", False)):
        (tmp_path / "speed.json").write_text(json.dumps({**speed, "precision": "bf16", "commits": [commit]}))
        for text in (front(collect(tmp_path)), tables(collect(tmp_path), [], [])):
            assert ("When they were timed, linear attention had none." in text) == expected


def test_a_model_looks_the_same_in_every_figure() -> None:
    pytest.importorskip("matplotlib")
    from study.plots import style

    styles = {style(row.title) for row in MAIN.values()}
    assert len({colour for colour, _ in styles}) == len({marker for _, marker in styles}) == len(MAIN)
    for row, name in (
        ("linear", "linear, ReLU"),
        ("linear_residual", "linear, ReLU + residual"),
        ("inline", "InLine + residual"),
    ):
        assert style(MAIN[row].title) == style(name)  # in the grid and in the probes
    assert not styles & {style(row.title) for row in BASELINES.values()}


def test_the_pages_and_the_record_agree(tmp_path: Path) -> None:
    """Those of the documentation: `python -m study report` writes all three."""
    results = collect(tmp_path, onto=DOCS / "results" / "study.json")
    claims = judge(results)
    assert json.loads((DOCS / "results" / "study.json").read_text()) == json.loads(json.dumps(to_json(results, claims)))
    for path, template, write in (
        (DOCS / "results.md", "docs", page),
        (DOCS / "results" / "study-tables.md", "docs_tables", tables),
    ):
        found = path.read_text()
        links = re.findall(r"^!\[.*\]\((.*)\)$", found, flags=re.MULTILINE)
        assert all((path.parent / link).exists() for link in links)
        assert fill(template, {"page": write(results, claims, links)}) == found


def sentences(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.?]) ", paragraph.replace("\n", " ").replace("top-1", "accuracy"))


def prose(page: str) -> list[str]:
    """Paragraphs and items of lists: no tables, code, commits, headings, pictures, bold words, targets of links."""
    page = re.sub(r"^```.*?^```|^- `[^\n]*", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"`[^`]*`|\]\([^)]*\)|\*\*[^*]*\*\*", "", page)
    blocks = re.split(r"\n\n|\n(?=- |\d\. )", page)
    return [block for block in map(str.strip, blocks) if block and not block.startswith(("#", "|", "!", "<!--"))]


def generated(path: str) -> str:
    text = (DOCS / path).read_text(encoding="utf-8")
    return text.split("<!-- results of the study -->")[-1].split("<!-- end of the results -->")[0]


@pytest.mark.parametrize("path", ["results.md", "results/study-tables.md", "study.md", "../README.md"])
def test_pages_are_easy_to_read(path: str) -> None:
    """At most five sentences in a paragraph, and no sentence with more than three numbers."""
    for paragraph in prose(generated(path)):
        assert len(sentences(paragraph)) <= 5, paragraph
        for sentence in sentences(re.sub(r"^\d\. ", "", paragraph)):
            assert len(re.findall(r"(?<![A-Z])\b\d+(?:[.,×]\d+)*", sentence)) <= 3, sentence


def test_repeated_runs_that_differ_are_named() -> None:
    """Those that differ by more than a point from the first time."""
    results = collect(DOCS, onto=DOCS / "results" / "study.json")
    first = {result.run: result.top1 for result in results.runs}
    text = (DOCS / "study.md").read_text(encoding="utf-8").split("## How the runs were made")[1]
    different = [(first[r.run], r.top1) for r in results.again if abs(r.top1 - first[r.run]) > 1]
    assert different
    for before, after in different:
        assert f"{before:.2f} %" in text
        assert f"{after:.2f} %" in text


def test_speed_by_size_is_that_of_the_newest_records() -> None:
    """Those that the page of the study names."""
    record = DOCS / "results" / "study.json"
    (words,) = (c.words for c in commands(DOCS.parent / "study" / "README.md") if "--sweeps" in c.words)
    args = build_parser().parse_args(list(words[3:]))
    sweep = collect(DOCS, onto=record, sweeps=[DOCS.parent / path for path in args.sweeps]).sweep
    assert sweep == collect(DOCS, onto=record).sweep
    assert sweep is not None
    assert sweep.commit == "0.2.0 (f000489)"
    rates = {
        (r["img_size"], r["contender"]): r["images_per_second"]
        for r in json.loads((DOCS / "results" / "sweep-rows-h200.json").read_text())["results"]
        if r["task"] == "infer"
    }
    assert sweep.ratios == {side: rates[side, "fused"] / rates[side, "peer"] for side in (224, 384, 640, 1024, 2048)}


def test_text_at_the_end_of_a_section_belongs_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "some.template").write_text("## A\n\n$a\n\nAfter it.\n\n## B\n\nBefore it.\n\n$b")
    monkeypatch.setattr(pages, "__file__", str(tmp_path / "__init__.py"))
    assert fill("some", {"a": "1"}) == "## A\n\n1\n\nAfter it.\n"
    assert fill("some", {"b": "2"}) == "## B\n\nBefore it.\n\n2\n"
    (tmp_path / "some.template").write_text("## A\n\n$a\n\n## B\n\nAlone.\n\n## C\n\n$c")
    assert fill("some", {}) == "## B\n\nAlone.\n"


def test_analyses_have_intervals(tmp_path: Path) -> None:
    """An interrupted analysis has fewer parts, and an early one, of other definitions, is left out."""
    partial, early = analysis(local=0.0, random=0.0), analysis(local=0.0, random=0.0)
    del partial["masking"], partial["confused"]
    early["confusion"] = early.pop("confused")
    found = {"inline": analysis(local=0.03, random=0.01), "linear": partial, "softmax": early}
    write_runs(tmp_path, {row: [30.0] for row in found}, analyses=found)
    results = collect(tmp_path)
    lines = [line.split(" | ") for line in analysis_table(results).splitlines()[2:]]
    assert [line[0] for line in lines] == ["| InLine (with residual)", "| linear (ReLU)"]
    assert lines[0][7:9] == ["10.0 (5.0 to 20.0)", "1.00 (0.90 to 1.10)"]
    assert lines[0][9:12] == ["3.0 (−7.0 to 13.0)", "1.0 (−9.0 to 11.0)", "30.0 (29.0 to 31.0)"]
    assert lines[1][4:8] == ["–"] * 4
    assert lines[1][9:11] == ["–"] * 2
    assert "200 validation images" in tables(results, judge(results), [])


def test_missing_groups_are_named(tmp_path: Path) -> None:
    write_runs(tmp_path, {row: [40.0, 40.1, 40.2] for row in MAIN}, epochs=40)
    lines = missing_table(collect(tmp_path)).splitlines()
    assert not [line for line in lines if line.startswith("| `main`")]
    assert [line for line in lines if line.startswith("| `gain`") and line.endswith("| 6 | 6 |")]


def test_the_same_feature_map_is_compared(tmp_path: Path) -> None:
    write_runs(tmp_path, {"inline": [43.0, 43.4, 43.2], "linear": LINEAR, "inline_relu": [40.9, 41.0, 41.1]})
    (line,) = shared_map_table(collect(tmp_path)).splitlines()[2:]
    assert line.startswith("| ReLU | without | 60 | 3 | 40.20 ± 0.20 | 41.00 ± 0.10 | **+0.80 ± 0.43** |")
    text = tables(collect(tmp_path), [], [])
    assert "## The same feature map\n\nLinear and InLine" in text
    write_runs(tmp_path / "other", {"inline": [43.0], "linear": [40.0]})
    assert "The same feature map" not in tables(collect(tmp_path / "other"), [], [])


def test_means_of_the_same_feature_map_are_over_the_same_seeds(tmp_path: Path) -> None:
    """So that they differ by what the table says."""
    write_runs(tmp_path, {"linear_residual": [40.0, 40.0, 43.0], "inline_relu_residual": [39.0, 39.5]})
    (line,) = shared_map_table(collect(tmp_path)).splitlines()[2:]
    assert line.startswith("| ReLU | with | 60 | 2 | 40.00 ± 0.00 | 39.25 ± 0.35 | −0.75 ± ")


def test_the_leaderboard_begins_with_the_highest(tmp_path: Path) -> None:
    write_runs(
        tmp_path,
        {
            "inline": [43.0, 43.4],
            "linear": LINEAR,
            "mala_residual": [44.0, 44.2],
            "hydra": [20.0],
            "inline_exp": [50.0],
        },
    )
    lines = leaderboard(collect(tmp_path)).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [
        "| MALA with residual", "| InLine (with residual)", "| linear (ReLU)", "| Hydra",
    ]  # fmt: skip
    assert "## Every attention under one recipe" in tables(collect(tmp_path), [], [])
    assert leader(collect(tmp_path)) == (
        "MALA with residual has the highest mean, 44.10 % with 2 seeds. "
        f"All 3 seeds are trained for 1 of the {len(FAMILY_ROWS)} rows"
    )
    write_runs(tmp_path / "other", {"inline": [43.0], "linear": [40.0]})
    assert leader(collect(tmp_path / "other")) is None
    assert "Every attention" not in tables(collect(tmp_path / "other"), [], [])


def test_new_runs_go_onto_an_earlier_report(tmp_path: Path) -> None:
    """What was reported stays as it was; runs of the same name are replaced."""
    pytest.importorskip("matplotlib")
    first, second, whole = (tmp_path / name for name in ("first", "second", "whole"))
    old = {"inline": [43.0, 43.4, 43.2], "linear": LINEAR}
    new = {"softmax": SOFTMAX, "inline_relu": [41.0]}
    found = {"linear": analysis(local=0.03, random=0.01)}
    write_runs(first, old, analyses=found, changes=("optim.lr=0.5",))
    write_runs(second, new)
    write_runs(whole, old, analyses=found, changes=("optim.lr=0.5",))
    write_runs(whole, new)
    write_report(collect(first), first)
    both, expected = collect(second, onto=first / "results.json"), collect(whole)
    claims = judge(expected)
    assert judge(both) == claims
    assert page(both, claims, []) == page(expected, claims, [])
    assert tables(both, claims, []) == tables(expected, claims, [])
    assert to_json(both, claims) == to_json(expected, claims)
    write_runs(second, {"linear": [30.0]})
    assert collect(second, onto=first / "results.json").rows(both.settings[0])["linear"].values == [30.0, *LINEAR[1:]]
    (first / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a results\.json that"):
        collect(second, onto=first / "results.json")


def test_a_report_can_be_repeated(tmp_path: Path) -> None:
    """Each report replaces the record that the next one adds to."""
    write_runs(tmp_path, {"inline": [43.0, 43.4], "linear": LINEAR})
    write_runs(tmp_path / "again", {"inline": [43.1]})
    session = {"start": "2026-01-01T00:00:00+0000", "seconds": 600.0}
    (tmp_path / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    record, texts = tmp_path / "study.json", []
    for onto in (None, record, record):
        results = collect(tmp_path, onto=onto)
        record.write_text(json.dumps(to_json(results, judge(results))))
        texts.append(record.read_text())
    assert texts[0] == texts[1] == texts[2]
    assert "10 minutes" in tables(results, judge(results), [])


def test_a_failed_run_that_was_made_later_has_not_failed(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_runs(first, {"linear": LINEAR})
    (first / "tiny_imagenet-p4-e60-inline-s0").mkdir()
    (first / "tiny_imagenet-p4-e60-inline-s0" / "failure.txt").write_text("diverged")
    results = collect(first)
    assert list(results.failures) == ["tiny_imagenet-p4-e60-inline-s0"]
    (tmp_path / "study.json").write_text(json.dumps(to_json(results, judge(results))))
    write_runs(second, {"inline": [43.0]})
    assert collect(second, onto=tmp_path / "study.json").failures == {}


def test_a_report_is_utf8_everywhere(tmp_path: Path) -> None:
    """Also where the system's encoding is another one."""
    write_runs(tmp_path, {"linear": LINEAR})
    code = "from study.__main__ import main; raise SystemExit(main())"
    words = ["report", str(tmp_path), "--no-analyses", "--no-speed"]
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", code, *words], check=True, cwd=DOCS.parent, env={**os.environ, **ascii_only})
    for name in ("results.json", "results.md", "tables.md"):
        assert "φ" in (tmp_path / name).read_text(encoding="utf-8")


def test_the_recorded_results_can_be_added_to(tmp_path: Path) -> None:
    """These are the results in docs/, whose run folders no longer exist."""
    write_runs(tmp_path, {"inline_relu": [39.0, 39.5, 40.0]}, epochs=40)
    record = DOCS / "results" / "study.json"
    results = collect(tmp_path, onto=record)
    (line,) = (line for line in shared_map_table(results).splitlines() if line.startswith("| ReLU | without"))
    assert line.startswith("| ReLU | without | 40 | 3 | 38.47 ± 0.66 | 39.50 ± 0.50 | +1.03 ± ")
    old = json.loads(record.read_text())
    assert {s["title"] for s in old["settings"]} == {str(setting) for setting in results.settings}


def test_a_page_leaves_out_what_is_not_known() -> None:
    empty = fill("setting", {"setting": "here", "provenance": "there"})
    assert empty == "## here\n\nthere\n"
    assert "InLine-Swin instead of DeiT" in fill("setting", {"setting": "here", "swin_table": "| a |"})
    assert fill("tables", {"settings": "## here\n\nthere"}).startswith("## here\n\nthere")
    assert fill("docs", {"page": "## here"}).startswith("# Results\n\nIs linear attention behind")
    assert "What has changed" not in fill("results", {"topics": "| a |", "verdict_table": "| 1 |"})


def test_failures_alone(tmp_path: Path) -> None:
    folder = tmp_path / Run("tiny_imagenet", "inline", 40, 0, 4).name
    folder.mkdir()
    (folder / "failure.txt").write_text("diverged")
    with pytest.raises(ValueError, match=f"{folder.name} failed"):
        collect(tmp_path)
