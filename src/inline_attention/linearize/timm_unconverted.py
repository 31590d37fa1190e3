"""The attention modules of timm that stay as they are, and those that are refused. Each has its reason."""

import timm.layers
import timm.models
from timm.layers import bottleneck_attn, diff_attention, halo_attn, lambda_layer
from timm.models import (
    cait,
    coat,
    convit,
    crossvit,
    davit,
    edgenext,
    efficientformer_v2,
    efficientvit_msra,
    gcvit,
    mobilevit,
    mvitv2,
    nextvit,
    swiftformer,
    vision_transformer,
    vision_transformer_sam,
    volo,
    xcit,
)
from torch import nn

from .modules import LEFT_ALONE, REFUSED

_LEFT_ALONE: dict[str, tuple[type[nn.Module], ...]] = {
    "softmax, left alone: it pools": (
        timm.layers.AttentionPoolLatent,
        timm.layers.AttentionPoolPrr,
        timm.layers.AttentionPool2d,
        timm.layers.GlobalContext,
        timm.layers.RotAttentionPool2d,
        *(vars(timm.layers)[name] for name in ("SimPool1d", "SimPool2d") if hasattr(timm.layers, name)),
    ),
    "softmax, left alone: only the class token attends": (
        cait.ClassAttn,
        crossvit.CrossAttention,
        volo.ClassAttention,
    ),
    "left alone: it is between channels": (
        davit.ChannelAttention,
        davit.ChannelAttentionV2,
        edgenext.CrossCovarianceAttn,
        timm.layers.SelectiveKernel,
        timm.layers.SplitAttn,
        xcit.XCA,
    ),
    "left alone: it is linear": (
        coat.FactorAttnConvRelPosEnc,
        mobilevit.LinearSelfAttention,
        swiftformer.EfficientAdditiveAttention,
        lambda_layer.LambdaLayer,
    ),
    "left alone: it is local": (nextvit.ConvAttention, volo.OutlookAttention),
}
_REFUSED: dict[str, tuple[type[nn.Module], ...]] = {
    "its heads mix their weights": (
        cait.TalkingHeadAttn,
        efficientformer_v2.Attention2d,
        efficientformer_v2.Attention2dDownsample,
    ),
    "its position bias depends on the query": (
        bottleneck_attn.BottleneckAttn,
        halo_attn.HaloAttn,
        mvitv2.MultiScaleAttention,
        mvitv2.MultiScaleAttentionPoolFirst,
        vision_transformer_sam.Attention,
    ),
    "it is the difference of two softmax attentions": (
        diff_attention.DiffAttention,
        vision_transformer.DiffParallelScalingBlock,
    ),
    "a gate mixes its weights with those of positions": (convit.GPSA,),
    "each head depends on the output of the one before": (efficientvit_msra.CascadedGroupAttention,),
    "its windows share the queries of the whole image": (gcvit.WindowAttentionGlobal,),
}
if hasattr(timm.models, "efficientvim"):  # timm 1.0.30
    _LEFT_ALONE["left alone: it is linear"] += (timm.models.efficientvim.HSMSSD,)
for table, reasons in ((LEFT_ALONE, _LEFT_ALONE), (REFUSED, _REFUSED)):
    table.update({module: why for why, modules in reasons.items() for module in modules})
