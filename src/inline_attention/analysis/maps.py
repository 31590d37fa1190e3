"""What one query attends to, layer by layer, on the token map."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from .extract import capture


@dataclass(frozen=True)
class LayerMap:
    name: str
    kind: str
    query: tuple[int, int]  # (row, column) on the layer's token map
    grid: tuple[int, int]  # of that map
    weights: np.ndarray  # (heads, height, width) of the keys' map; NaN outside the query's window; may be negative
    with_local: np.ndarray | None  # the same and the local terms, averaged over the channels of a head; None: none


@dataclass(frozen=True)
class MapsResult:
    """What one query of one image attends to, layer by layer."""

    query: tuple[float, float]  # from the top and the left, 0 to 1
    layers: list[LayerMap]


def attention_maps(
    model: nn.Module,
    image: Tensor,
    *,
    query: tuple[float, float] = (0.5, 0.5),
    layers: Sequence[str | int] | None = None,
) -> MapsResult:
    """Weights of the query at a place of the image (C, H, W), over all of it.

    Args:
        query: (from the top, from the left), each in 0 … 1.
        layers: names or places; None for all.
    """
    if not all(0 <= place <= 1 for place in query):
        raise ValueError(f"query {query[0]}, {query[1]}; expected two numbers from 0 (top, left) to 1 (bottom, right)")
    found = []
    for record in capture(model, image[None], layers=layers):
        height, width = record.map_grid
        place = (min(int(query[0] * height), height - 1), min(int(query[1] * width), width - 1))
        local = record.row(0, place, local=True).cpu().numpy() if record.local else None
        weights = record.row(0, place).cpu().numpy()
        found.append(LayerMap(record.name, record.kind, place, record.map_grid, weights, local))
    return MapsResult(query, found)


def table(results: dict[str, MapsResult]) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Header and lines of a CSV file: the weights' range for each layer and head."""
    lines = [
        (label, layer.name, layer.kind, head, *(float(f(weights)) for f in (np.nanmin, np.nanmax, np.nansum)))
        for label, result in results.items()
        for layer in result.layers
        for head, weights in enumerate(layer.weights)
    ]
    return ("model", "layer", "attention", "head", "smallest_weight", "largest_weight", "sum_on_map"), lines
