"""Every registered attention, and every option of one that changes what it computes."""

from typing import Any

from inline_attention.layers import ATTENTIONS

_OPTIONS: dict[str, dict[str, Any]] = {
    "inline with rope": dict(rope=True),
    "linear with rope": dict(rope=True),
    "mala with rope": dict(rope=True),
    "tangent with rope": dict(rope=True),
    "tangent with 3 anchors": dict(anchors=3),
    "tangent with 3 anchors and rope": dict(anchors=3, rope=True),
}
_RESIDUALS: dict[str, dict[str, Any]] = {
    f"{name} and the residual": {**_OPTIONS.get(name, {}), "local_residual": True}
    for name in ("linear", "mala", "rala", "polaformer", "tangent", "mala with rope", "tangent with 3 anchors")
}
VARIANTS: dict[str, dict[str, Any]] = {**{kind: {} for kind in sorted(ATTENTIONS)}, **_OPTIONS, **_RESIDUALS}
"""The options of each, by a name that begins with its kind."""


def build_variant(variant: str, dim: int, num_heads: int, **kwargs: Any) -> Any:
    return ATTENTIONS[variant.split()[0]](dim, num_heads, **{**kwargs, **VARIANTS[variant]})
