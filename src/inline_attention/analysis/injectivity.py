"""Figure 1 of the paper: four queries and keys in the plane, and whether each attention can tell the queries apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inline_attention.ops import attention_matrix
from inline_attention.ops.feature_maps import get_feature_map

KINDS = ("softmax", "linear", "inline")
EQUAL_TOLERANCE = 1e-6

# The published coordinates are not known; these are read off the published axes and made collinear.
KEYS = ((0.60, 1.85), (1.00, 1.00), (1.90, 0.64), (1.82, 0.30))
DIRECTION, LENGTHS = (0.40, 0.72), (1.0, 1.7, 2.35, 2.85)
# φ(x) = ReLU(A·x + b) of the second panel.
AFFINE_WEIGHT, AFFINE_BIAS = ((1.2, -0.4), (-0.3, 0.9)), (0.5, 0.2)


@dataclass(frozen=True)
class Rows:
    """What one attention gives four queries."""

    weights: np.ndarray  # (queries, keys)
    smallest_difference: float  # of two rows, the largest entry of it; 0: two queries get the same row
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
    """The panels of the figure, and what they were made with."""

    panels: list[Panel]
    tolerance: float
    parameters: dict[str, Any]


def measure_injectivity(*, tolerance: float = EQUAL_TOLERANCE) -> InjectivityResult:
    """Both panels: queries that φ makes collinear, for φ = ReLU and for φ = ReLU(A·x + b).

    Softmax compares the queries and keys as they are, linear and InLine attention after φ. Rows that differ by less
    than `tolerance` in every entry are called equal.
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


def table(result: InjectivityResult) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Header and lines of a CSV file."""
    lines: list[Sequence[object]] = []
    for panel in result.panels:
        for kind, rows in panel.rows.items():
            for i, row in enumerate(rows.weights, start=1):
                lines.append((panel.feature_map, kind, f"q{i}", *row.tolist(), rows.verdict))
    return ("feature_map", "attention", "query", "k1", "k2", "k3", "k4", "verdict"), lines
