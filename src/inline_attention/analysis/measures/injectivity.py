"""Figure 1 of the paper: four queries and keys in the plane, and whether each attention can tell the queries apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inline_attention.analysis.base import Analysis, Findings, Progress, Subject, Table
from inline_attention.ops import attention_matrix
from inline_attention.ops.feature_maps import get_feature_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("softmax", "linear", "inline")
EQUAL_TOLERANCE = 1e-6
PLANE = "plane"  # label of the result, since there is no model
QUERY_COLOUR = "#8b2fb8"
TITLES = {"softmax": "softmax", "linear": "linear", "inline": "InLine"}

# The coordinates were not published. These are read off the published figure and made collinear.
KEYS = ((0.60, 1.85), (1.00, 1.00), (1.90, 0.64), (1.82, 0.30))
DIRECTION, LENGTHS = (0.40, 0.72), (1.0, 1.7, 2.35, 2.85)
# φ(x) = ReLU(A·x + b) of the second panel.
AFFINE_WEIGHT, AFFINE_BIAS = ((1.2, -0.4), (-0.3, 0.9)), (0.5, 0.2)


@dataclass(frozen=True)
class Rows:
    """The rows of four queries in one attention."""

    weights: np.ndarray  # (queries, keys)
    smallest_difference: float  # over pairs of rows, the largest entry of the difference; 0: two rows are equal
    largest_difference: float
    verdict: str  # "all equal", "all different" or "some equal"


@dataclass(frozen=True)
class Panel:
    feature_map: str
    queries: np.ndarray  # (queries, 2)
    keys: np.ndarray  # (keys, 2)
    mapped_queries: np.ndarray  # φ of them
    mapped_keys: np.ndarray
    rows: dict[str, Rows]  # by the kind of attention


@dataclass(frozen=True)
class InjectivityResult:
    """The panels of the figure, and their parameters."""

    panels: list[Panel]
    tolerance: float
    parameters: dict[str, Any]


def measure_injectivity(*, tolerance: float = EQUAL_TOLERANCE) -> InjectivityResult:
    """Both panels: queries that φ makes collinear, for φ = ReLU and for φ = ReLU(A·x + b).

    Softmax compares queries and keys directly, linear and InLine attention after φ. Rows are equal if no entry differs
    by `tolerance` or more.
    """
    ray = torch.tensor(LENGTHS, dtype=torch.float64)[:, None] * torch.tensor(DIRECTION, dtype=torch.float64)
    keys = torch.tensor(KEYS, dtype=torch.float64)
    weight, bias = (torch.tensor(x, dtype=torch.float64) for x in (AFFINE_WEIGHT, AFFINE_BIAS))
    # Queries that A·x + b takes to the same ray: a line beside the origin.
    shifted = torch.linalg.solve(weight, (ray - bias).T).T
    panels = [
        compare(ray, keys, name="ReLU(x)", tolerance=tolerance),
        compare(shifted, keys, name="ReLU(A·x + b)", affine=(weight, bias), tolerance=tolerance),
    ]
    parameters = dict(scale="d^-1/2", affine_weight=AFFINE_WEIGHT, affine_bias=AFFINE_BIAS)
    return InjectivityResult(panels, tolerance, parameters)


def compare(
    queries: Tensor,
    keys: Tensor,
    *,
    name: str,
    affine: tuple[Tensor, Tensor] | None = None,
    tolerance: float = EQUAL_TOLERANCE,
) -> Panel:
    """One panel from queries (n, 2) and keys (m, 2)."""
    mapped_queries, mapped_keys = queries, keys
    if affine is not None:
        weight, bias = affine
        mapped_queries, mapped_keys = queries @ weight.T + bias, keys @ weight.T + bias
    rows = {}
    for kind in KINDS:
        plain = kind == "softmax"
        weights = plane_weights(
            queries if plain else mapped_queries,
            keys if plain else mapped_keys,
            kind=kind,
            feature_map="identity" if plain else "relu",
        )
        rows[kind] = verdict(weights, tolerance=tolerance)
    relu = get_feature_map("relu").apply
    return Panel(
        feature_map=name,
        queries=queries.numpy(),
        keys=keys.numpy(),
        mapped_queries=relu(mapped_queries).numpy(),
        mapped_keys=relu(mapped_keys).numpy(),
        rows=rows,
    )


def plane_weights(queries: Tensor, keys: Tensor, *, kind: Any, feature_map: str) -> Tensor:
    """Attention of single vectors: queries (n, d), keys (m, d) → weights (n, m). See `attention_matrix`."""
    return attention_matrix(queries[None, :, None], keys[None, :, None], kind=kind, feature_map=feature_map)[0, 0]


def verdict(weights: Tensor, *, tolerance: float) -> Rows:
    """Whether rows (n, m) are equal, from the largest entry of each difference."""
    count = len(weights)
    differences = [float((weights[i] - weights[j]).abs().max()) for i in range(count) for j in range(i + 1, count)]
    smallest, largest = min(differences), max(differences)
    word = "all equal" if largest < tolerance else "all different" if smallest >= tolerance else "some equal"
    return Rows(weights.numpy(), smallest, largest, word)


@dataclass(frozen=True, kw_only=True)
class Injectivity(Analysis):
    """Can an attention tell queries apart? Four keys, and four queries of different lengths that φ takes to one ray.
    Linear attention divides by the sum of a row, so the length cancels and all four get the same weights. Softmax gives
    each its own. So does InLine attention, which subtracts the mean instead of dividing by the sum.
    """

    needs_models = False

    def run(self, subjects: Sequence[Subject], *, progress: Progress) -> Findings:
        result = measure_injectivity()
        summaries = {
            f"φ = {panel.feature_map}, {kind}": dict(
                verdict=rows.verdict,
                smallest_difference=rows.smallest_difference,
                largest_difference=rows.largest_difference,
            )
            for panel in result.panels
            for kind, rows in panel.rows.items()
        }
        return Findings(
            name=self.name(),
            definition=self.definition(),
            parameters=dict(tolerance=result.tolerance, **result.parameters),
            results={PLANE: result},
            summaries=summaries,
            table=self.table({PLANE: result}),
            figure=self.draw({PLANE: result}),
        )

    def table(self, results: Mapping[str, InjectivityResult]) -> Table:
        """Header and lines of a CSV file."""
        lines: list[Sequence[object]] = []
        for panel in results[PLANE].panels:
            for kind, rows in panel.rows.items():
                for i, row in enumerate(rows.weights, start=1):
                    lines.append((panel.feature_map, kind, f"q{i}", *row.tolist(), rows.verdict))
        return ("feature_map", "attention", "query", "k1", "k2", "k3", "k4", "verdict"), lines

    def draw(self, results: Mapping[str, InjectivityResult]) -> "Figure":
        """A line of panels for each φ: the plane, and the rows of the four queries in each attention."""
        from inline_attention.analysis import figures

        result = results[PLANE]
        figure = figures.new_figure(figures.WIDTH, 2.7 * len(result.panels) + 0.8)
        axes = figure.subplots(len(result.panels), 4, squeeze=False, width_ratios=(1.15, 1, 1, 1))
        for line, panel in zip(axes, result.panels, strict=True):
            _draw_plane(line[0], panel)
            for place, (kind, rows) in zip(line[1:], panel.rows.items(), strict=True):
                _draw_rows(place, kind, rows)
        points = {"k": result.panels[0].keys} | {f"q for {panel.feature_map}": panel.queries for panel in result.panels}
        weight, bias = result.parameters["affine_weight"], result.parameters["affine_bias"]
        figures.add_caption(
            figure,
            f"Softmax compares q and k as they are, linear and InLine attention φ(q) and φ(k); scale $d^{{-1/2}}$. "
            f"A = {list(map(list, weight))}, b = {list(bias)}. "
            f"Equal: no entry of two rows differs by {result.tolerance:g} or more.\n"
            + "\n".join(f"{name}: " + ", ".join(f"({x:.2f}, {y:.2f})" for x, y in at) for name, at in points.items()),
        )
        return figure


def _draw_plane(axes: Any, panel: Panel) -> None:
    for i, (x, y) in enumerate(panel.keys, start=1):
        axes.annotate("", (x, y), (0, 0), arrowprops=dict(arrowstyle="->", color="0.6"))
        axes.annotate(f"k{i}", (x, y), xytext=(4, 1), textcoords="offset points", color="0.35")
    for i, (x, y) in enumerate(panel.queries):
        axes.plot(x, y, "o", color=QUERY_COLOUR, markersize=6)
        axes.annotate(f"q{i + 1}", (x, y), xytext=(6, -4), textcoords="offset points", color=QUERY_COLOUR)
    axes.plot(*panel.queries.T, color="0.3", linewidth=0.8, linestyle=":")
    points = np.concatenate([panel.queries, panel.keys, [[0, 0]]])
    (left, bottom), (right, top) = points.min(0) - 0.1, points.max(0) + 0.4  # room for names
    axes.set(xlim=(left, right), ylim=(bottom, top), xlabel="first dimension", ylabel="second dimension")
    axes.set_title(f"φ(x) = {panel.feature_map}", fontsize=10)
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)


def _draw_rows(axes: Any, kind: str, rows: Rows) -> None:
    weights = rows.weights
    darkest = max(0.55, weights.max())
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=darkest)
    for i, j in np.ndindex(*weights.shape):
        colour = "white" if weights[i, j] > 0.6 * darkest else "black"
        axes.text(j, i, f"{weights[i, j]:.2f}", ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(weights.shape[1]), [f"k{j + 1}" for j in range(weights.shape[1])])
    axes.set_yticks(range(weights.shape[0]), [f"q{i + 1}" for i in range(weights.shape[0])])
    if rows.verdict == "all equal":
        detail = f"differ by at most {rows.largest_difference:.0e}"
    else:
        detail = f"differ by at least {rows.smallest_difference:.2g}"
    axes.set_title(f"{TITLES.get(kind, kind)}: {rows.verdict}\n{detail}", fontsize=9)
