"""Results as plain values, and as one HTML page that needs no other file."""

import base64
import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DEFINITIONS = {
    "injectivity": (
        "Can an attention tell queries apart? Four queries that φ takes to one ray, at different lengths, and "
        "four keys. Linear attention divides by the sum of a row, so the length cancels and all four get the "
        "same weights. Softmax, and InLine attention, which subtracts the mean instead of dividing by the "
        "sum, give each its own."
    ),
    "confusion": (
        "How often does it happen in a model? A pair of queries of one image, head and layer is confused "
        "where its rows are closer than τ times the median distance of two rows, while its queries are further "
        "apart than ρ times the median distance of two queries. τ well below ρ means confusion; with τ = ρ a pair "
        "is merely close in both respects."
    ),
    "locality": (
        "How local is attention without being told to be? The mean, over the queries on the map, of the "
        "weights on the 3×3 neighbourhood of the query (itself included); chance is 9/N. Local terms such as "
        "InLine's 3×3 residual are left out."
    ),
    "maps": (
        "What does one query attend to? Its weights over the token map, layer by layer. InLine's weights may "
        "be negative. The local residual is linear in v too: its taps, averaged over channels, are added in "
        "the second line."
    ),
    "masking": (
        "What does a prediction rest on? Each query loses the window around it, or as many random tokens: "
        "everything is computed as if they were absent for that query. The taps of local terms on masked "
        "tokens are zeroed, or kept."
    ),
    "rank": (
        "How many different rows are there? Numerical rank: singular values above torch's default tolerance. "
        "Effective rank: exp of the entropy of the normalised singular values. A linear attention's matrix "
        "has at most d + 1 of them."
    ),
}


def to_plain(value: Any) -> Any:
    """Dataclasses and arrays as JSON knows them: floats to seven digits, null for what is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
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


@dataclass(frozen=True)
class Section:
    """One analysis on the page."""

    analysis: str
    picture: bytes  # PNG
    parameters: Mapping[str, Any]
    summaries: Mapping[str, Mapping[str, Any]]  # a line of the table for each label
    warning: str | None = None


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
    sections: Sequence[Section], *, facts: Mapping[str, str], models: Mapping[str, Mapping[str, Any]]
) -> str:
    """A page with every figure in it: no link, script, font or picture from elsewhere."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>Attention analysed</title><style>{_STYLE}</style></head><body>",
        "<h1>Attention analysed</h1>",
        _table(models),
        f'<p class="small">{", ".join(f"{html.escape(key)} {html.escape(value)}" for key, value in facts.items())}</p>',
    ]
    for section in sections:
        picture = base64.b64encode(section.picture).decode("ascii")
        parts += [
            f'<section id="{section.analysis}"><h2>{section.analysis.capitalize()}</h2>',
            f"<p>{html.escape(DEFINITIONS[section.analysis])}</p>",
            f'<p class="warning">{html.escape(section.warning)}.</p>' if section.warning else "",
            f'<img alt="{section.analysis}" src="data:image/png;base64,{picture}">',
            _table(section.summaries),
        ]
        given = {key: value for key, value in section.parameters.items() if value is not None}
        if given:
            words = ", ".join(f"{key} = {_cell(value)}" for key, value in given.items())
            parts.append(f'<p class="small">{words}</p>')
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
