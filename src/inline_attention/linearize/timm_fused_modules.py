"""The attention modules of timm that call `scaled_dot_product_attention`.

They keep their own `forward`. The linear form replaces only that call, so what surrounds it, such as pooled queries,
gates and partitions, stays timm's.
"""

from collections.abc import Callable
from math import isqrt
from typing import Any, ClassVar

import timm.layers
from timm.models import (
    beit,
    davit,
    fastvit,
    hiera,
    hieradet_sam2,
    maxxvit,
    metaformer,
    nest,
    nextvit,
    tiny_vit,
    twins,
    visformer,
    vision_transformer,
    vision_transformer_relpos,
    volo,
)
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from inline_attention.layers.token_grid import GridSource, find_patches, token_mask_of
from inline_attention.ops import Grid

from .modules import LinearizedAttention, register
from .timm_modules import NoMap, WholeHeads, Window


class _ReplacedSoftmax(TorchFunctionMode):
    """Inside, `replacement` is called in the place of `scaled_dot_product_attention`."""

    def __init__(self, replacement: Callable[..., Tensor]) -> None:
        super().__init__()
        self.replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.replacement if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


class FusedAttention(LinearizedAttention):
    """The base of modules that call `scaled_dot_product_attention` once, with heads (B, heads, …, N, d)."""

    gets_grid = True
    is_written_out = False
    heads_dim: ClassVar[int] = 1

    def token_map(self: Any, x: Tensor, *args: Any) -> Grid | None:
        """The (height, width) of the tokens of one call, from the arguments of `forward`."""
        return None

    def converted(self: Any) -> None:
        vars(self).update(softmax_fused=self.fused_attn, fused_attn=True)  # timm declares it final

    def restored(self: Any) -> None:
        vars(self).update(fused_attn=vars(self).pop("softmax_fused"))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        grid = self.token_map(*args)

        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return self.attend_heads(q, k, v, grid, **options)

        with _ReplacedSoftmax(attend):
            return super().forward(*args, **kwargs)

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid | None,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """What `scaled_dot_product_attention` returns, in the linear form and without dropout."""
        q, k, v = (x.movedim(self.heads_dim, -3) for x in (q, k, v))
        k, v = (x.expand(*q.shape[:-2], *x.shape[-2:]) for x in (k, v))  # heads may share their keys
        rows = [x.to(v.dtype).flatten(0, -4).transpose(1, 2).unsqueeze(2) for x in (q, k, v)]
        bias = None
        if self.has_bias and attn_mask is not None:
            bias, attn_mask = attn_mask.reshape(attn_mask.shape[-3:]), None
        token_mask = token_mask_of(attn_mask, is_causal, rows[1])
        out = self.attend_linearly(
            *rows,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            grid=grid,
            token_mask=token_mask,
            query_mask=token_mask,
            bias=bias,
        )
        return out.transpose(1, 2).unflatten(0, q.shape[:-3]).movedim(-3, self.heads_dim)


class MapAttention(FusedAttention):
    """Of maps (B, C, height, width)."""

    def token_map(self, x: Tensor, *args: Any) -> Grid:
        return x.shape[2], x.shape[3]


class LastChannelAttention(FusedAttention):
    """Of maps (B, height, width, C)."""

    def token_map(self, x: Tensor, *args: Any) -> Grid:
        return x.shape[1], x.shape[2]


class PatchAttention(FusedAttention):
    """Of tokens (B, N, C). The patch embedding knows their map."""

    gets_grid = False

    @classmethod
    def grid_source(cls, ancestor: Any) -> GridSource | None:
        return find_patches(ancestor)


class MaxxVitAttention(LinearizedAttention):
    """The position bias is that of a window in MaxViT, and of the whole map in CoAtNet."""

    has_bias = True

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        return module.num_heads, module.dim_head

    @classmethod
    def num_tokens(cls, module: Any) -> int | None:
        return getattr(module.rel_pos, "window_area", None)


@register(maxxvit.AttentionCl)
class LinearizedMaxxVitAttention(MaxxVitAttention, LastChannelAttention, maxxvit.AttentionCl):
    """The windows and grids of MaxViT."""


@register(maxxvit.Attention2d)
class LinearizedMaxxVitAttention2d(MaxxVitAttention, MapAttention, maxxvit.Attention2d):
    """The attention of CoAtNet."""


@register(vision_transformer_relpos.RelPosAttention)
class LinearizedRelPosAttention(PatchAttention, vision_transformer_relpos.RelPosAttention):
    """The attention of ViTs with a bias of relative positions."""

    has_bias = True


@register(beit.Attention)
class LinearizedBeitAttention(WholeHeads, PatchAttention, beit.Attention):
    """The attention of BEiT."""

    has_bias = True


@register(vision_transformer.ParallelScalingBlock)
class LinearizedParallelBlock(PatchAttention, vision_transformer.ParallelScalingBlock):
    """A block that computes attention and MLP side by side."""


@register(volo.Attention)
class LinearizedVoloAttention(WholeHeads, LastChannelAttention, volo.Attention):
    """The attention of VOLO's later stages."""


@register(fastvit.Attention)
class LinearizedFastVitAttention(MapAttention, fastvit.Attention):
    """The attention of FastViT."""


@register(visformer.Attention)
class LinearizedVisformerAttention(MapAttention, visformer.Attention):
    """The attention of Visformer."""


@register(metaformer.Attention)
class LinearizedMetaFormerAttention(NoMap, FusedAttention, metaformer.Attention):
    """The attention of CAFormer."""


@register(davit.WindowAttention)
class LinearizedDaVitAttention(Window, WholeHeads, FusedAttention, davit.WindowAttention):
    """The windows of DaViT."""

    def token_map(self, x: Tensor, *args: Any) -> Grid:
        return self.window_size


@register(nest.Attention)
class LinearizedNestAttention(WholeHeads, FusedAttention, nest.Attention):
    """The square blocks of NesT."""

    def token_map(self, x: Tensor, *args: Any) -> Grid:
        side = isqrt(x.shape[2])
        return side, side


@register(tiny_vit.Attention)
class LinearizedTinyVitAttention(FusedAttention, tiny_vit.Attention):
    """The windows of TinyViT."""

    has_bias = True

    def token_map(self, x: Tensor, *args: Any) -> Grid:
        return self.resolution

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        return module.num_heads, module.val_dim

    @classmethod
    def num_tokens(cls, module: Any) -> int:
        return module.resolution[0] * module.resolution[1]


@register(hiera.MaskUnitAttention)
class LinearizedMaskUnitAttention(NoMap, FusedAttention, hiera.MaskUnitAttention):
    """The attention of Hiera, of mask units or of all tokens. Queries may be pooled."""

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:  # type: ignore[override]  # timm's is a number
        return module.heads, module.head_dim

    @classmethod
    def num_tokens(cls, module: Any) -> int | None:
        return module.q_stride * module.window_size if module.use_mask_unit_attn else None


@register(hieradet_sam2.MultiScaleAttention)
class LinearizedSam2Attention(WholeHeads, LastChannelAttention, hieradet_sam2.MultiScaleAttention):
    """The attention of SAM 2, in windows and of the whole map. Queries may be pooled."""

    @classmethod
    def has_map(cls, module: Any) -> bool:
        return module.q_pool is None


@register(timm.layers.MultiQueryAttention2d)
class LinearizedMultiQueryAttention(MapAttention, timm.layers.MultiQueryAttention2d):
    """The attention of MobileNetV4. Its heads share keys and values, which may be of a reduced map."""

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        return module.num_heads, module.value_dim

    @classmethod
    def has_map(cls, module: Any) -> bool:
        return module.kv_stride == 1 and not module.has_query_strides


@register(twins.LocallyGroupedAttn)
class LinearizedGroupedAttention(WholeHeads, FusedAttention, twins.LocallyGroupedAttn):
    """The windows of Twins."""

    heads_dim = 2

    def token_map(self, x: Tensor, *args: Any) -> Grid:
        return self.ws, self.ws

    @classmethod
    def num_tokens(cls, module: Any) -> int:
        return module.ws**2


@register(twins.GlobalSubSampleAttn)
class LinearizedSubsampledAttention(WholeHeads, FusedAttention, twins.GlobalSubSampleAttn):
    """The attention of Twins with keys of a reduced map."""

    def token_map(self, x: Tensor, *args: Any) -> Grid:
        return args[0]

    @classmethod
    def has_map(cls, module: Any) -> bool:
        return module.sr is None


@register(nextvit.EfficientAttention)
class LinearizedNextVitAttention(NoMap, FusedAttention, nextvit.EfficientAttention):
    """The attention of Next-ViT, with averaged keys."""
