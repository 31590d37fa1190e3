"""results.json, figures and a page in Markdown from a folder of runs."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inline_attention.study.claims import Claim, judge
from inline_attention.study.grid import DATASETS, MAIN, ROWS, Run, command_line
from inline_attention.study.measures import build_model, speed_name
from inline_attention.study.results import Results, RunResult, Setting

RESULTS, PAGE = "results.json", "results.md"


def count_parameters(run: Run) -> int:
    return sum(parameter.numel() for parameter in build_model(run).parameters())


def write_report(results: Results, out: Path) -> list[Path]:
    """All files, in `out`. Figures are made where there is something to draw."""
    claims = judge(results)
    figures = _draw(results, out)
    (out / RESULTS).write_text(_dump(results, claims))
    (out / PAGE).write_text(page(results, claims, [path.name for path in figures]))
    return [out / RESULTS, out / PAGE, *figures]


def write_docs(results: Results, figures: Sequence[Path], docs: Path) -> list[Path]:
    """The same as a page of the documentation: DOCS/results.md, DOCS/results/study.json, DOCS/images/study-….png"""
    claims = judge(results)
    for folder in ("results", "images"):
        (docs / folder).mkdir(parents=True, exist_ok=True)
    copies = [docs / "images" / f"study-{path.name}" for path in figures]
    for source, copy in zip(figures, copies, strict=True):
        shutil.copyfile(source, copy)
    numbers, target = docs / "results" / "study.json", docs / PAGE
    numbers.write_text(_dump(results, claims))
    links = [path.relative_to(docs).as_posix() for path in copies]
    target.write_text(f"{_HEAD}\n{page(results, claims, links)}")
    return [target, numbers, *copies]


_HEAD = """# Results

What [the study](study.md) measured, as `inline study report DIR --docs docs` writes it.
[All numbers](results/study.json) come with the command, seeds, commit and machine of each row. Top-1 is that after the
last epoch, with the standard deviation over seeds.
"""


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
                    "seconds": [result.seconds for result in runs],
                    "commit": sorted({result.commit for result in runs}),
                    "machine": sorted({result.machine for result in runs}),
                    "command": remake(runs[0]),
                    "analysis": runs[0].analysis,
                }
            )
        settings.append({**setting._asdict(), "tokens": setting.tokens, "title": str(setting), "rows": lines})
    return {
        "settings": settings,
        "claims": [dataclasses.asdict(claim) for claim in claims],
        "failures": results.failures,
        "device_minutes": round(results.device_seconds / 60, 1),
        "speed": results.speed,
        "probes": results.probes,
    }


def remake(result: RunResult) -> str:
    """The command that makes a row again."""
    return command_line(result.run.arguments(result.run.dataset.upper(), Path("runs")))


# Pictures


def _draw(results: Results, out: Path) -> list[Path]:
    from inline_attention.study import plots

    made: list[Path] = []

    def keep(figure: Any, name: str) -> None:
        plots.save(figure, out / name)
        made.append(out / name)

    if results.probes is not None:
        keep(plots.draw_probes(results.probes), "probes.png")
    main = results.main_setting
    if main is None:
        return made
    curves = {ROWS[row].title: [r.curve for r in results.runs if r.setting == main and r.run.row == row]
              for row in results.rows(main) if row in MAIN}  # fmt: skip
    keep(plots.draw_curves(curves, title=str(main)), "curves.png")
    same_tokens = [s for s in results.settings if s[:2] == main[:2]]
    if by_epochs := _series(results, same_tokens, lambda s: s.epochs):
        title = f"{DATASETS[main.dataset].title}, {main.tokens} tokens"
        keep(plots.draw_scaling(by_epochs, title=title, xlabel="epochs"), "epochs.png")
    for dataset in DATASETS:
        epochs = max((s.epochs for s in results.settings if s.dataset == dataset), default=0)
        same_length = [s for s in results.settings if (s.dataset, s.epochs) == (dataset, epochs)]
        if by_tokens := _series(results, same_length, lambda s: s.tokens):
            title = f"{DATASETS[dataset].title}, {epochs} epochs"
            keep(plots.draw_scaling(by_tokens, title=title, xlabel="tokens"), f"tokens-{dataset}.png")
    if points := speed_points(results, main):
        assert results.speed is not None
        keep(plots.draw_speed(points, machine=results.speed["machine"]), "speed.png")
    found = [(ROWS[row].title, r.analysis) for row in MAIN if (r := results.find(main, row)) and r.analysis]
    if found:
        keep(plots.draw_causes(found), "causes.png")
    return made


def _series(
    results: Results, settings: Sequence[Setting], place: Callable[[Setting], int]
) -> dict[str, list[tuple[float, float]]]:
    """Main rows that were measured at several places: (place, mean top-1) of each."""
    series: dict[str, list[tuple[float, float]]] = {}
    for setting in settings:
        for row, sample in results.rows(setting).items():
            if row in MAIN:
                series.setdefault(ROWS[row].title, []).append((place(setting), sample.mean))
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


# The page


def page(results: Results, claims: Sequence[Claim], figures: Sequence[str]) -> str:
    """Markdown; `figures` are links."""
    main = results.main_setting
    parts = [] if main is None else [f"## In short\n\n{main}.\n", front_table(results, main)]
    if results.speed is not None:
        speed = results.speed
        batch = max(row["batch"] for row in speed["rows"].values())
        parts.append(
            f"Images a second: each model alone, {speed['mode']} (not compiled), {speed['precision']}, "
            f"{batch} images at a time, on {speed['machine']}.\n"
        )
    parts += ["## Claims\n", _table(["claim", "measured here", "verdict", "rule"],
                                   [[c.claim, c.measured or "–", c.verdict, c.rule] for c in claims])]  # fmt: skip
    if results.probes is not None:
        parts += ["## Probes\n", "Command: `inline study probes`\n", probe_table(results.probes)]
    for setting in sorted(results.settings, key=lambda s: s != main):
        parts += [f"## {setting}\n", setting_table(results, setting)]
    if results.failures:
        lines = [[name, text.splitlines()[-1] if text else ""] for name, text in results.failures.items()]
        parts += ["## Runs without a result\n", _table(["run", "what it said"], lines)]
    if results.runs:
        example = results.find(main, "inline") if main is not None else None
        parts.append(f"The runs took {results.device_seconds / 60:.0f} minutes of one device in all.\n")
        parts.append(f"A row again:\n\n```\n{remake(example or results.runs[0])}\n```\n")
    parts += [f"![{Path(link).stem}]({link})\n" for link in figures]
    return "\n".join(parts)


def front_table(results: Results, setting: Setting) -> str:
    """The main rows in a few columns: what a first page has room for."""
    speeds = {point["title"]: point for point in speed_points(results, setting)}
    lines = []
    for row, sample in results.rows(setting).items():
        if row in MAIN:
            speed = speeds.get(ROWS[row].title, {})
            rates = (f"{speed[key]:,.0f}" if speed.get(key) else "–" for key in ("train", "infer"))
            lines.append([ROWS[row].title, str(sample), len(sample.values), *rates])
    return _table(["model", "top-1 (%)", "seeds", "training, images/s", "inference, images/s"], lines)


def setting_table(results: Results, setting: Setting) -> str:
    speeds = {point["title"]: point for point in speed_points(results, setting)}
    lines = []
    for row, sample in results.rows(setting).items():
        result = results.find(setting, row)
        assert result is not None
        parameters = count_parameters(result.run)
        speed, analysis = speeds.get(ROWS[row].title, {}), result.analysis
        lines.append(
            [
                ROWS[row].title,
                str(sample),
                len(sample.values),
                f"{parameters / 1e6:.2f}M",
                *(f"{speed[key]:,.0f}" if speed.get(key) else "–" for key in ("train", "infer")),
                "–" if analysis is None else f"{analysis['confusion']['share_of_pairs']:.2%}",
                "–" if analysis is None else f"{analysis['locality']['mean_over_chance']:.2f}",
                "–" if analysis is None else f"{analysis['rank']['mean_effective']:.1f}",
                f"`{result.commit}`, {result.machine}",
            ]
        )
    header = ["model", "top-1 (%)", "seeds", "parameters", "training, images/s", "inference, images/s",
              "confused pairs", "3×3, times chance", "effective rank", "commit, machine"]  # fmt: skip
    return _table(header, lines)


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
