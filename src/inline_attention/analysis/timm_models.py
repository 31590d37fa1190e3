"""Softmax attention of timm's vision transformers and Swins, written out as this library's attentions are."""

from typing import Any

import timm.layers
import timm.models
from timm.models import swin_transformer
from torch import Tensor, nn

from inline_attention.layers import SoftmaxAttention
from inline_attention.layers.windows import WindowPlan, ceil_div
from inline_attention.layers.written_out import WrittenOut, samples_of
from inline_attention.ops import Grid, attention_matrix

ATTENTIONS = (timm.layers.Attention, swin_transformer.WindowAttention)
WINDOWED_BLOCK = swin_transformer.SwinTransformerBlock


class VitMap:
    """The token map of a vision transformer. timm's attention modules do not get it."""

    grid: Grid | None = None
    num_prefix_tokens: int = 0

    def read(self, model: nn.Module, images: Tensor) -> None:
        if isinstance(model, timm.models.VisionTransformer):
            self.grid = model.patch_embed.dynamic_feat_size((images.shape[2], images.shape[3]))
            self.num_prefix_tokens = model.num_prefix_tokens

    @property
    def token_map(self) -> tuple[Grid, int] | None:
        return None if self.grid is None else (self.grid, self.num_prefix_tokens)


def window_plan(block: Any, x: Tensor) -> WindowPlan:
    """How a Swin block cuts its map (B, H, W, C)."""
    size, window = (x.shape[1], x.shape[2]), (block.window_size[0], block.window_size[1])
    counts = (ceil_div(size[0], window[0]), ceil_div(size[1], window[1]))
    plan = WindowPlan(size, window, counts, shift=(block.shift_size[0], block.shift_size[1]))
    if plan.padding() != (0, 0):
        raise ValueError(
            f"windows of {window[0]}×{window[1]} do not divide the map of {size[0]}×{size[1]}, which timm "
            "pads with tokens of its own; choose an image size that they divide"
        )
    return plan


def write_out(
    module: Any, x: Tensor, *args: Any, name: str, vit_map: VitMap, plan: WindowPlan | None, **kwargs: Any
) -> WrittenOut:
    """A call of one of ATTENTIONS; `name` is for errors."""
    if type(module) not in ATTENTIONS:  # a subclass may compute anything
        raise ValueError(
            f"{name} is a {type(module).__name__}, whose matrix is not known here; analyse the original model"
        )
    if isinstance(module, swin_transformer.WindowAttention):
        assert plan is not None
        return _write_out_window(module, x, *args, grid=plan.window, **kwargs)
    return _write_out_vit(module, x, *args, name=name, vit_map=vit_map, **kwargs)


def _write_out_vit(
    module: timm.layers.Attention,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    name: str,
    vit_map: VitMap,
) -> WrittenOut:
    if vit_map.grid is None or getattr(module, "gate", None) is not None or is_causal or attn_mask is not None:
        raise ValueError(f"{name} is gated, masked or not in a VisionTransformer of timm, which is not supported")
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, module.head_dim)).unbind(2)
    q, k = module.q_norm(q), module.k_norm(k)

    def matrix(rows: slice, samples: slice, heads: slice, mask: Tensor | None) -> Tensor:
        return _softmax(module, q[samples, rows, heads], k[samples, :, heads], mask)

    return WrittenOut(
        kind=SoftmaxAttention.kind,
        grid=vit_map.grid,
        num_prefix_tokens=vit_map.num_prefix_tokens,
        q=q,
        k=k,
        v=v,
        matrix=matrix,
        finish=lambda attended, local: module.proj(module.norm(attended.flatten(2))),
    )


def _write_out_window(
    module: swin_transformer.WindowAttention, x: Tensor, mask: Tensor | None = None, *, grid: Grid
) -> WrittenOut:
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).unbind(2)
    bias = module._get_rel_pos_bias()
    if mask is not None:
        bias = bias + mask.repeat(x.shape[0] // len(mask), 1, 1)[:, None]

    def matrix(rows: slice, samples: slice, heads: slice, seen: Tensor | None) -> Tensor:
        own = samples_of(bias, samples)[:, heads, rows]
        return _softmax(module, q[samples, rows, heads], k[samples, :, heads], seen, bias=own)

    return WrittenOut(
        kind=SoftmaxAttention.kind,
        grid=grid,
        num_prefix_tokens=0,
        q=q,
        k=k,
        v=v,
        matrix=matrix,
        finish=lambda attended, local: module.proj(attended.flatten(2)),
    )


def _softmax(module: Any, q: Tensor, k: Tensor, mask: Tensor | None, *, bias: Tensor | None = None) -> Tensor:
    return attention_matrix(q, k, kind="softmax", scale=module.scale, pair_mask=mask, bias=bias)
