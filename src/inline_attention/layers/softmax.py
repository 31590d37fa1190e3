"""Softmax attention, and its forms with φ or with the local residual, for comparisons with InLine attention."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from inline_attention.ops import Grid, attention_matrix
from inline_attention.ops.feature_maps import get_feature_map
from inline_attention.ops.tracing import is_exporting

from .attention import Attention
from .registry import register_attention


@register_attention
class SoftmaxAttention(Attention):
    """Softmax attention through PyTorch's scaled_dot_product_attention."""

    kind = "softmax"
    follows: ClassVar[tuple[str, ...]] = ("gain",)

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if self.feature_map != "identity" and not isinstance(self, MappedSoftmaxAttention):
            raise ValueError(
                f"feature_map={self.feature_map!r}: {type(self).__name__} has none. "
                f"MappedSoftmaxAttention ({MappedSoftmaxAttention.kind!r}) applies one to q and k before the softmax"
            )

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        return self.softmax_rows(q, k, v, mask=None if token_mask is None else token_mask[:, None, None, :])

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        rows: slice = slice(None),
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        options: dict[str, Any] = dict(kind="softmax", feature_map=self.feature_map, scale=self.scale)
        return attention_matrix(q[:, rows], k, pair_mask=mask, bias=bias, **options)

    def softmax_rows(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None) -> Tensor:
        """Softmax attention of rows (B, N, heads, d) → the same; mask broadcasts to (B, heads, Nq, N)"""
        phi = get_feature_map(self.feature_map).apply
        q, k, v = (x.transpose(1, 2) for x in (phi(q), phi(k), v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).transpose(1, 2)
        if is_exporting():
            # Its strides depend on the kernel that PyTorch picks. An exported graph must not depend on them.
            out = out.clone(memory_format=torch.contiguous_format)
        return out


@register_attention
class MappedSoftmaxAttention(SoftmaxAttention):
    """Softmax attention with φ applied to q and k before it. The default, ReLU, makes it non-injective."""

    kind = "mapped_softmax"
    follows = ("feature_map", "gain")

    def __init__(self, dim: int, num_heads: int, *, feature_map: str = "relu", **kwargs: Any) -> None:
        super().__init__(dim, num_heads, feature_map=feature_map, **kwargs)


@register_attention
class LocalSoftmaxAttention(SoftmaxAttention):
    """Softmax attention with InLine's local residual, for comparisons with the same parts."""

    kind = "local_softmax"
    follows = ("local_residual", "gain")

    def __init__(self, dim: int, num_heads: int, *, local_residual: bool = True, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, local_residual=local_residual, **kwargs)
