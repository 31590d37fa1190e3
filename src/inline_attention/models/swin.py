"""Swin with InLine, linear or softmax attention.

InLine attention: "Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590.
Swin: "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", ICCV 2021, arXiv 2103.14030.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models import register_model
from torch import Tensor, nn

from inline_attention.layers import Attention, Block, MappedSoftmaxAttention, PatchEmbed, SoftmaxAttention
from inline_attention.layers.embed import resize_map, with_value
from inline_attention.layers.padding import Padding
from inline_attention.layers.registry import AttentionSpec, build_attention, check_choices, parse_attention
from inline_attention.layers.windows import (
    WindowPlan,
    ceil_div,
    keys_to_attend,
    pad_to_multiple,
    to_windows,
    window_regions,
)
from inline_attention.layers.written_out import WrittenOut, samples_of
from inline_attention.ops import Grid
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import zero_absent

from .base import (
    PyramidModel,
    Stage,
    StateDict,
    adapt_attention,
    check_positive,
    check_stages,
    drop_path_rates,
    to_pair,
)
from .published import PUBLISHED, Published, share_link
from .registry import build, register_family

# Added to the score of two tokens that share a window only because of the cyclic shift.
OTHER_REGION = -100.0
PUBLISHED_WINDOW = 7  # the side of softmax attention's windows


class WindowSoftmaxAttention(SoftmaxAttention):
    """Softmax attention inside windows, with a learned bias for every relative position.

    Args:
        window: the largest window. The table has a row for every offset in it; smaller windows use its middle rows.
    """

    def __init__(self, dim: int, num_heads: int, *, window: Grid, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.window = window
        self.relative_position_bias_table = nn.Parameter(torch.empty(offsets(window), num_heads))

    def set_window(self, window: Grid) -> None:
        table = self.relative_position_bias_table
        self.relative_position_bias_table = with_value(table, resize_table(table, self.window, window))
        self.window = window

    def position_bias(self, window: Grid) -> Tensor:
        """The bias of every pair of tokens of a window → (heads, N, N)"""
        table = self.relative_position_bias_table
        rows, columns = (
            torch.arange(n, device=table.device)[:, None] - torch.arange(n, device=table.device) + most - 1
            for n, most in zip(window, self.window, strict=True)
        )
        index = rows[:, None, :, None] * (2 * self.window[1] - 1) + columns[None, :, None, :]
        return table[index.flatten(2).flatten(0, 1)].permute(2, 0, 1)

    def forward(  # type: ignore[override]  # a window is no layer of timm's models
        self,
        x: Tensor,
        grid: Grid,
        *,
        token_mean: Tensor | None = None,
        token_mask: Tensor | None = None,
        regions: Tensor | None = None,
    ) -> Tensor:
        """Windows x (B·windows, N, C); regions (B·windows, N): different ones do not attend to each other."""
        q, k, v = unstack(self.project(zero_absent(x, token_mask), grid))
        mask = self.score_bias(grid, regions)
        if token_mask is not None:
            mask = mask.masked_fill(~keys_to_attend(token_mask)[:, None, None, :], -torch.inf)
        out = self.softmax_rows(q, k, v, mask=mask.to(q.dtype))
        return self.merge(out)

    def score_bias(self, window: Grid, regions: Tensor | None) -> Tensor:
        """The term that is added to the scores of each pair of tokens → (B·windows or 1, heads, N, N)"""
        bias = self.position_bias(window)[None]
        if regions is None:
            return bias
        return bias + OTHER_REGION * (regions[:, None, :, None] != regions[:, None, None, :])

    def write_out(self, x: Tensor, grid: Grid, *, regions: Tensor | None = None, **options: Any) -> WrittenOut:
        found = super().write_out(x, grid, **options)
        bias = self.score_bias(grid, regions)

        def matrix(rows: slice, samples: slice, heads: slice, mask: Tensor | None) -> Tensor:
            q, k = (y[samples, :, heads] for y in (found.q, found.k))
            return self.weights(q, k, rows=rows, mask=mask, bias=samples_of(bias, samples)[:, heads, rows])

        return replace(found, matrix=matrix)


class MappedWindowSoftmaxAttention(MappedSoftmaxAttention, WindowSoftmaxAttention):
    """The same with φ applied to q and k before the softmax."""


# Softmax attention of this family, by the names that models take.
SOFTMAX: dict[str, type[Attention]] = {cls.kind: cls for cls in (WindowSoftmaxAttention, MappedWindowSoftmaxAttention)}


def offsets(window: Grid) -> int:
    """The number of different offsets between two tokens of a window."""
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def resize_table(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resizes a bias table (offsets, heads) from one window to another."""
    if old == new:
        return table
    (oh, ow), (nh, nw) = old, new
    grid = table.unflatten(0, (2 * oh - 1, 2 * ow - 1))[None]
    return resize_map(grid, (2 * nh - 1, 2 * nw - 1), mode="bicubic")[0].flatten(0, 1)


class SwinBlock(Block):
    """A block that attends inside windows, odd ones shifted.

    Args:
        window: (height, width), or None for the whole map.
        shifted: shift windows that are smaller than the map by half of their side.
    """

    def __init__(self, dim: int, attn: Attention, *, window: Grid | None, shifted: bool, **kwargs: Any) -> None:
        super().__init__(dim, attn, **kwargs)
        self.window = window
        self.shifted = shifted

    def window_plan(self, grid: Grid) -> WindowPlan:
        return WindowPlan.fit(grid, self.window, shifted=self.shifted)

    def attention_branch(self, x: Tensor, grid: Grid, padding: Padding | None = None, **options: Any) -> Tensor:
        plan = self.window_plan(grid)
        windows = to_windows(self.norm1(x).unflatten(1, grid), plan, padding)
        sizes = None if padding is None else padding.sizes
        # Linear attention sums over a whole window and cannot separate regions. The published models do not either.
        if plan.shift != (0, 0) and isinstance(self.attn, WindowSoftmaxAttention):
            regions = window_regions(plan, x.device, sizes)
            options["regions"] = regions if sizes is not None else regions.repeat(x.shape[0], 1)
        out = self.attn(windows.tokens, plan.window, token_mask=windows.token_mask, **options)
        return plan.merge(out, batch=x.shape[0], sizes=sizes).flatten(1, 2)


@register_notrace_module
class PatchMerging(nn.Module):
    """Concatenates four neighbours, norms and projects: (B, H, W, C) → (B, ceil(H/2), ceil(W/2), 2C)"""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=1e-5)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (ceil_div(size, 2) for size in x.shape[1:3])
        x = pad_to_multiple(x, (2, 2)).reshape(x.shape[0], rows, 2, columns, 2, x.shape[3])
        # The order of the official checkpoints: the column offset varies slowest.
        return self.reduction(self.norm(x.permute(0, 1, 3, 4, 2, 5).flatten(3)))


class Swin(PyramidModel):
    """A pyramid of four stages that attend in windows, or over the whole map if the cost is linear.

    Args:
        img_size: input size, an int or (height, width). Other sizes run too: windows are clipped or padded.
        in_chans: channels of the image.
        num_classes: classes; 0 for none.
        global_pool: "avg" or "" (the map).
        embed_dim: channels of the first stage; they double from stage to stage.
        depths: blocks, by stage.
        num_heads: heads, by stage.
        mlp_ratio: hidden channels of every block's MLP, as a multiple of its channels.
        attention: the attention of each stage; see `parse_attention`.
        feature_map: φ of InLine and linear attention; None for the default of each.
        local_residual: the 3×3 residual of InLine and linear attention; None for the default of each.
        gain: a learned factor of the queries of each head, from 1 or from this number; see `Attention`. The published
            models have none.
        rope: rotary positions of queries and keys, in the attentions that have them; see `OneCallAttention`.
        anchors: of tangent attention; None for one.
        window_size: the window of all attentions but softmax; None for the whole map at every input size.
        softmax_window_size: the window of softmax attention. Default: max(7, window_size // 8), or 7 without one.
        drop_rate: dropout before the head.
        proj_drop_rate: dropout after projections.
        drop_path_rate: stochastic depth of the last block. It grows linearly from 0 in the first.
    """

    checkpoint_names = r"layers\.0\.blocks\.0\.|stages\.1\.downsample\.reduction\."
    norm_eps = 1e-5

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        mlp_ratio: float = 4.0,
        attention: AttentionSpec = "IIIS",
        feature_map: str | None = None,
        local_residual: bool | None = None,
        gain: bool | float = False,
        rope: bool = False,
        anchors: int | None = None,
        window_size: int | Sequence[int] | None = None,
        softmax_window_size: int | Sequence[int] | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        check_positive(embed_dim=embed_dim, mlp_ratio=mlp_ratio)
        check_stages(depths, num_heads=num_heads)
        dims = [embed_dim * 2**i for i in range(len(depths))]
        super().__init__(dims, img_size=img_size, in_chans=in_chans, global_pool=global_pool)
        window = None if window_size is None else to_pair(window_size, name="window_size")
        if softmax_window_size is not None:
            self.softmax_window = to_pair(softmax_window_size, name="softmax_window_size")
        else:
            side = max(PUBLISHED_WINDOW, min(window) // 8) if window else PUBLISHED_WINDOW
            self.softmax_window = (side, side)

        norm = nn.LayerNorm(embed_dim, eps=self.norm_eps)
        self.patch_embed = PatchEmbed(4, in_chans, embed_dim, norm=norm)
        self.attention = parse_attention(attention, depths)
        check_choices(self.attention, rope=rope, anchors=anchors)
        is_all_softmax = all(name in SOFTMAX for stage in self.attention for name in stage)
        if is_all_softmax and window and softmax_window_size is None and min(window) // 8 < PUBLISHED_WINDOW:
            raise ValueError(
                f"window_size={window_size} has no effect, because every block attends with softmax; "
                f"set softmax_window_size={window_size} instead"
            )
        choices: dict[str, Any] = dict(
            feature_map=feature_map,
            local_residual=local_residual,
            gain=gain,
            rope=rope,
            anchors=anchors,
            proj_drop=proj_drop_rate,
            own=SOFTMAX,
        )
        rates = drop_path_rates(drop_path_rate, depths)
        self.stages = nn.ModuleList()
        for i, dim in enumerate(dims):
            softmax_window = self._clipped_softmax_window(i)
            blocks = []
            for j, (name, rate) in enumerate(zip(self.attention[i], rates[i], strict=True)):
                is_softmax = name in SOFTMAX
                own = dict(window=softmax_window) if is_softmax else dict(grid=self._attended_grid(i, window))
                options: dict[str, Any] = {**choices, **own}
                blocks.append(
                    SwinBlock(
                        dim,
                        build_attention(name, dim, num_heads[i], **options),
                        window=softmax_window if is_softmax else window,
                        shifted=j % 2 == 1,
                        mlp_ratio=mlp_ratio,
                        norm_eps=self.norm_eps,
                        proj_drop=proj_drop_rate,
                        drop_path=rate,
                    )
                )
            self.stages.append(Stage(PatchMerging(dims[i - 1]) if i else nn.Identity(), blocks))
        self.norm = nn.LayerNorm(self.num_features, eps=self.norm_eps)
        self.build_head(num_classes, drop_rate)
        self.init_weights()

    def _clipped_softmax_window(self, stage: int) -> Grid:
        """The softmax window, clipped to the map at the model's input size."""
        rows, columns = self.stage_grid(stage)
        return min(self.softmax_window[0], rows), min(self.softmax_window[1], columns)

    def _attended_grid(self, stage: int, window: Grid | None) -> Grid:
        """The size of one window at the model's input size."""
        return WindowPlan.fit(self.stage_grid(stage), window, shifted=False).window

    def no_weight_decay(self) -> set[str]:
        return {n for n, _ in self.named_parameters() if n.endswith("relative_position_bias_table")}

    def minimum_size(self) -> int:
        """A map with more than one window on each side is cut and padded; a smaller one is a single window."""
        blocks = self.modules_by_stage(SwinBlock)
        sides = [max(block.window) * 4 * 2**stage + 1 for stage, block in blocks if block.window is not None]
        return max([super().minimum_size(), *sides])

    def set_input_size(self, img_size: int | Sequence[int]) -> None:
        """Fits softmax windows, bias tables and learned positions to another size. All sizes run without it, too."""
        self.img_size = to_pair(img_size)
        for stage, block in self.modules_by_stage(SwinBlock):
            if isinstance(block.attn, WindowSoftmaxAttention):
                block.window = self._clipped_softmax_window(stage)
                block.attn.set_window(block.window)
            else:
                block.attn.set_grid(self._attended_grid(stage, block.window))

    def adapt_state_dict(self, state_dict: Mapping[str, Tensor], *, img_size: Grid | None = None) -> StateDict:
        modules = dict(self.named_modules())
        own = self.state_dict(keep_vars=True)
        # A downsampling ends a stage of the official models, and begins one of ours and of timm's.
        shift = int(any(name.startswith("layers.0.downsample.") for name in state_dict))
        out = {}
        for name, value in state_dict.items():
            if name.endswith(("relative_position_index", "attn_mask")):
                continue  # computed from the size of the map
            name = re.sub(r"^layers\.(\d+)\.downsample\.", lambda m: f"stages.{int(m[1]) + shift}.downsample.", name)
            name = re.sub(r"^layers\.", "stages.", name)
            name = re.sub(r"^head\.fc\.", "head.", name)  # timm's
            name, value = adapt_attention(name, value, own)
            if name.endswith(".relative_position_bias_table"):
                attn = modules.get(name.rpartition(".")[0])
                if isinstance(attn, WindowSoftmaxAttention) and value.shape[0] != offsets(attn.window):
                    value = resize_table(value, square_window(name, value), attn.window)
            out[name] = value
        return out


def square_window(name: str, table: Tensor) -> Grid:
    """The window of a bias table (offsets, heads). Published windows are square."""
    for side in range(1, 129):
        if offsets((side, side)) == table.shape[0]:
            return side, side
    raise ValueError(
        f"{name} has {table.shape[0]} rows, not the (2w − 1)² of a square window; build the model with the img_size "
        "and softmax_window_size of these weights, load, then call set_input_size"
    )


PUBLISHED |= {
    "inline_swin_tiny": Published(82.4, share_link("32810869fcc34410966b")),
    "inline_swin_small": Published(83.6, share_link("e9657fd247c04c7cb1a1")),
    "inline_swin_base": Published(84.1, share_link("bf23564bb64c420aafe1")),
    "inline_swin_base_384": Published(),
    "softmax_swin_tiny": Published(81.3),
    "softmax_swin_small": Published(83.0),
    "softmax_swin_base": Published(83.5),
}

default_cfgs = register_family(
    Swin,
    *(f"{kind}_swin_{size}" for kind in ("inline", "softmax") for size in ("tiny", "small", "base")),
    "inline_swin_base_384",
)

_TINY = dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
_SMALL = dict(embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24))
_BASE = dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32))
_BASE_ATTENTION = ("inline", "inline", "inline:2", "softmax")


@register_model
def inline_swin_tiny(pretrained: bool = False, **kwargs: Any) -> Swin:
    """InLine-Swin-T."""
    return build(Swin, "inline_swin_tiny", pretrained, kwargs, attention="IIIS", **_TINY)


@register_model
def inline_swin_small(pretrained: bool = False, **kwargs: Any) -> Swin:
    """InLine-Swin-S."""
    return build(Swin, "inline_swin_small", pretrained, kwargs, attention="IISS", **_SMALL)


@register_model
def inline_swin_base(pretrained: bool = False, **kwargs: Any) -> Swin:
    """InLine-Swin-B."""
    return build(Swin, "inline_swin_base", pretrained, kwargs, attention=_BASE_ATTENTION, **_BASE)


@register_model
def inline_swin_base_384(pretrained: bool = False, **kwargs: Any) -> Swin:
    """InLine-Swin-B at 384, softmax windows of 12."""
    return build(
        Swin, "inline_swin_base_384", pretrained, kwargs, attention=_BASE_ATTENTION, softmax_window_size=12, **_BASE
    )


@register_model
def softmax_swin_tiny(pretrained: bool = False, **kwargs: Any) -> Swin:
    """Swin-T, the softmax baseline."""
    return build(Swin, "softmax_swin_tiny", pretrained, kwargs, attention="softmax", **_TINY)


@register_model
def softmax_swin_small(pretrained: bool = False, **kwargs: Any) -> Swin:
    """Swin-S, the softmax baseline."""
    return build(Swin, "softmax_swin_small", pretrained, kwargs, attention="softmax", **_SMALL)


@register_model
def softmax_swin_base(pretrained: bool = False, **kwargs: Any) -> Swin:
    """Swin-B, the softmax baseline."""
    return build(Swin, "softmax_swin_base", pretrained, kwargs, attention="softmax", **_BASE)
