"""The attention of torchvision's vision transformer: PyTorch's `nn.MultiheadAttention` inside its blocks."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from inline_attention.layers.token_grid import GridSource
from inline_attention.ops import Grid

from .modules import LinearizedAttention, register


def measure_output(conv: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Tensor) -> Grid:
    """The size of a convolution's output, (B, C, height, width)"""
    return output.shape[-2], output.shape[-1]


@register(nn.MultiheadAttention)
class LinearizedMultiheadAttention(LinearizedAttention, nn.MultiheadAttention):
    """Self-attention of torchvision's ViT. In other models it may be cross-attention or causal, and is refused."""

    @classmethod
    def why_not(cls, module: Any, parent: nn.Module) -> str | None:
        if not isinstance(parent, EncoderBlock):
            return f"inside {type(parent).__name__}, nn.MultiheadAttention may be masked or attend to other tokens"
        return None

    @classmethod
    def grid_source(cls, ancestor: Any) -> GridSource | None:
        if not isinstance(ancestor, VisionTransformer):
            return None
        return GridSource(ancestor.conv_proj, measure_output, 1, ancestor.seq_length)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        if query is not key or key is not value or options.get("need_weights", True):
            raise ValueError("a linearised attention attends to its own tokens alone and returns no weights")
        masks = [name for name in ("key_padding_mask", "attn_mask") if options.get(name) is not None]
        if masks:
            raise ValueError(f"a linearised attention takes no {masks[0]} here")
        qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        out = self.attend_linearly(
            qkv.unflatten(-1, (3, self.num_heads, self.head_dim)), scale=self.head_dim**-0.5, x=query
        )
        return self.out_proj(out.flatten(2)), None
