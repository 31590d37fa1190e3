"""Small models of every kind that can be linearised, with weights of ordinary size."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import timm
import timm.layers
import torch
import torchvision
from small import create_small
from timm.models import fastvit, metaformer, nest, nextvit, shvit, volo
from torch import Tensor, nn


class Case(NamedTuple):
    name: str
    build: Callable[[], nn.Module]
    sizes: list[tuple[int, int]]  # of images; the second is not square, where the model can take others
    converted: int  # attentions that become linear
    arguments: dict[str, Any] | None = None  # of `timm.create_model`

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
    return Case(name, lambda: timm.create_model(name, num_classes=5, **kwargs), sizes, converted, kwargs)


def of_class(cls: Callable[..., nn.Module], sizes: list[tuple[int, int]], converted: int = 2, **kwargs: Any) -> Case:
    return Case(cls.__name__, lambda: cls(num_classes=5, **kwargs), sizes, converted)


def vit(name: str, patch: int = 16, **kwargs: Any) -> Case:
    options: dict[str, Any] = dict(depth=2, embed_dim=24, num_heads=2, img_size=3 * patch, dynamic_img_size=True)
    return of_timm(name, [(3 * patch, 3 * patch), (2 * patch, 5 * patch)], **{**options, **kwargs})


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=48, patch_size=16, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=5
    )


class OneLayer(nn.Module):
    """An attention of 16 channels in a classifier, for classes of models that cannot be made small."""

    def __init__(self, attn: nn.Module, *, rows: bool = False) -> None:
        super().__init__()
        self.rows = rows
        self.stem, self.attn, self.head = nn.Conv2d(3, 16, 8, 8), attn, nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + (self.attn(x.flatten(2).mT).mT.unflatten(2, x.shape[2:]) if self.rows else self.attn(x))
        return self.head(x.mean((2, 3)))


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
    of_timm("naflexvit_base_patch16_gap", [(48, 48), (32, 80)], depth=2, embed_dim=24, num_heads=2),
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
# One model for each further class of timm, with few blocks.
SQUARE, SIZES = [(64, 64)], [(64, 64), (64, 96)]
MORE = [
    of_timm("maxvit_tiny_tf_224", SQUARE, 8, img_size=64, depths=[1] * 4, embed_dim=[32] * 4, stem_width=8),
    of_timm("coatnet_rmlp_0_rw_224", SQUARE, img_size=64, depths=[1] * 4, embed_dim=[32] * 4, stem_width=8),
    of_timm("vit_relpos_small_patch16_224", [(48, 48)], img_size=48, depth=2, embed_dim=24, num_heads=2),
    of_timm("beit_base_patch16_224", [(48, 48)], img_size=48, depth=2, embed_dim=24, num_heads=2),
    of_timm("vit_base_patch16_xp_224", [(48, 48)], img_size=48, depth=2, embed_dim=24, num_heads=2),
    of_timm("visformer_tiny", SQUARE, 2, img_size=64, init_channels=8, embed_dim=32, depth=(1, 1, 1), num_heads=2),
    of_timm("davit_tiny", SQUARE, depths=(1, 1), embed_dims=(16, 32), num_heads=(1, 2)),
    of_timm("tiny_vit_5m_224", SQUARE, 1, embed_dims=(16, 32), depths=(1, 1), num_heads=(1, 2), window_sizes=(4, 4)),
    of_timm(
        "hiera_tiny_224",
        SQUARE,
        3,
        img_size=(64, 64),
        embed_dim=16,
        num_heads=1,
        stages=(1, 1, 1),
        q_pool=2,
        mask_unit_attn=(True, True, False),
    ),
    of_timm(
        "sam2_hiera_tiny",
        SQUARE,
        3,
        embed_dim=16,
        num_heads=1,
        stages=(1, 1, 1),
        window_spec=(8, 4, 4),
        q_pool=1,
        global_att_blocks=(2,),
        global_pos_size=(4, 4),
    ),
    of_timm(
        "twins_svt_small",
        SQUARE,
        4,
        img_size=64,
        depths=(2, 2),
        embed_dims=(16, 32),
        num_heads=(1, 2),
        mlp_ratios=(2, 2),
        sr_ratios=(4, 1),
        wss=(4, 4),
    ),
    of_timm("swinv2_tiny_window8_256", SQUARE, img_size=64, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,)),
    of_timm("swinv2_cr_tiny_224", SQUARE, img_size=64, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,)),
    of_timm("levit_128", SQUARE, 3, img_size=64, embed_dim=(32, 32), depth=(1, 1), num_heads=(2, 2), key_dim=8),
    of_timm("levit_conv_128", SQUARE, 3, img_size=64, embed_dim=(32, 32), depth=(1, 1), num_heads=(2, 2), key_dim=8),
    of_timm(
        "tnt_s_patch16_224",
        [(48, 48)],
        4,
        img_size=48,
        depth=2,
        embed_dim=24,
        inner_dim=8,
        num_heads_inner=2,
        num_heads_outer=2,
    ),
    of_timm("efficientformer_l1", [(224, 224)], 1, depths=(1, 1, 1, 2), embed_dims=(8, 8, 8, 16)),
    Case("FastViT", lambda: OneLayer(fastvit.Attention(16, head_dim=8)), SIZES, 1),
    Case("MobileNetV4", lambda: OneLayer(timm.layers.MultiQueryAttention2d(16, num_heads=2)), SIZES, 1),
    Case(
        "MobileNetV4, reduced",
        lambda: OneLayer(timm.layers.MultiQueryAttention2d(16, num_heads=2, kv_stride=2)),
        SIZES,
        1,
    ),
    Case("Next-ViT", lambda: OneLayer(nextvit.EfficientAttention(16, head_dim=8, sr_ratio=2), rows=True), SIZES, 1),
    Case("SHViT", lambda: OneLayer(shvit.SHSA(16, 4, 8, norm_layer=nn.BatchNorm2d, act_layer=nn.ReLU)), SIZES, 1),
    of_class(nest.Nest, SQUARE, img_size=64, embed_dims=(16, 32), num_heads=(1, 2), depths=(1, 1), num_levels=2),
    of_class(
        metaformer.MetaFormer,
        SQUARE,
        1,
        depths=(1, 1),
        dims=(16, 32),
        token_mixers=(metaformer.SepConv, metaformer.Attention),
        norm_layers=(metaformer.LayerNorm2dNoBias, metaformer.LayerNormNoBias),
    ),
    of_class(
        volo.VOLO,
        SQUARE,
        1,
        img_size=64,
        layers=(1, 1),
        embed_dims=(16, 16),
        num_heads=(2, 2),
        stem_hidden_dim=8,
        downsamples=(True, False),
        outlook_attention=(True, False),
    ),
]
if hasattr(timm.models, "iformer"):  # timm 1.0.30
    from timm.models import cpubone, iformer, lowformer

    MORE += [
        Case("iFormer", lambda: OneLayer(iformer.SHMA(16)), SIZES, 1),
        Case("iFormer, windows", lambda: OneLayer(iformer.SHMA(16, window_size=3)), SIZES, 1),
        Case("LowFormer", lambda: OneLayer(lowformer.ConvAttention(16, att_stride=2)), SIZES, 1),
        of_timm("gemma4_vit_167m", [(96, 96)], depth=2, embed_dim=24, num_heads=2, head_dim=12),
        Case("CPUBone", lambda: OneLayer(cpubone.ConvAttention(16, att_stride=2)), SIZES, 1),
    ]
OTHERS = [
    Case("torchvision vit", torchvision_vit, [(48, 48)], 2),
    own("deit", 3),
    own("pvt", 5),
    own("swin", 7),
    own("cswin", 5),
    own("deit", 3, attention="mapped_softmax")._replace(name="mapped softmax"),
]
CASES = TIMM + MORE + OTHERS


def shrink_logits(model: nn.Module, factor: float) -> None:
    """Scales the logits of every attention: its queries, and a bias of relative positions."""
    with torch.no_grad():
        for module in model.modules():
            for parameter in (*of_queries(module), *of_bias(module)):
                if parameter is not None:
                    parameter.mul_(factor)
            if hasattr(module, "logit_scale"):
                module.logit_scale.add_(math.log(factor))


def of_queries(m: Any) -> Iterator[Tensor | None]:
    """The parameters that make queries, or those of keys where the queries come from elsewhere."""
    if isinstance(m, nn.MultiheadAttention):
        yield from (m.in_proj_weight[: m.embed_dim], m.in_proj_bias[: m.embed_dim])
    elif isinstance(m, timm.layers.AttentionPoolLatent) or hasattr(m, "logit_scale"):
        return
    elif hasattr(norm := getattr(m, "q_norm", None), "weight"):
        yield from (norm.weight, getattr(norm, "bias", None))
    elif hasattr(m, "qk"):  # TNT
        yield m.qk.weight[: m.qk.out_features // 2]
    elif isinstance(m, timm.layers.MultiQueryAttention2d):
        yield m.query.proj.weight
    elif hasattr(m, "pwise"):  # LowFormer and CPUBone: q, k and v of each head side by side
        yield m.pwise.weight.unflatten(0, (m.num_heads, -1))[:, : m.head_dim]
    elif not hasattr(m, "proj"):
        return
    elif (qkv := getattr(m, "qkv", None)) is not None:
        last = getattr(qkv, "bn", qkv)
        sizes = (getattr(m, name, None) for name in ("key_dim", "qk_dim", "dim_head"))
        size = next(filter(None, sizes), None) if getattr(m, "head_first", True) else None
        if size is not None:  # q, k and v of each head side by side
            heads = getattr(m, "num_heads", 1)
            yield from (p.unflatten(0, (heads, -1))[:, :size] for p in (last.weight, last.bias))
        else:
            width = len(qkv.weight) // 3
            yield from (qkv.weight[:width], None if qkv.bias is None else qkv.bias[:width], getattr(m, "q_bias", None))
    elif (q := getattr(m, "q", None) or getattr(m, "q_proj", None)) is not None:
        last = getattr(getattr(q, "ln", q), "bn", q)
        yield from (last.weight, last.bias)


def of_bias(m: Any) -> Iterator[Tensor | None]:
    yield from (getattr(m, name, None) for name in ("relative_position_bias_table", "attention_biases"))
    for name, last in (("cpb_mlp", 2), ("meta_mlp", "fc2")):
        if hasattr(m, name):
            layer = m.get_submodule(f"{name}.{last}")
            yield from (layer.weight, layer.bias)
    if isinstance(m, timm.layers.RelPosMlp):
        yield from (m.mlp.fc2.weight, m.mlp.fc2.bias)
