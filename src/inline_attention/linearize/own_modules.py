"""The softmax attentions of this library: plain, in windows with a position bias, in stripes, with reduced keys."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from inline_attention.layers import Attention, LocalSoftmaxAttention, MappedSoftmaxAttention, SoftmaxAttention
from inline_attention.models import cswin, pvt, swin
from inline_attention.ops import Grid
from inline_attention.ops.feature_maps import get_feature_map
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import zero_absent

from .modules import LEFT_ALONE, Call, LinearizedAttention, number_regions, register

LEFT_ALONE.update({Attention: "left alone: it is not softmax attention", SoftmaxAttention: None})


class OwnAttention(LinearizedAttention):
    """The base of this library's attentions. If a module has a φ, it is applied to queries and keys first."""

    gets_grid = True

    @classmethod
    def maps(cls, module: Any, *args: Any) -> tuple[Grid, Grid] | None:
        return (args[1], args[1]) if len(args) > 1 else None

    def mapped(self: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        phi = get_feature_map(self.feature_map).apply
        return tuple(rows.unsqueeze(2) for rows in (phi(q), phi(k), v))

    def softmax_rows(self: Any, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None) -> Tensor:
        """Overrides the method that all softmax attentions of this library call. The mask is over keys."""
        token_mask = None if mask is None else mask[:, 0, 0]
        return self.compute(Call(self.mapped(q, k, v), self.scale, token_mask=token_mask))


class PlainAttention(OwnAttention):
    def attend(
        self: Any,
        projections: Sequence[Tensor],
        *,
        grid: Grid,
        token_mask: Tensor | None,
        local_weight: Tensor | None,
    ) -> Tensor:
        if self.feature_map != "identity":
            projections = self.mapped(*unstack(projections))
        return self.compute(
            Call(
                projections,
                self.scale,
                local_weight=local_weight,
                grid=grid,
                num_prefix_tokens=self.num_prefix_tokens,
                token_mask=token_mask,
                query_mask=token_mask,
            )
        )


@register(SoftmaxAttention)
class LinearizedSoftmaxAttention(PlainAttention, SoftmaxAttention):
    """DeiT's softmax attention."""


@register(MappedSoftmaxAttention)
class LinearizedMappedSoftmaxAttention(PlainAttention, MappedSoftmaxAttention):
    """DeiT's softmax attention with φ."""


@register(LocalSoftmaxAttention)
class LinearizedLocalSoftmaxAttention(PlainAttention, LocalSoftmaxAttention):
    """Softmax attention with a local residual, which is kept as it is."""


class ReducedAttention(OwnAttention):
    """Keys from a reduced map. They are not the queries' tokens, so there is no local residual."""

    @classmethod
    def has_map(cls, module: Any) -> bool:
        return module.reduction == 1

    @classmethod
    def maps(cls, module: Any, *args: Any) -> tuple[Grid, Grid] | None:
        if len(args) < 2:
            return None
        height, width = args[1]
        return args[1], (height // module.reduction, width // module.reduction)


class StripeAttention(OwnAttention):
    """Stripes, which have a positional convolution of v and get no other residual.

    Each direction is a call with half of the heads.
    """

    @classmethod
    def num_gains(cls, module: Any) -> int:
        return module.num_heads // len(module.positions)  # a head of each direction shares one

    @classmethod
    def has_map(cls, module: nn.Module) -> bool:
        return False


@register(pvt.ReducedSoftmaxAttention)
class LinearizedReducedSoftmaxAttention(ReducedAttention, pvt.ReducedSoftmaxAttention):
    """PVT's softmax attention with reduced keys."""


@register(pvt.MappedReducedSoftmaxAttention)
class LinearizedMappedReducedSoftmaxAttention(ReducedAttention, pvt.MappedReducedSoftmaxAttention):
    """PVT's softmax attention with reduced keys and φ."""


@register(cswin.StripeAttention)
class LinearizedStripeAttention(StripeAttention, cswin.StripeAttention):
    """CSwin's softmax attention in stripes."""


@register(cswin.MappedStripeAttention)
class LinearizedMappedStripeAttention(StripeAttention, cswin.MappedStripeAttention):
    """CSwin's softmax attention in stripes, with φ."""


class WindowAttention(OwnAttention):
    """Windows. Their bias of relative positions is kept to first order."""

    has_bias = True

    @classmethod
    def num_tokens(cls, module: Any) -> int:
        return module.window[0] * module.window[1]

    def forward(
        self: Any,
        x: Tensor,
        grid: Grid,
        *,
        token_mean: Tensor | None = None,
        token_mask: Tensor | None = None,
        regions: Tensor | None = None,
    ) -> Tensor:
        x = zero_absent(x, token_mask)
        projections = self.project(x, grid)
        if self.feature_map != "identity":
            projections = self.mapped(*unstack(projections))
        out = self.attend_linearly(
            *projections,
            scale=self.scale,
            x=x,
            grid=grid,
            token_mask=token_mask,
            query_mask=token_mask,
            bias=self.position_bias(grid),
            regions=None if regions is None else number_regions(regions[:, :, None] == regions[:, None, :]),
        )
        return self.merge(out)


@register(swin.WindowSoftmaxAttention)
class LinearizedWindowSoftmaxAttention(WindowAttention, swin.WindowSoftmaxAttention):  # type: ignore[misc]
    """Swin's softmax attention in windows."""


@register(swin.MappedWindowSoftmaxAttention)
class LinearizedMappedWindowSoftmaxAttention(WindowAttention, swin.MappedWindowSoftmaxAttention):  # type: ignore[misc]
    """Swin's softmax attention in windows, with φ."""
