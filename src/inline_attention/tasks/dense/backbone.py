"""A registered model as a pyramid of feature maps."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.layers.padding import own_positions, sizes_on_map, zero_padding
from inline_attention.layers.windows import ceil_div
from inline_attention.models.registry import create_model, list_models
from inline_attention.models.weights import load_weights

STRIDES = (4, 8, 16, 32)
PATCH = 16  # the stride of a single map


class Backbone(nn.Module):
    """Images (B, 3, H, W) of any size → maps (B, C, ceil(H / s), ceil(W / s)) at strides s of 4, 8, 16 and 32.

    The maps are those of timm's `features_only`. If the model has a final norm (Swin, CSwin), every map gets a norm, as
    published. The single map of DeiT becomes four, as in ViTDet's simple feature pyramid.
    """

    channels: tuple[int, ...]
    model: Any  # nn.Module with timm's contract

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList()
        self.pyramid: nn.Module | None = None
        dims, strides = ([info[key] for info in model.feature_info] for key in ("num_chs", "reduction"))
        if len(set(strides)) == 1:
            if strides[0] != PATCH:
                raise ValueError(
                    f"a backbone with a single map must have patches of {PATCH} pixels, from which four strides "
                    f"are made; this one has {strides[0]}"
                )
            model.prune_intermediate_layers(1)  # keeps the norm, which was trained on this map
            self.pyramid = SimplePyramid(dims[-1])
            self.channels = self.pyramid.channels
        else:
            final = model.norm
            model.prune_intermediate_layers(len(STRIDES), prune_norm=True)
            if isinstance(final, nn.LayerNorm):
                self.norms.extend(nn.LayerNorm(dim, eps=final.eps) for dim in dims)
            self.channels = tuple(dims)
        self.model = model

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        """Images (B, 3, H, W) → four maps (B, C_i, ⌈H/s⌉, ⌈W/s⌉) at the strides s = 4, 8, 16, 32

        sizes: (B, 2) integers, the true (height, width) of images that are padded at the bottom and right. None: no
        image is padded. Each image's own part of a map, ⌈height/s⌉ by ⌈width/s⌉, equals the map of the image alone.
        The rest is zero.
        """
        options: dict[str, Any] = dict(intermediates_only=True) | ({} if sizes is None else dict(sizes=sizes))
        if self.pyramid is not None:
            (tokens,) = self.model.forward_intermediates(x, 1, norm=True, **options)
            maps = self.pyramid(tokens, None if sizes is None else sizes_on_map(sizes, PATCH))
            # If a side is not a multiple of 16, the last patches reach beyond the image, and so do the finer maps.
            grids = [[ceil_div(side, stride) for side in x.shape[2:]] for stride in STRIDES]
            maps = [y[:, :, :rows, :columns] for y, (rows, columns) in zip(maps, grids, strict=True)]
        elif not self.norms:
            return self.model.forward_intermediates(x, **options)
        else:
            maps = self.model.forward_intermediates(x, output_fmt="NHWC", **options)
            maps = [norm(y).permute(0, 3, 1, 2) for norm, y in zip(self.norms, maps, strict=True)]
        if sizes is None:
            return maps
        return [
            zero_padding(y, sizes_on_map(sizes, stride), channels="first")
            for y, stride in zip(maps, STRIDES, strict=True)
        ]

    def group_matcher(self, *, prefix: str, coarse: bool = False) -> dict[str, Any]:
        """timm's layer groups of the model, for a module that holds this backbone as `prefix`.

        Parameters of the heads match no pattern and form the last group.
        """
        start = "^" + re.escape(f"{prefix}.model.")

        def behind(pattern: str) -> str:
            return pattern.replace("^", start)

        groups = self.model.group_matcher(coarse=coarse)
        return {
            name: behind(found) if isinstance(found, str) else [(behind(part), suffix) for part, suffix in found]
            for name, found in groups.items()
        }

    def no_weight_decay(self) -> set[str]:
        return {f"model.{name}" for name in self.model.no_weight_decay()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.model.set_grad_checkpointing(enable)


class HeadedModel(nn.Module):
    """A backbone under heads, with the layer groups and weight decay of its backbone for the optimizer."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return self.backbone.group_matcher(prefix="backbone", coarse=coarse)

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, H, W)"""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SimplePyramid(nn.Module):
    """One map at stride 16 → four at strides 4, 8, 16 and 32, by transposed convolutions and a max pooling.

    "Exploring Plain Vision Transformer Backbones for Object Detection", arXiv 2203.16527.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.channels = (dim // 4, dim // 2, dim, dim)
        self.to_stride_4 = nn.Sequential(
            nn.ConvTranspose2d(dim, dim // 2, 2, stride=2),
            ChannelNorm(dim // 2, eps=1e-6),
            nn.GELU(),
            nn.ConvTranspose2d(dim // 2, dim // 4, 2, stride=2),
        )
        self.to_stride_8 = nn.ConvTranspose2d(dim, dim // 2, 2, stride=2)

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        """(B, C, H, W) → the four maps; sizes (B, 2): each image's own part of x, outside which nothing is pooled"""
        pooled = x
        if sizes is not None:
            pooled = x.masked_fill(~own_positions(sizes, (x.shape[2], x.shape[3]))[:, None], -torch.inf)
        return [self.to_stride_4(x), self.to_stride_8(x), x, F.max_pool2d(pooled, 2, ceil_mode=True)]


def create_backbone(
    name: str, *, weights: str | None = None, drop_path: float | None = None, kwargs: dict[str, Any] | None = None
) -> Backbone:
    """Build the registered model `name` as a backbone.

    Args:
        weights: "pretrained" for the published classifier, or the file or URL of one. Its head is not loaded.
        drop_path: stochastic depth of the last block. None keeps the model's default.
        kwargs: further arguments of the model.
    """
    if name not in list_models():
        create_model(name)  # raises for an unknown name and suggests the nearest one
        raise ValueError(f"{name} is not a model of this library; a backbone must be one (`inline models` lists them)")
    arguments = {**({} if drop_path is None else {"drop_path_rate": drop_path}), **(kwargs or {})}
    model = create_model(name, pretrained=weights == "pretrained", **arguments)
    if weights not in (None, "pretrained"):
        load_weights(model, weights, reset_head=True)
    return Backbone(model)
