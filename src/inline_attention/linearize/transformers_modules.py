"""The attention modules of transformers' ViT, DINOv2 and SigLIP. Imported only for a model of transformers.

Their `forward` looks up the attention function by the name in their configuration. A converted module keeps its
`forward` and gets a copy of the configuration that names the function below.
"""

import copy
from typing import Any

from torch import Tensor, nn

try:
    from transformers import AttentionInterface
except ImportError as error:
    raise ImportError("linearising a model of transformers needs transformers 4.51 or newer") from error
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.siglip import modeling_siglip
from transformers.models.vit import modeling_vit

from inline_attention.layers.token_grid import GridSource, token_mask_of

from .modules import LEFT_ALONE, LinearizedAttention, register
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


AttentionInterface.register(NAME, attend)


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
