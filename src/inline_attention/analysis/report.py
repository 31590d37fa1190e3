"""The files of an analysis: numbers, table and figure of each, and one HTML page that needs no other file."""

import base64
import dataclasses
import datetime
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inline_attention._version import __version__
from inline_attention.printing import write_csv, write_json

from .base import Findings, Subject

NOT_IN_JSON = {"plain": False}  # metadata of a dataclass's field that `to_plain` leaves out


def to_plain(value: Any) -> Any:
    """Dataclasses and arrays as JSON values: floats to seven digits, null for NaN and infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field for field in dataclasses.fields(value) if field.metadata.get("plain", True))
        return {field.name: to_plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def write_findings(findings: Findings, subjects: Sequence[Subject], folder: Path) -> None:
    """Write NAME.json, NAME.csv, NAME.png and NAME.svg. `subjects` is empty for an analysis without models."""
    from .figures import save  # imports matplotlib

    name, results, summaries = findings.name, findings.results, findings.summaries
    content: dict[str, Any] = dict(analysis=name, parameters=findings.parameters, warning=findings.warning)
    if subjects:
        content["models"] = [
            dict(label=s.label, **s.facts, summary=summaries[s.label], result=results[s.label]) for s in subjects
        ]
    else:
        for result in results.values():
            content.update(to_plain(result))
    write_json(folder / f"{name}.json", to_plain(content))
    write_csv(folder / f"{name}.csv", *findings.table)
    save(findings.figure, folder / name)


def write_report(
    analyses: Sequence[Findings], subjects: Sequence[Subject], folder: Path, *, device: torch.device
) -> Path:
    """Write report.html, with the figures that `write_findings` wrote to the same folder."""
    facts = {
        "inline-attention": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    sections = [(findings, (folder / f"{findings.name}.png").read_bytes()) for findings in analyses]
    page = html_report(sections, facts=facts, models={subject.label: subject.facts for subject in subjects})
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: left; vertical-align: top; }
td { font-variant-numeric: tabular-nums; }
.small { color: #666; font-size: .85rem; }
.warning { border-left: 4px solid #c8671b; padding-left: .6rem; }
section { border-top: 1px solid #ddd; margin-top: 2.5rem; }
"""


def html_report(
    sections: Sequence[tuple[Findings, bytes]], *, facts: Mapping[str, str], models: Mapping[str, Mapping[str, Any]]
) -> str:
    """A page with every analysis and its figure (PNG). It loads nothing from other files or sites."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>Attention analysed</title><style>{_STYLE}</style></head><body>",
        "<h1>Attention analysed</h1>",
        _table(models),
        f'<p class="small">{", ".join(f"{html.escape(key)} {html.escape(value)}" for key, value in facts.items())}</p>',
    ]
    for found, png in sections:
        picture = base64.b64encode(png).decode("ascii")
        parts += [
            f'<section id="{found.name}"><h2>{found.name.capitalize()}</h2>',
            f"<p>{html.escape(found.definition)}</p>",
            f'<p class="warning">{html.escape(found.warning)}.</p>' if found.warning else "",
            f'<img alt="{found.name}, with its numbers in the table below" src="data:image/png;base64,{picture}">',
            _table(found.summaries),
        ]
        parameters = {key: value for key, value in found.parameters.items() if value is not None}
        if parameters:
            text = ", ".join(f"{key} = {_cell(value)}" for key, value in parameters.items())
            parts.append(f'<p class="small">{text}</p>')
        parts.append("</section>")
    return "\n".join([*parts, "</body></html>", ""])


def _table(lines: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for line in lines.values() for key in line))
    if not columns:
        return ""
    head = "".join(f"<th>{html.escape(str(column)).replace('_', ' ')}</th>" for column in ("", *columns))
    body = "".join(
        f"<tr><th>{html.escape(label)}</th>" + "".join(f"<td>{_cell(line.get(c, ''))}</td>" for c in columns) + "</tr>"
        for label, line in lines.items()
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    value = to_plain(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "<br>".join(f"{html.escape(str(key))}: {_cell(item)}" for key, item in value.items())
    return html.escape("" if value is None else str(value))
