"""results.json, figures, a page for people and a page of tables, from a folder of runs."""

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from inline_attention.bench.model import EAGER
from inline_attention.training.files import write_atomically
from study.ablation import SPREAD_EVENLY, WITHOUT_RESIDUAL
from study.claims import CONTRADICTED, EARLIER, INCONCLUSIVE, NOT_TESTABLE, POINTS, SUPPORTED, Claim, explain, judge
from study.grid import (
    BASELINES,
    DATASETS,
    FAMILY,
    FAMILY_ROWS,
    FEATURE_MAPS,
    MAIN,
    PHI,
    ROWS,
    SEEDS,
    SHARED_MAPS,
    WINDOW_SIZES,
    WINDOWS,
    Run,
    command_line,
    feature_map_row,
    shared_map_row,
)
from study.intervals import Effect
from study.measures import CONFUSED_AT, PARTS, build_model, masking_drops, speed_name, uniform_over_chance
from study.pages import fill
from study.plan import plan
from study.results import Results, RunResult, Sample, Setting, describe_seeds, is_early

RESULTS, PAGE, TABLES = "results.json", "results.md", "tables.md"
# Parts of the page's table, with their claims.
TOPICS = {
    "Does InLine attention close a gap?": (
        "gap", "inline_linear", "inline_softmax", "inline_linear_residual", "other_linear", "windows",
    ),
    "Injectivity": (
        "injectivity", "injectivity_residual", "feature_maps", "mapped_softmax", "length", "length_inline",
        "length_skip", "length_skip_inline", "confusion",
    ),
    "Local modelling": (
        "residual_inline", "residual_linear", "local_residual", "local_softmax", "control", "locality", "locality_mean",
        "masking", "masking_softmax",
    ),
    "Speed": ("cost", "speed_math", "speed_flash", "window_speed"),
}  # fmt: skip
WHY = "Why is linear attention with the residual ahead of InLine?"  # the part of the explanations
# The answer in words to the question of the page: claim → verdict → sentence.
OPENING = {
    "gap": {
        SUPPORTED: "Linear attention is behind softmax attention here.",
        INCONCLUSIVE: "Whether linear attention is behind at all is not certain here.",
        CONTRADICTED: "Linear attention is not behind softmax attention here.",
    },
    "injectivity": {
        SUPPORTED: "Injectivity alone raises accuracy.",
        INCONCLUSIVE: "Whether injectivity alone raises accuracy is open.",
        CONTRADICTED: "Injectivity alone does not raise accuracy with every φ.",
    },
    "residual_linear": {
        SUPPORTED: "Local modelling raises the accuracy of linear attention.",
        INCONCLUSIVE: "Whether local modelling raises the accuracy of linear attention is open.",
        CONTRADICTED: "Local modelling does not raise the accuracy of linear attention.",
    },
}
# What the page answers first, by claim.
QUESTIONS = {
    "gap": "Is softmax attention ahead of linear attention?",
    "injectivity": "Does injectivity alone raise accuracy?",
    "residual_linear": "Does local modelling raise the accuracy of linear attention?",
    "residual_inline": "Does it raise that of InLine attention?",
    "inline_linear_residual": "Is InLine ahead of linear attention with the same residual?",
    "cost": "Is InLine faster than softmax attention, where there are many tokens?",
}
SHOWN_PARTS = 2  # a claim with more comparisons is shown by its lowest
# Commits that timed linear attention before it had kernels of its own.
WITHOUT_KERNELS = ("05a71da56ed1", "96faf3740015")
_ANSWERS = {SUPPORTED: "Yes", CONTRADICTED: "No", INCONCLUSIVE: "Not decided"}


def count_parameters(run: Run) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(run).parameters())


def write_report(results: Results, out: Path) -> list[Path]:
    """Write all files to `out`. Figures without data are left out."""
    claims = judge(results)
    figures = _draw(results, claims, out)
    names = [path.name for path in figures]
    _write(out / RESULTS, _dump(results, claims))
    _write(out / PAGE, page(results, claims, names))
    _write(out / TABLES, tables(results, claims, names))
    return [out / RESULTS, out / PAGE, out / TABLES, *figures]


def write_docs(results: Results, figures: Sequence[Path], docs: Path) -> list[Path]:
    """Write the report into the documentation.

    DOCS/results.md for people, DOCS/results/study-tables.md, DOCS/results/study.json and DOCS/images/study-….png. The
    README beside DOCS gets the first table, between its two marks.
    """
    claims = judge(results)
    for folder in ("results", "images"):
        (docs / folder).mkdir(parents=True, exist_ok=True)
    copies = [docs / "images" / f"study-{path.name}" for path in figures]
    for source, copy in zip(figures, copies, strict=True):
        shutil.copyfile(source, copy)
    numbers, target, rows = docs / "results" / "study.json", docs / PAGE, docs / "results" / "study-tables.md"
    _write(numbers, _dump(results, claims))
    links = [path.relative_to(docs).as_posix() for path in copies]
    _write(target, fill("docs", {"page": page(results, claims, links)}))
    _write(rows, fill("docs_tables", {"page": tables(results, claims, [f"../{link}" for link in links])}))
    written = [target, rows, numbers, *copies]
    readme = docs.parent / "README.md"
    if readme.exists() and all(mark in (text := readme.read_text(encoding="utf-8")) for mark in _MARKS):
        before, after = text.split(_MARKS[0])[0], text.split(_MARKS[1])[1]
        _write(readme, f"{before}{_MARKS[0]}\n\n{front(results)}\n{_MARKS[1]}{after}")
        written.append(readme)
    return written


def _write(path: Path, text: str) -> None:
    """As a whole: a report may replace the record that it adds to."""
    write_atomically(path, text.encode())


_MARKS = ("<!-- results of the study -->", "<!-- end of the results -->")


def _dump(results: Results, claims: Sequence[Claim]) -> str:
    return json.dumps(to_json(results, claims), indent=1, ensure_ascii=False) + "\n"


# Numbers


def to_json(results: Results, claims: Sequence[Claim]) -> dict[str, Any]:
    settings = []
    for setting in results.settings:
        lines = []
        for row, sample in results.rows(setting).items():
            runs = [result for result in results.runs if result.setting == setting and result.run.row == row]
            lines.append(
                {
                    "row": row,
                    "title": ROWS[row].title,
                    "top1": sample.values,
                    "mean": round(sample.mean, 3),
                    "std": None if sample.std is None else round(sample.std, 3),
                    "seeds": [result.run.seed for result in runs],
                    "best": [result.best for result in runs],
                    "images": [result.images for result in runs],
                    "curves": [result.curve for result in runs],
                    "seconds": [result.seconds for result in runs],
                    "commit": sorted({result.commit for result in runs}),
                    "machine": sorted({result.machine for result in runs}),
                    "command": remake(runs[0]),
                    "analyses": [result.analysis for result in runs],
                }
            )
        settings.append({**setting._asdict(), "tokens": setting.tokens, "title": str(setting), "rows": lines})
    return {
        "settings": settings,
        "claims": [_claim(claim) for claim in claims],
        "explanations": [_claim(claim) for claim in explain(results)],
        "again": [{"run": r.run.name, "top1": r.top1, "commit": r.commit, "machine": r.machine} for r in results.again],
        "failures": results.failures,
        "sessions": results.sessions,
        "speed": results.speed,
        "sweep": None if results.sweep is None else results.sweep._asdict(),
        "probes": results.probes,
    }


def _claim(claim: Claim) -> dict[str, Any]:
    effect = None if claim.effect is None else claim.effect._asdict()
    parts = {name: part._asdict() for name, part in claim.parts.items()}
    return {**dataclasses.asdict(claim), "effect": effect, "parts": parts, "reading": claim.reading}


def remake(result: RunResult) -> str:
    """The command that repeats a row with the same settings."""
    return command_line(result.run.arguments(result.run.dataset.upper(), Path("runs"), extra=result.changed))


# Pictures


def _draw(results: Results, claims: Sequence[Claim], out: Path) -> list[Path]:
    from study import plots

    made: list[Path] = []

    def keep(figure: Any, name: str) -> None:
        plots.save(figure, out / name)
        made.append(out / name)

    if results.probes is not None:
        keep(plots.draw_probes(results.probes), "probes.png")
    if (varied := _variants_setting(results)) is not None:
        rows = results.rows(varied)
        caption = f"{varied}; {describe_seeds(rows.values())}"
        keep(plots.draw_variants(**_variants(rows), caption=caption), "variants.png")
    main = results.main_setting
    if main is None:
        return made
    accuracies = {
        setting.epochs: {ROWS[row].title: sample.values for row, sample in results.rows(setting).items() if row in MAIN}
        for setting in [main, *results.longer_settings]
    }
    effects = [
        (f"{claim.claim}{f' ({part})' if part else _lowest(claim)}", shown.effect, claim.limit, claim.verdict)
        for claim in claims
        if _is_drawn(claim)
        for part, shown in _shown(claim)
        if shown.effect is not None
    ]
    caption = f"{DATASETS[main.dataset].title}. Above: a point for each seed. "
    caption += "Below: 95 % intervals, paired by seed; dotted: the limit that decides"
    keep(plots.draw_answer(accuracies, effects, caption=caption), "answer.png")
    curves = {ROWS[row].title: [r.curve for r in results.runs if r.setting == main and r.run.row == row]
              for row in results.rows(main) if row in MAIN}  # fmt: skip
    keep(plots.draw_curves(curves, title=str(main)), "curves.png")
    same_tokens = [s for s in results.settings if s[:2] == main[:2]]
    if by_epochs := _series(results, same_tokens, lambda s: s.epochs):
        title = f"{DATASETS[main.dataset].title}, {main.tokens} tokens"
        caption = _seeds_shown(results, same_tokens)
        keep(plots.draw_scaling(by_epochs, title=title, xlabel="epochs", caption=caption), "epochs.png")
    for dataset in DATASETS:
        epochs = max((s.epochs for s in results.settings if s.dataset == dataset), default=0)
        same_length = [s for s in results.settings if (s.dataset, s.epochs) == (dataset, epochs)]
        if by_tokens := _series(results, same_length, lambda s: s.tokens):
            title = f"{DATASETS[dataset].title}, {epochs} epochs"
            caption = _seeds_shown(results, same_length)
            figure = plots.draw_scaling(by_tokens, title=title, xlabel="tokens", caption=caption)
            keep(figure, f"tokens-{dataset}.png")
    for setting, name in _timed_settings(results, main).items():
        assert results.speed is not None
        where = f"{results.speed['machine']}, {_how_timed(results.speed)}"
        caption = f"{setting}; {_seeds_shown(results, [setting])}. Timed on {where}"
        keep(plots.draw_speed(speed_points(results, setting), caption=caption), name)
    analysed = ((ROWS[row].title, r.analysis) for row in MAIN if (r := results.find(main, row)) and r.analysis)
    found = [(title, analysis) for title, analysis in analysed if is_early(analysis) or PARTS.keys() <= analysis.keys()]
    if found:
        keep(plots.draw_causes(found, title=str(main)), "causes.png")
    return made


def _is_drawn(claim: Claim) -> bool:
    """Whether a claim is about the accuracy of models and has an interval."""
    has_interval = claim.effect is not None and claim.effect.margin is not None
    return has_interval and claim.unit == POINTS and "epochs" in claim.where


def _variants_setting(results: Results) -> Setting | None:
    """The setting with the most feature maps, other attentions and windows."""
    variants = {*FEATURE_MAPS, *BASELINES, *WINDOWS}
    counts = {setting: len(variants & results.rows(setting).keys()) for setting in results.settings}
    return max((setting for setting in counts if counts[setting]), key=counts.__getitem__, default=None)


def _variants(rows: Mapping[str, Sample]) -> dict[str, Any]:
    """The data of each panel of the figure: top-1 by the quantity that varies."""

    def means(names: Mapping[Any, str]) -> dict[Any, float]:
        return {key: rows[name].mean for key, name in names.items() if name in rows}

    kinds = ("softmax", "linear", "InLine")
    maps = {title: means({kind: feature_map_row(kind.lower(), name) for kind in kinds}) for name, title in PHI.items()}
    ends = {"without residual": "", "with residual": "_residual"}
    windows = {title: means({size: f"swin_window{size}{end}" for size in WINDOW_SIZES}) for title, end in ends.items()}
    return {
        "maps": {title: by_kind for title, by_kind in maps.items() if by_kind} if FEATURE_MAPS.keys() & rows else {},
        "attentions": means({ROWS[row].title: row for row in (*MAIN, *BASELINES)}) if BASELINES.keys() & rows else {},
        "windows": {title: by_size for title, by_size in windows.items() if by_size},
    }


def _seeds_shown(results: Results, settings: Sequence[Setting]) -> str:
    """The meaning of points and bars in a figure."""
    seeds = describe_seeds(sample for s in settings for row, sample in results.rows(s).items() if row in MAIN)
    return seeds if seeds == "one seed each" else f"means of {seeds}; bars: standard deviation over seeds"


def _series(
    results: Results, settings: Sequence[Setting], place: Callable[[Setting], int]
) -> dict[str, list[tuple[float, float, float | None]]]:
    """Main rows that were measured in several settings: (setting, mean top-1, its standard deviation)."""
    series: dict[str, list[tuple[float, float, float | None]]] = {}
    for setting in settings:
        for row, sample in results.rows(setting).items():
            if row in MAIN:
                series.setdefault(ROWS[row].title, []).append((place(setting), sample.mean, sample.std))
    return {title: points for title, points in series.items() if len(points) > 1}


def speed_points(results: Results, setting: Setting) -> list[dict[str, Any]]:
    """Rows of a setting whose speed was measured."""
    if results.speed is None:
        return []
    points = []
    for row, sample in results.rows(setting).items():
        entry = results.speed["rows"].get(speed_name(setting.dataset, setting.patch, row))
        if entry is not None:
            both = {key: entry.get(key) for key in ("train", "infer")}
            points.append({"title": ROWS[row].title, "top1": sample.mean, "std": sample.std, **both})
    return points


def _rates(results: Results, setting: Setting, row: str) -> list[str]:
    """Images a second in training and in inference, as cells."""
    speeds = {} if results.speed is None else results.speed["rows"]
    entry = speeds.get(speed_name(setting.dataset, setting.patch, row), {})
    return [f"{entry[key]:,.0f}" if entry.get(key) else "–" for key in ("train", "infer")]


def _timed_settings(results: Results, main: Setting) -> dict[Setting, str]:
    """The main setting and, for other data, the one with the most tokens; by the name of the figure."""
    found = {main: "speed.png"}
    for dataset in DATASETS:
        others = [s for s in results.settings if s.dataset == dataset != main.dataset]
        if others:
            found[max(others, key=lambda s: (s.tokens, s.epochs))] = f"speed-{dataset}.png"
    return {setting: name for setting, name in found.items() if speed_points(results, setting)}


# The page


def page(results: Results, claims: Sequence[Claim], figures: Sequence[str]) -> str:
    """The page for people, as Markdown. `figures` are links."""
    main = results.main_setting
    left = len({run for group in plan(results) for run in group.left})
    values: dict[str, object] = {
        "opening": opening(claims),
        "answers": answers(claims),
        "verdict_table": verdict_table(claims),
        "topics": topics(claims, explain(results)),
        "changes": changes(claims),
        "answer_picture": _pictures(figures, "answer"),
        "leader": leader(results),
        "missing": left or None,
        **_skip_verdicts(claims),
    }
    if main is not None:
        values |= {"epochs": main.epochs, "highest": _highest(results, main)}
    return fill("results", values)


def tables(results: Results, claims: Sequence[Claim], figures: Sequence[str]) -> str:
    """All tables, commands and commits, as Markdown. `figures` are links."""
    main = results.main_setting
    values: dict[str, object] = {
        "missing_table": missing_table(results),
        "part_table": part_table([*claims, *explain(results)]),
        "analysis_table": analysis_table(results),
        "settings": "\n".join(_setting(results, s) for s in sorted(results.settings, key=lambda s: s != main)),
        "gap_table": gap_table(results),
        "shared_map_table": shared_map_table(results),
        "leaderboard": leaderboard(results),
        "failure_table": failure_table(results),
        "again_table": again_table(results),
        "commands": command_list(results),
        "provenance": made_on(results),
        "device_minutes": f"{results.device_seconds / 60:.0f}" if results.device_seconds else None,
        "speed_pictures": _pictures(figures, "speed", "curves"),
        "gap_pictures": _pictures(figures, "epochs", "tokens"),
        "cause_pictures": _pictures(figures, "variants", "causes"),
        "probe_pictures": _pictures(figures, "probes"),
    }
    if main is not None:
        values |= {"data": DATASETS[main.dataset].title, "tokens": main.tokens}
        values |= {"front_table": front_table(results, main)}
    if results.speed is not None:
        where = _where(results.speed["commits"], results.speed["machine"])
        values |= {"how_timed": _how_timed(results.speed), "timed_where": where}
        values |= {"without_kernels": _without_kernels(results)}
    if results.probes is not None:
        environment = results.probes["environment"]
        where = _where([environment["inline-attention"]], environment["cpu"])
        values |= {"probes_where": where, "probes_seed": results.probes["seed"]}
        values |= {"probe_table": probe_table(results.probes)}
    return fill("tables", values)


def verdict_table(claims: Sequence[Claim]) -> str:
    """How many of the claims that can be tested have each verdict."""
    counts = Counter(claim.verdict for claim in claims)
    verdicts = (SUPPORTED, CONTRADICTED, INCONCLUSIVE)
    return _table(verdicts, [[counts[verdict] for verdict in verdicts]]) if claims else ""


def opening(claims: Sequence[Claim]) -> str:
    return " ".join(OPENING[claim.name][claim.verdict] for claim in claims if claim.name in OPENING)


def answers(claims: Sequence[Claim]) -> str:
    """The first table of the page: questions of people, with their answers."""
    by_name = {claim.name: claim for claim in claims}
    lines = []
    for name, question in QUESTIONS.items():
        if (claim := by_name.get(name)) is not None:
            for number, (part, shown) in enumerate(_shown(claim)):
                first = ["", ""] if number else [question, f"**{_ANSWERS[claim.verdict]}**"]
                lines.append([*first, *_effect(shown), part or "–"])
    return _table(["question", "answer", "effect", "95 % interval", "with"], lines) if lines else ""


def topics(claims: Sequence[Claim], explanations: Sequence[Claim]) -> str:
    """A section for each topic: the table of its claims, and what each compares. Last what cannot be tested."""
    by_name = {claim.name: claim for claim in claims}
    members = {topic: [by_name[name] for name in names if name in by_name] for topic, names in TOPICS.items()}
    members[WHY] = list(explanations)
    sections = [f"### {topic}\n\n{claim_table(found)}\n{described(found)}" for topic, found in members.items() if found]
    if untestable := [claim for claim in claims if claim.verdict == NOT_TESTABLE]:
        reasons = "\n".join(f"- *{claim.claim}*: {claim.about}" for claim in untestable)
        sections.append(f"### Not testable here\n\n{reasons}")
    return "\n\n".join(sections)


def claim_table(claims: Sequence[Claim]) -> str:
    """A line for each claim, or for each of its comparisons if they are few. Claims have numbers."""
    lines = []
    for number, claim in enumerate(claims, start=1):
        first = [f"{number}. {claim.claim}", _verdict(claim)]
        for _, shown in _shown(claim):
            lines.append([first[0], *_effect(shown), _measured_on(shown), first[1]])
            first = ["", ""]
    return _table(["claim", "effect", "95 % interval", "measured on", "verdict"], lines)


def described(claims: Sequence[Claim]) -> str:
    """By number: what each claim compares and how its effect makes the verdict, in up to four sentences.

    That there is one seed or no measurement is said by the table.
    """
    readings = [claim.reading if claim.effect is not None and claim.effect.seeds != 1 else "" for claim in claims]
    pairs = enumerate(zip(claims, readings, strict=True), start=1)
    return "\n".join(f"{number}. {claim.about} {reading}".rstrip() for number, (claim, reading) in pairs)


def _shown(claim: Claim) -> list[tuple[str, Claim]]:
    """The comparisons of a claim if they are few, by name. Otherwise the claim itself."""
    if not 0 < len(claim.parts) <= SHOWN_PARTS:
        return [("", claim)]
    return [
        (part, replace(claim, effect=effect, parts={}, where="; ".join(filter(None, [part, claim.where]))))
        for part, effect in claim.parts.items()
    ]


def _skip_verdicts(claims: Sequence[Claim]) -> dict[str, object]:
    """Of the length probe with a skip connection, if it was measured."""
    names = {"length_skip": "skip_verdict", "length_skip_inline": "skip_inline_verdict"}
    return {names[c.name]: c.verdict for c in claims if c.name in names and c.effect is not None}


def made_on(results: Results) -> str:
    """Machines and commits of the trainings, the timings and the probes: a line for each."""
    lines = []
    commits = sorted({commit for result in results.runs for commit in result.commit.split(" and ")})
    machines = sorted({machine for result in results.runs for machine in result.machine.split(" and ")})
    if results.runs:
        spent = f", {results.device_seconds / 60:.0f} minutes" if results.device_seconds else ""
        lines.append(f"- trainings: {_where(commits, ', '.join(machines))}{spent}")
    if results.speed is not None:
        lines.append(f"- speed: {_where(results.speed['commits'], results.speed['machine'])}")
    if results.sweep is not None:
        lines.append(f"- speed by resolution: {_where(results.sweep.commit.split(' and '), results.sweep.machine)}")
    if results.probes is not None:
        environment = results.probes["environment"]
        lines.append(f"- probes: {_where([environment['inline-attention']], environment['cpu'])}")
    return "\n".join(lines)


def _verdict(claim: Claim) -> str:
    return f"**{claim.verdict}**" if claim.verdict in (SUPPORTED, CONTRADICTED) else claim.verdict


def _effect(claim: Claim) -> tuple[str, str]:
    """The effect with its unit, and its interval; of several comparisons, the lowest."""
    effect = claim.effect
    if effect is None:
        return "not measured", "–"
    number = f"{effect.mean:.2f}" if effect.seeds == 0 else f"{effect.mean:+.2f}"
    text = f"{number} {claim.unit}{_lowest(claim)}".replace("-", "−")
    if effect.low is None or effect.high is None:
        return text, "–" if effect.seeds == 0 else "one seed"
    return text, f"{effect.low:+.2f} to {effect.high:+.2f}".replace("-", "−")


def _lowest(claim: Claim) -> str:
    return f", the lowest of {len(claim.parts)}" if claim.parts else ""


def _measured_on(claim: Claim) -> str:
    lowest = [name for name, effect in claim.parts.items() if effect == claim.effect and name not in claim.where]
    return "; ".join([*lowest[:1], claim.where]) or "–"


def part_table(claims: Sequence[Claim]) -> str:
    """Every comparison of the claims that rest on several. Empty without any."""
    lines = [
        [claim.claim, name, *_effect(replace(claim, effect=effect, parts={})), _verdict(claim)]
        for claim in claims
        for name, effect in claim.parts.items()
    ]
    return _table(["claim", "comparison", "effect", "95 % interval", "verdict on the claim"], lines) if lines else ""


def changes(claims: Sequence[Claim]) -> str:
    """Verdicts of an earlier report that do not hold any more, a line for each. Empty if all do."""
    held = {"confirmed": (SUPPORTED,), "not confirmed": (CONTRADICTED, INCONCLUSIVE)}
    return "\n".join(
        f"- {claim.claim}: {earlier} then, {claim.verdict} now."
        for claim in claims
        if (earlier := EARLIER.get(claim.name)) is not None and claim.verdict not in held[earlier]
    )


def missing_table(results: Results) -> str:
    """Groups of the grid that are not complete. Empty if all are."""
    lines = [
        [f"`{group.name}`", group.question, len(group.runs), len(group.left)] for group in plan(results) if group.left
    ]
    return _table(["group", "what it asks", "runs", "missing"], lines) if lines else ""


def _setting(results: Results, setting: Setting) -> str:
    """The section of one setting: the DeiT rows, then the Swin rows, each with its analyses."""
    values: dict[str, object] = {"setting": setting, "provenance": provenance(results, setting)}
    families = {"deit": [row for row in ROWS if ROWS[row].is_deit], "swin": list(WINDOWS)}
    for family, members in families.items():
        rows = [row for row in results.rows(setting) if row in members]
        if rows:
            values[f"{family}_table"] = setting_table(results, setting, rows)
            values[f"{family}_analyses"] = looked_at(results, setting, rows)
    return fill("setting", values)


_CAPTIONS = {
    "speed": "Accuracy against the time an image takes",
    "curves": "Accuracy over the epochs, a line for each seed",
    "epochs": "Accuracy against the length of training",
    "tokens": "Accuracy against the number of tokens",
    "variants": "Accuracy with other feature maps, other attentions, other windows",
    "causes": "Confused pairs, attention to the neighbourhood, masking and rank of the first seed's models",
    "answer": "Above: accuracy of the five main models. Below: differences with their 95 % intervals",
    "probes": "Three probes",
}


def _pictures(links: Sequence[str], *names: str) -> str:
    """The figures of these names that exist, each name with all its data sets."""
    return "\n\n".join(
        f"![{_CAPTIONS[name]}]({link})"
        for name in names
        for link in links
        if Path(link).stem.removeprefix("study-").split("-")[0] == name
    )


def _where(commits: Sequence[str], machine: str) -> str:
    return f"{', '.join(f'`{commit}`' for commit in commits)} on {machine}"


def provenance(results: Results, setting: Setting) -> str:
    """Commit, machine and settings that differ from the grid: a line for each, with its rows unless it has all."""
    rows: dict[str, list[str]] = {}
    for result in results.runs:
        if result.setting == setting:
            where = _where([result.commit], result.machine)
            if result.changed:  # the title describes the grid, without `--set`
                where += f", not as in the grid: {', '.join(f'`{change}`' for change in result.changed)}"
            titles = rows.setdefault(where, [])
            titles += [title for title in [ROWS[result.run.row].title] if title not in titles]
    only = len(rows) == 1
    return "\n".join(f"- {where}{'' if only else ': ' + '; '.join(titles)}" for where, titles in rows.items()) + "\n"


def command_list(results: Results) -> str:
    """Commands of the first seed of every row in every setting. Empty without runs."""
    found = (results.find(setting, row) for setting in results.settings for row in results.rows(setting))
    lines = [remake(result) for result in found if result is not None]
    return "\n".join(["```", *lines, "```"]) if lines else ""


_GAP_PAIRS = (
    ("softmax", "linear"), ("inline", "linear"), ("inline", "softmax"), ("inline", "inline_plain"),
    ("inline_plain", "linear"), ("linear_residual", "linear"), ("inline", "linear_residual"),
)  # fmt: skip


# Main rows under another condition: the end of their names → text for the table
_CONDITIONS = {"": "", "_deep": ", twice as deep", "_half_rate": ", half the rate", "_twice_rate": ", twice the rate"}


def gap_table(results: Results) -> str:
    """Every setting and condition with at least two rows to compare. Empty without any."""
    lines = []
    for setting in results.settings:
        samples = results.rows(setting)
        for end, condition in _CONDITIONS.items():
            gaps = [_gap(results, setting, (a + end, b + end)) for a, b in _GAP_PAIRS]
            if any(gap != "–" for gap in gaps):
                seeds = {samples[row + end].seeds for row in MAIN if row + end in samples}
                lines.append([f"{setting}{condition}", " or ".join(map(str, sorted(seeds))), *gaps])
    header = ["setting", "seeds", *(f"{ROWS[a].title} − {ROWS[b].title}" for a, b in _GAP_PAIRS)]
    return _table(header, lines) if lines else ""


def _gap(results: Results, setting: Setting, pair: tuple[str, str]) -> str:
    effect = results.difference(setting, *pair)
    return "–" if effect is None else f"**{effect}**" if _is_told_apart(effect) else str(effect)


def _is_told_apart(effect: Effect) -> bool:
    return effect.margin is not None and abs(effect.mean) > effect.margin


def shared_map_table(results: Results) -> str:
    """Linear against InLine attention with the same φ, over the seeds that both have. Empty without a pair."""
    lines = []
    for name in PHI:
        for residual in (False, True):
            if residual and name not in SHARED_MAPS:
                continue
            pair = [shared_map_row(attention, name, residual=residual) for attention in ("inline", "linear")]
            for setting in results.settings_of(*pair)[:1]:
                top1 = results.common_seeds(setting, pair)
                inline, linear = (Sample({seed: of[row] for seed, of in top1.items()}) for row in pair)
                cells = [PHI[name], "with" if residual else "without", setting.epochs, len(top1)]
                lines.append([*cells, linear, inline, _gap(results, setting, (pair[0], pair[1]))])
    header = ["φ", "residual", "epochs", "seeds", "linear (%)", "InLine (%)", "InLine − linear"]
    return _table(header, lines) if lines else ""


def failure_table(results: Results) -> str:
    lines = [[name, text.splitlines()[-1] if text else ""] for name, text in results.failures.items()]
    return _table(["run", "what it said"], lines) if lines else ""


def again_table(results: Results) -> str:
    """Repeated runs. Empty without any."""
    if not results.again:
        return ""
    first = {result.run: result for result in results.runs}
    lines = [
        [f"`{r.run.name}`", f"{first[r.run].top1:.2f}" if r.run in first else "–", f"{r.top1:.2f}",
         results.rows(r.setting).get(r.run.row, "–"), _where([r.commit], r.machine)]
        for r in results.again
    ]  # fmt: skip
    return _table(["run", "top-1 (%)", "again", "the row, over its seeds", "commit, machine"], lines)


def front(results: Results) -> str:
    """The part of the README: one table."""
    main = results.main_setting
    if main is None:
        return ""
    inline = results.find(main, "inline")
    assert inline is not None
    return fill(
        "front",
        {
            "data": DATASETS[main.dataset].title,
            "parameters": f"{count_parameters(inline.run) / 1e6:.1f}",
            "front_table": front_table(results, main),
            "highest": _highest(results, main),
            "without_kernels": _without_kernels(results),
        },
    )


def _without_kernels(results: Results) -> str:
    """The rows that were timed without fused kernels while InLine had them. Empty if there are none."""
    commits = [] if results.speed is None else results.speed["commits"]
    return "linear attention" if any(old in commit for commit in commits for old in WITHOUT_KERNELS) else ""


def _highest(results: Results, setting: Setting) -> str:
    """The title of the main row with the highest mean."""
    rows = {row: sample for row, sample in results.rows(setting).items() if row in MAIN}
    return ROWS[max(rows, key=lambda row: rows[row].mean)].title


def _how_timed(speed: Mapping[str, Any]) -> str:
    batch = max(row["batch"] for row in speed["rows"].values())
    mode = "not compiled" if speed["mode"] == EAGER else f"compiled in mode {speed['mode']}"
    return f"{mode}, {speed['precision']}, {batch} images at a time"


def front_table(results: Results, setting: Setting) -> str:
    """The main rows in the few columns that fit into the README, with the lengths of training beside each other."""
    settings = [setting, *results.longer_settings]
    samples = {s: {row: sample for row, sample in results.rows(s).items() if row in MAIN} for s in settings}
    lines = [
        [ROWS[row].title, *(samples[s].get(row, "–") for s in settings), *_rates(results, setting, row)]
        for row in samples[setting]
    ]
    accuracy = [f"top-1 (%), {s.epochs} epochs, {describe_seeds(samples[s].values())}" for s in settings if samples[s]]
    return _table(["model", *accuracy, "training, images/s", "inference, images/s"], lines)


def leaderboard(results: Results) -> str:
    """All attentions of the family under one recipe, the highest mean first. Empty without the newer ones."""
    setting, samples = _ranked_family(results)
    if setting is None:
        return ""
    lines = [[ROWS[row].title, sample, sample.seeds, *_rates(results, setting, row)] for row, sample in samples.items()]
    return _table(["model", "top-1 (%)", "seeds", "training, images/s", "inference, images/s"], lines)


def _ranked_family(results: Results) -> tuple[Setting | None, dict[str, Sample]]:
    settings = [s for row in FAMILY for s in results.settings_of("inline", row)]
    if not settings:
        return None, {}
    setting = max(settings, key=lambda s: (settings.count(s), s.epochs))
    samples = {row: sample for row, sample in results.rows(setting).items() if row in FAMILY_ROWS}
    return setting, dict(sorted(samples.items(), key=lambda item: -item[1].mean))


def leader(results: Results) -> str | None:
    """The attention with the highest mean on the leaderboard, and how much of that is trained."""
    _, samples = _ranked_family(results)
    if not samples:
        return None
    row, first = next(iter(samples.items()))
    seeds = "one seed" if first.seeds == 1 else f"{first.seeds} seeds"
    trained = sum(sample.seeds == len(SEEDS) for sample in samples.values())
    return (
        f"{ROWS[row].title} has the highest mean, {first.mean:.2f} % with {seeds}. "
        f"All {len(SEEDS)} seeds are trained for {trained} of the {len(FAMILY_ROWS)} rows"
    )


def setting_table(results: Results, setting: Setting, rows: Sequence[str]) -> str:
    samples, masked = results.rows(setting), _most_masked(results, setting, rows)
    lines = []
    for row in rows:
        result = results.find(setting, row)
        assert result is not None
        seeds = ", ".join(map(str, samples[row].by_seed))
        parameters = f"{count_parameters(result.run) / 1e6:.2f}M"
        cells = _analysed(result.analysis or {}, masked)
        lines.append([ROWS[row].title, samples[row], seeds, parameters, *_rates(results, setting, row), *cells])
    header = ["model", "top-1 (%)", "seeds", "parameters", "training, images/s", "inference, images/s", *_ANALYSED]
    return _table(header, lines)


_ANALYSED = (
    "confused pairs in a million", "3×3 in the first layer, mean, times chance",
    "lost by masking, local / random", "with local taps masked", "effective rank",
)  # fmt: skip


def _analysed(analysis: Mapping[str, Any], masked: int) -> list[str]:
    """Cells of a row. Early analyses have no count of confused pairs, and interrupted ones lack parts."""
    cells = dict.fromkeys(_ANALYSED, "–")
    pairs, neighbourhood, kept, zeroed, effective_rank = _ANALYSED
    if "confused" in analysis:
        cells[pairs] = " / ".join(f"{1e6 * found['share_of_pairs']:.1f}" for found in analysis["confused"])
    if locality := analysis.get("locality"):
        first = locality["by_layer"][0] / locality["chance"][0]
        cells[neighbourhood] = f"{first:.2f}, {locality['mean_over_chance']:.2f}".replace("-", "−")
    if masking := analysis.get("masking"):
        cells[kept] = _masked(masking_drops(masking), masked)
        if any(outcome["local_terms"] != "none" for outcome in masking["outcomes"]):
            cells[zeroed] = _masked(masking_drops(masking, taps="zeroed"), masked)
    if rank := analysis.get("rank"):
        cells[effective_rank] = f"{rank['mean_effective']:.1f}"
    return list(cells.values())


def analysis_table(results: Results) -> str:
    """Analyses of today's definitions, a line for each model and seed, with intervals over images."""
    lines = []
    for r in results.runs:
        if r.analysis is None or is_early(r.analysis):
            continue
        confused = [
            _with_interval(1e6 * found["share_of_pairs"], [1e6 * limit for limit in found["interval"]])
            for found in r.analysis.get("confused", ())
        ]
        neighbourhood = "–"
        if locality := r.analysis.get("locality"):
            first, chance = (locality[key][0] for key in ("by_layer", "chance"))
            limits = [of_layers[0] / chance for of_layers in locality["interval"]]
            neighbourhood = _with_interval(first / chance, limits, digits=2)
        ablation = {
            row["title"]: _with_interval(row["lost"], row["lost_interval"]) for row in r.analysis.get("ablation", ())
        }
        masks = {
            (outcome["what"], outcome["local_terms"]): outcome
            for outcome in sorted(r.analysis.get("masking", {}).get("outcomes", ()), key=lambda o: o["tokens"])
            if outcome["tokens"]
        }  # the largest mask of each kind
        drops = {
            key: _with_interval(100 * of["lost"], [100 * x for x in of["lost_interval"]]) for key, of in masks.items()
        }
        lines.append([
            ROWS[r.run.row].title, r.run.epochs, r.run.seed, r.analysis["images"],
            *(confused or ["–"] * len(CONFUSED_AT)), neighbourhood,
            *(drops.get((what, "kept"), drops.get((what, "none"), "–")) for what in ("local", "random")),
            *(ablation.get(title, "–") for title in (WITHOUT_RESIDUAL, SPREAD_EVENLY)), _rank(r.analysis),
        ])  # fmt: skip
    pairs = [f"confused, τ = {tau:g}, ρ = {rho:g}" for tau, rho in CONFUSED_AT]
    lost = ["lost by local masks", "by random masks", "without the residual", "with attention spread evenly"]
    header = ["model", "epochs", "seed", "images", *pairs, "3×3 in the first layer, times chance", *lost]
    header.append("effective rank")
    return _table(header, lines) if lines else ""


def _rank(analysis: Mapping[str, Any]) -> str:
    """Of version 0.2: from few images, without an interval."""
    rank = analysis.get("rank")
    if rank is None:
        return "–"
    if "interval" not in rank:
        return f"{rank['mean_effective']:.1f} ({rank['images']} images)"
    return _with_interval(rank["mean_effective"], rank["interval"])


def _with_interval(value: float, interval: Sequence[float], *, digits: int = 1) -> str:
    low, high = interval
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})".replace("-", "−")


def _masked(drops: Mapping[str, Mapping[int, float]], expected: int) -> str:
    """Loss of top-1 by masking the largest window, and as many random tokens. Names the number if it is unusual."""
    tokens = max(drops["local"], default=0)
    if not tokens:  # all windows are smaller than the masks
        return "–"
    points = f"{drops['local'][tokens]:.1f} / {drops['random'][tokens]:.1f}".replace("-", "−")
    return points if tokens == expected else f"{points} ({tokens} tokens)"


def _analyses(results: Results, setting: Setting, rows: Sequence[str]) -> list[dict[str, Any]]:
    found = (results.find(setting, row) for row in rows)
    return [result.analysis for result in found if result is not None and result.analysis is not None]


def _most_masked(results: Results, setting: Setting, rows: Sequence[str]) -> int:
    """The number of tokens in the largest mask of these rows."""
    found = (analysis["masking"] for analysis in _analyses(results, setting, rows) if "masking" in analysis)
    return max((outcome["tokens"] for masking in found for outcome in masking["outcomes"]), default=0)


def looked_at(results: Results, setting: Setting, rows: Sequence[str]) -> str:
    """The number of images that the analyses of these rows used, and the resulting precision."""
    found = _analyses(results, setting, rows)
    if not found:
        return ""

    def counts(part: str) -> list[int]:
        return sorted({analysis[part]["images"] for analysis in found if part in analysis})

    values: dict[str, object] = {
        "images": _or(sorted({analysis["images"] for analysis in found})),
        "rank_images": _or(counts("rank")),
        "masked": _most_masked(results, setting, rows) or None,
        "points": " or ".join(f"{100 / images:g}" for images in counts("masking")),
        "thresholds": len(CONFUSED_AT) if any("confused" in analysis for analysis in found) else None,
    }
    localities = [analysis["locality"] for analysis in found if "locality" in analysis]
    if len({chance for locality in localities for chance in locality["chance"]}) == 1:  # equal maps
        values["even"] = f"{uniform_over_chance(localities[0]):.2f}"
    return fill("analyses", values, between=" ")


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)


def probe_table(probes: dict[str, Any]) -> str:
    length = probes["length"]
    lines = [
        [name, *(_score(length[variant][name]) for variant in length), f"{length['bare'][name]['bound']:.0f}"]
        for name in length["bare"]
    ]
    first = _table(["length probe", "bare layer (%)", "with a bias", "with a skip", "bound, bare"], lines)
    both = [[name, _score(probes["local"][name]), _score(probes["mean"][name])] for name in probes["local"]]
    return first + "\n" + _table(["one block", "local detail (%)", "mean brightness (%)"], both)


def _score(score: dict[str, Any]) -> str:
    return f"{score['mean']:.1f} ± {score['std']:.1f}"


def _table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"
