"""Linear attention as the `attn_layer` of timm's vision transformers, with options and by name.

timm.create_model("vit_small_patch16_224", attn_layer=InLineAttention)  # a class works without this module
timm.create_model("vit_small_patch16_224", attn_layer=partial(InLineAttention, feature_map="relu"))

register()
timm.create_model("vit_small_patch16_224", attn_layer="inline")
"""

import functools
from typing import Any

from timm.models.vision_transformer import ATTN_LAYERS

from inline_attention.layers import ATTENTIONS


class partial(functools.partial):
    """`functools.partial` of an attention class, as timm's `attn_layer` takes it.

    timm calls `issubclass(attn_layer, DiffAttention)`. Python accepts any object with `__bases__` there. A
    `functools.partial` has none, and raises a TypeError.
    """

    @property
    def __bases__(self) -> tuple[Any, ...]:
        return (self.func,)


def register() -> None:
    """Makes the attentions of this library known to timm by name: "inline", "linear", "mala" and the others.

    A second call changes nothing.
    """
    for name, attention in ATTENTIONS.items():
        ATTN_LAYERS.setdefault(name, attention)
