"""The attention modules of transformers' ViT, DINOv2 and SigLIP. Imported only for a model of transformers.

Their `forward` looks up the attention function by the name in their configuration. A converted module keeps its
`forward` and gets a copy of the configuration that names the function below. The modules around it get the same copy,
because a model makes the mask for the attention function that its own configuration names.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import AttentionInterface
except ImportError as error:
    raise ImportError("linearising a model of transformers needs transformers 4.51 or newer") from error
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.siglip import modeling_siglip
from transformers.models.vit import modeling_vit

from inline_attention.layers.token_grid import GridSource, token_mask_of

from .modules import LEFT_ALONE, REGISTRY, LinearizedAttention, Removable, register
from .torchvision_modules import measure_output

NAME = "inline_attention_linearized"


def attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    """q, k and v (B, heads, N, d) → (B, N, heads, d), as transformers asks of an attention function"""
    token_mask = token_mask_of(mask, bool(options.get("is_causal")), v.transpose(1, 2))
    rows = (x.transpose(1, 2).unsqueeze(2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return module.attend_linearly(*rows, scale=scale, token_mask=token_mask, query_mask=token_mask), None


def mask_over_keys(
    *, attention_mask: Tensor | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor | None:
    """The mask that a model passes to its attentions: the user's over tokens (B, N) as (B, 1, 1, N), to be added.

    It is not a bool, because an attention that stays softmax may be transformers' eager one, which adds it.
    """
    if attention_mask is None:
        return None
    absent = ~attention_mask.bool()[:, None, None]
    return torch.zeros(absent.shape, dtype=dtype, device=absent.device).masked_fill(absent, torch.finfo(dtype).min)


AttentionInterface.register(NAME, attend)
try:
    from transformers import AttentionMaskInterface
except ImportError:  # an older release, whose vision models make no masks
    pass
else:
    AttentionMaskInterface.register(NAME, mask_over_keys)


class NamedConfigs:
    """The modules around converted ones, whose configuration now names `attend`. `restore` calls `remove`."""

    def __init__(self, model: nn.Module, converted: Sequence[Any]) -> None:
        named = {id(module.softmax_config): module.config for module in converted}
        self.replaced: list[tuple[Any, Any]] = []
        for module in model.modules():
            config = getattr(module, "config", None)
            if id(config) in named and type(module) not in REGISTRY:  # not an attention that stays softmax
                self.replaced.append((module, config))
                module.config = named[id(config)]

    def remove(self) -> None:
        for module, config in self.replaced:
            module.config = config


class TransformersAttention(LinearizedAttention):
    @classmethod
    def why_not(cls, module: Any, parent: nn.Module) -> str | None:
        return "its attention is causal" if module.is_causal else None

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        num_heads = getattr(module, "num_heads", None) or module.num_attention_heads
        return num_heads, getattr(module, "head_dim", None) or module.attention_head_size

    @classmethod
    def grid_source(cls, ancestor: Any) -> GridSource | None:
        embeddings: Any = getattr(ancestor, "embeddings", None)
        if hasattr(embeddings, "patch_embedding"):  # SigLIP: the convolution itself, and no class token
            return GridSource(embeddings.patch_embedding, measure_output, 0, embeddings.num_patches)
        patches: Any = getattr(embeddings, "patch_embeddings", None)
        if not hasattr(patches, "projection"):
            return None
        return GridSource(patches.projection, measure_output, 1, 1 + patches.num_patches)

    def converted(self: Any) -> None:
        self.softmax_config = self.config
        self.config = copy.copy(self.config)
        self.config._attn_implementation = NAME

    @classmethod
    def around(cls, model: nn.Module, converted: Sequence[nn.Module]) -> list[Removable]:
        return [NamedConfigs(model, converted)]

    def restored(self: Any) -> None:
        self.config = self.softmax_config
        del self.softmax_config


def _class_of(module: Any, *names: str) -> type[nn.Module]:
    """The module that looks up the attention function; its name depends on the release of transformers."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


VIT = _class_of(modeling_vit, "ViTSelfAttention", "ViTAttention")
DINOV2 = _class_of(modeling_dinov2, "Dinov2SelfAttention", "Dinov2Attention")
LEFT_ALONE[modeling_siglip.SiglipMultiheadAttentionPoolingHead] = "softmax, left alone: it pools"


@register(VIT)
class LinearizedViT(TransformersAttention, VIT):  # type: ignore[misc, valid-type]
    """The attention of ViT."""


@register(DINOV2)
class LinearizedDinov2(TransformersAttention, DINOV2):  # type: ignore[misc, valid-type]
    """The attention of DINOv2 without registers."""


@register(modeling_siglip.SiglipAttention)
class LinearizedSiglip(TransformersAttention, modeling_siglip.SiglipAttention):
    """The attention of SigLIP."""

    @classmethod
    def why_not(cls, module: Any, parent: nn.Module) -> str | None:
        if isinstance(module.config, modeling_siglip.SiglipTextConfig):
            return "it attends to text: convert the vision tower alone, with linearize(model.vision_model)"
        return super().why_not(module, parent)
