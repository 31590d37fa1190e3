"""Small models of every kind that can be linearised, with weights of ordinary size."""

from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import timm.layers
import torch
import torchvision
from small import create_small
from torch import Tensor, nn


class Case(NamedTuple):
    name: str
    build: Callable[[], nn.Module]
    sizes: list[tuple[int, int]]  # of images; the second is not square, where the model can take others
    converted: int  # attentions that become linear

    @property
    def model(self) -> nn.Module:
        """In float64, with logits around one."""
        torch.manual_seed(0)
        model = self.build().double().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5)
        return model

    def images(self, size: int = 0) -> Tensor:
        torch.manual_seed(1)
        return torch.randn(2, 3, *self.sizes[size], dtype=torch.float64)


def of_timm(name: str, sizes: list[tuple[int, int]], converted: int = 2, **kwargs: Any) -> Case:
    return Case(name, lambda: timm.create_model(name, num_classes=5, **kwargs), sizes, converted)


def vit(name: str, patch: int = 16, **kwargs: Any) -> Case:
    options: dict[str, Any] = dict(depth=2, embed_dim=24, num_heads=2, img_size=3 * patch, dynamic_img_size=True)
    return of_timm(name, [(3 * patch, 3 * patch), (2 * patch, 5 * patch)], **{**options, **kwargs})


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=48, patch_size=16, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=5
    )


def own(family: str, converted: int, **kwargs: Any) -> Case:
    name = f"softmax_{family}_tiny"
    return Case(name, lambda: create_small(name, **kwargs), [(64, 64), (64, 96)], converted)


TIMM = [
    vit("vit_tiny_patch16_224"),
    vit("vit_tiny_patch16_224", qk_norm=True, scale_attn_norm=True)._replace(name="vit with norms"),
    vit("deit3_small_patch16_224"),
    vit("vit_small_patch14_dinov2", 14),
    vit("vit_small_patch14_reg4_dinov2", 14),
    vit("vit_base_patch16_siglip_224"),
    vit("vit_base_patch16_clip_224"),
    vit("eva02_tiny_patch14_224", 14),
    vit("vit_small_patch16_dinov3"),
    vit("vit_small_patch16_rope_224"),
    vit("vit_small_patch16_rope_mixed_224"),
    of_timm(
        "swin_tiny_patch4_window7_224",
        [(56, 56), (56, 84)],
        4,
        img_size=56,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(1, 2),
        strict_img_size=False,
    ),
    of_timm(
        "pvt_v2_b0", [(64, 64), (64, 96)], 4, depths=(1, 1, 1, 1), embed_dims=(8, 16, 20, 16), num_heads=(1, 2, 5, 2)
    ),
]
OTHERS = [
    Case("torchvision vit", torchvision_vit, [(48, 48)], 2),
    own("deit", 3),
    own("pvt", 5),
    own("swin", 7),
    own("cswin", 5),
    own("deit", 3, attention="mapped_softmax")._replace(name="mapped softmax"),
]
CASES = TIMM + OTHERS


def shrink_logits(model: nn.Module, factor: float) -> None:
    """Scales the logits of every attention: its queries, and a bias of relative positions."""

    def scale(*parameters: Tensor | None) -> None:
        for parameter in parameters:
            if parameter is not None:
                parameter.mul_(factor)

    with torch.no_grad():
        for module in model.modules():
            m: Any = module
            if isinstance(m, nn.MultiheadAttention):
                scale(m.in_proj_weight[: m.embed_dim], m.in_proj_bias[: m.embed_dim])
            elif isinstance(m, timm.layers.AttentionPoolLatent) or not hasattr(m, "proj"):
                continue
            elif isinstance(getattr(m, "q_norm", None), nn.LayerNorm):
                scale(m.q_norm.weight, m.q_norm.bias)
            elif (qkv := getattr(m, "qkv", None)) is not None:
                width = qkv.out_features // 3
                scale(qkv.weight[:width], None if qkv.bias is None else qkv.bias[:width], getattr(m, "q_bias", None))
            elif (q := getattr(m, "q", None) or getattr(m, "q_proj", None)) is not None:
                scale(q.weight, q.bias)
            scale(getattr(m, "relative_position_bias_table", None))
