"""How an attention inside another library's model learns the size of the token map, and which tokens are present.

timm's blocks pass tokens (B, N, C) and no size, and N does not determine it. The patch embedding knows it in every
call. So a hook there remembers it, and the attentions of the model read it.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from inline_attention.ops import Grid


class TokenGrid:
    """The token map of a model in the current call: a forward hook of its patch embedding, with keyword arguments.

    The attention modules of one model share it. It is an object, not a closure, so that a deep copy of the model gets a
    grid of its own. It refers to no module, so that a deep copy of one block does not copy the whole model.

    `grid` is a (height, width), or a list of one for every image of a NaFlexVit that gets patches.
    """

    def __init__(self, measure: Callable[..., Grid | list[Grid] | None], num_prefix_tokens: int) -> None:
        self.measure = measure
        self.num_prefix_tokens = num_prefix_tokens
        self.grid: Grid | list[Grid] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.grid = self.measure(module, args, kwargs, output)


class GridSource(NamedTuple):
    """Where a model's token map comes from."""

    module: nn.Module  # the patch embedding
    # (patch embedding, its arguments, its keyword arguments, its output) → what `TokenGrid.grid` is in this call
    measure: Callable[..., Grid | list[Grid] | None]
    num_prefix_tokens: int
    num_tokens: int | None  # at the size that the model was built for


def measure_patches(
    patch_embed: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Any
) -> Grid | list[Grid]:
    if kwargs.get("patch_coord") is not None:
        return measure_naflex(kwargs["patch_coord"], kwargs.get("patch_valid"))
    if isinstance(output, tuple):  # NaFlexEmbeds return the grid
        rows, columns = output[1]
    else:
        height, width = args[0].shape[-2:]
        rows, columns = patch_embed.dynamic_feat_size((height, width))
    return rows, columns


def measure_images(
    patch_embed: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Any
) -> Grid | list[Grid] | None:
    """`measure_patches` for images alone: the sizes of a NaFlexVit's patches would make the host wait."""
    return None if kwargs.get("patch_coord") is not None else measure_patches(patch_embed, args, kwargs, output)


def measure_naflex(coordinates: Tensor, valid: Tensor | None) -> list[Grid]:
    """(height, width) of every image, from the rows and columns of its patches (B, N, 2) and which are there (B, N).

    The patches must be maps row by row, with the padding after them, as timm's collation makes them.
    """
    if valid is None:
        valid = torch.ones_like(coordinates[..., 0], dtype=torch.bool)
    height, width = (coordinates.masked_fill(~valid[..., None], 0).amax(1) + 1).unbind(1)
    index = torch.arange(coordinates.shape[1], device=coordinates.device)
    inside = index < (height * width)[:, None]
    expected = torch.stack([index // width[:, None], index % width[:, None]], -1)
    is_map = ((coordinates == expected).all(-1) | ~inside).all(1) & (valid == inside).all(1)
    sizes = torch.stack([height, width, is_map.to(height.dtype)], 1).tolist()  # the host waits once
    for image, (rows, columns, whole) in enumerate(sizes):
        if not whole:
            raise ValueError(
                f"the patches of image {image} are not a map of {rows}×{columns} row by row with the padding after "
                "it, which a local residual needs; pass local_residual=False"
            )
    return [(rows, columns) for rows, columns, _ in sizes]


def find_patches(ancestor: Any) -> GridSource | None:
    """The patch embedding of a vision transformer of timm: `patch_embed`, or `embeds` of a NaFlexVit."""
    patch_embed: Any = getattr(ancestor, "embeds", None) or getattr(ancestor, "patch_embed", None)
    prefix = getattr(ancestor, "num_prefix_tokens", None)
    if prefix is None or not hasattr(patch_embed, "dynamic_feat_size"):
        return None
    patches = getattr(patch_embed, "num_patches", None)
    return GridSource(patch_embed, measure_patches, prefix, None if patches is None else prefix + patches)


def drops_patches(model: nn.Module) -> bool:
    """Whether a model drops patches in training, which leaves no map."""
    dropouts = (PatchDropout, PatchDropoutWithIndices)
    return any(isinstance(child, dropouts) and child.prob > 0 for child in model.children())


def token_mask_of(attn_mask: Tensor | None, is_causal: bool, x: Tensor) -> Tensor | None:
    """The mask over keys (B, N) that a mask of timm stands for. ValueError for one that depends on the query."""
    if is_causal:
        raise ValueError("a linear attention cannot be causal: call the model without is_causal")
    if attn_mask is None:
        return None
    is_bool = attn_mask.dtype == torch.bool
    if attn_mask.ndim != 4 or attn_mask.shape[1:3] != (1, 1) or not (is_bool or attn_mask.is_floating_point()):
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)} and dtype {attn_mask.dtype}; a linear attention takes a "
            f"mask over keys alone, (B, 1, 1, {x.shape[1]}), of bool or added to the logits; for timm's NaFlexVit "
            "pass use_key_only_attn_mask=True"
        )
    keys = attn_mask[:, 0, 0].expand(x.shape[0], -1)
    if is_bool:
        return keys
    _check_absence(attn_mask)
    return keys == 0


ABSENT = -1e4  # or less, added to a logit, is as good as −inf in every precision
_checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # all layers get the same mask, and the host waits once


def _check_absence(mask: Tensor) -> None:
    """ValueError for an additive mask with a bias that is neither 0 nor so low that the key is absent."""
    if torch.compiler.is_compiling() or mask.is_meta or mask in _checked:
        return
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    wrong = ~((mask == 0) | (mask <= ABSENT))
    if wrong.any():
        raise ValueError(
            f"attn_mask adds {mask[wrong][0].item():g} to the logits of a key; a linear attention takes 0 for keys "
            "that are present and −inf for those that are not. Pass such a mask, or one of bool"
        )
    _checked[mask] = True


# Attentions that timm builds, as `attn_layer`. They are made before the model that they belong to is complete.


def find_grid(attention: Any, x: Tensor) -> Grid | list[Grid]:
    """The grid of the model around, for a call without one: (height, width), or a list of one for every image."""
    grid = None if attention.model_grid is None else attention.model_grid.grid
    if isinstance(grid, tuple):
        others = x.shape[1] - grid[0] * grid[1]
        if others > attention.num_prefix_tokens:  # a distilled DeiT gets one more after its blocks are built
            attention.num_prefix_tokens = others
    if not attention.uses_grid():
        return 1, x.shape[1] - attention.num_prefix_tokens  # not used
    if grid is None:
        raise ValueError(
            f"{type(attention).__name__} acts on the token map, and grid is missing: pass grid=(height, width), or "
            "call the whole timm model that it was built in. Without a local residual (local_residual=False) "
            "InLine and linear attention need none"
        )
    return grid


_waiting: "weakref.WeakSet[Any]" = weakref.WeakSet()


def wait_for_model(attention: Any) -> None:
    """Gives `attention.model_grid` its value once the attention becomes a part of a timm model.

    timm gives an attention no reference to its model. So a global hook, which PyTorch calls when a module gets a child,
    finds the model. It is registered once: a hook that removes itself breaks PyTorch's loop over the others.
    """
    _waiting.add(attention)
    _register_hook()


@functools.cache
def _register_hook() -> None:
    register_module_module_registration_hook(_connect)


def _connect(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Called by PyTorch before `child` becomes a part of `parent`."""
    if not _waiting:
        return
    source = find_patches(parent)
    if child is None or source is None:
        return
    found: list[Any] = [module for module in child.modules() if module in _waiting]
    on_map = any(module.uses_grid() for module in found)
    if on_map and drops_patches(parent):
        raise ValueError(
            f"{type(parent).__name__} drops patches in training, which leaves no map for the local residual: "
            "set patch_drop_rate=0, or local_residual=False of the attention"
        )
    if found:
        grid = TokenGrid(source.measure if on_map else measure_images, source.num_prefix_tokens)
        source.module.register_forward_hook(grid, with_kwargs=True)
        for module in found:
            module.model_grid, module.num_prefix_tokens = grid, source.num_prefix_tokens
    _waiting.difference_update(found)
