"""InLine and tangent attention in the vision transformers of Hugging Face's transformers.

    from inline_attention.integrations.transformers import register

    register()
    model = AutoModel.from_pretrained("facebook/dinov2-small", attn_implementation="tangent")

"tangent" is the first-order expansion of the softmax that a model was trained with. "inline" is the one around zero.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function
except ImportError as error:
    raise ImportError("inline_attention.integrations.transformers needs transformers 5.0 or newer") from error

from inline_attention.ops import linear_attention_projected, tangent_attention_projected

ADVICE = (
    "Linear attention lets all queries share one state. Use it for the vision tower alone: "
    "attn_implementation={'vision_config': %r, 'text_config': 'sdpa'}, or set_attn_implementation of that part"
)


def register() -> None:
    """Makes attn_implementation="inline" and "tangent" known to transformers. A second call changes nothing."""
    AttentionInterface.register("inline", inline_forward)
    AttentionInterface.register("tangent", tangent_forward)
    for name in ("inline", "tangent"):
        # Without a function for masks, transformers would drop the mask that a user passes.
        AttentionMaskInterface.register(name, token_mask)


def inline_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """q, k and v (B, heads, N, d) → the output (B, N, heads, d), and None for the weights, which are never formed."""
    rows, options = _prepare("inline", module, query, key, value, *args, **kwargs)
    return linear_attention_projected(*rows, normalization="subtract", feature_map="identity", **options), None


def tangent_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """As `inline_forward`, but expanded around the mean query of each image and head"""
    rows, options = _prepare("tangent", module, query, key, value, *args, **kwargs)
    return tangent_attention_projected(*rows, **options), None


def _prepare(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of an operation of this package, from those that transformers passes"""
    if getattr(module, "is_causal", False) if is_causal is None else is_causal:
        raise ValueError(f"{type(module).__name__} is causal. {ADVICE % name}")
    if dropout:
        raise ValueError(f"dropout={dropout} of attention weights, which are never formed; set it to 0 in the config")
    for option in ("position_bias", "softcap"):
        if kwargs.get(option) is not None:
            raise ValueError(f"{type(module).__name__} has a {option}, which acts on single weights. {ADVICE % name}")
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads share {key.shape[1]} key heads; expected as many of each")
    if attention_mask is not None:
        attention_mask = _over_tokens(attention_mask, key, name)
    options = dict(scale=scaling, token_mask=attention_mask)
    if query.shape[2] == key.shape[2]:
        options["query_mask"] = attention_mask
    return [x.transpose(1, 2).unsqueeze(2) for x in (query, key, value)], options


def _over_tokens(mask: Tensor, key: Tensor, name: str) -> Tensor:
    """A mask over keys, (B, N) or (B, 1, 1, N), as a bool (B, N)"""
    tokens = (key.shape[0], key.shape[2])
    if mask.ndim == 4 and mask.shape[1:3] == (1, 1) and not mask.is_floating_point():
        mask = mask[:, 0, 0]
    if mask.shape != tokens or mask.is_floating_point():
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected a mask over tokens, "
            f"(B, N) = {tokens}, of bool or integers. {ADVICE % name}"
        )
    return mask.bool()


def token_mask(
    *, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, config: Any = None, **kwargs: Any
) -> Tensor | None:
    """The mask that a model passes to its attention: the user's mask over tokens, (B, N)"""
    if mask_function is not bidirectional_mask_function:
        kind = getattr(config, "_attn_implementation", "inline")
        raise ValueError(f"{type(config).__name__}: its attention is causal or has a mask over pairs. {ADVICE % kind}")
    return attention_mask
