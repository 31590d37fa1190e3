"""A call of an attention written out as a matrix of weights: what analyses and tests look at."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from inline_attention.ops import Grid

from .local import LocalTerm

Matrix = Callable[[slice, slice, slice, Tensor | None], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class WrittenOut:
    """One call of an attention module: its output is `finish(weights @ v, local terms)`.

    The weights (S, heads, N, keys) are never held whole: `matrix` computes chosen rows, samples and heads of them. Its
    last argument is a bool mask that broadcasts to the result. False means that a token is absent for a query.
    """

    kind: str  # "inline", "linear", "softmax", …
    grid: Grid  # (height, width) of the tokens that attend to each other: the map, or a window of it
    num_prefix_tokens: int
    q: Tensor  # (S, N, heads, d), as the attention compares them, but before φ of linear attentions
    k: Tensor  # (S, keys, heads, d)
    v: Tensor  # (S, keys, heads, d)
    matrix: Matrix  # of rows, samples, heads and a mask
    finish: Callable[[Tensor, Tensor], Tensor]  # (weights @ v, local terms), (S, N, heads, d) each → output (S, N, C)
    local: tuple[LocalTerm, ...] = ()  # what is added to weights @ v
    token_mask: Tensor | None = None  # (S, N), False on the padding of windows
    key_grid: Grid | None = None  # of keys on a reduced map; None: keys and queries are the same tokens
    stripes: bool = False  # heads attend in stripes of the map


def samples_of(x: Tensor, samples: slice) -> Tensor:
    """Chosen samples of a tensor that has one entry a sample, or one for all of them."""
    return x if len(x) == 1 else x[samples]
