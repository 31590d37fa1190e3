"""The counts of every model at its own input size, stored so that a listing builds no model. A test checks them."""

from typing import NamedTuple

import torch

from inline_attention.layers.registry import describe_attention

from .base import VisionModel
from .profile import count_macs
from .registry import create_model


class Summary(NamedTuple):
    img_size: int
    attention: str  # by stage; see `describe_attention`
    params: int
    macs: int  # of one image; see `profile`


SUMMARIES: dict[str, Summary] = {
    "inline_deit_tiny": Summary(224, "I", 6_477_736, 1_108_701_696),
    "inline_deit_small": Summary(288, "I", 16_734_760, 4_964_564_480),
    "inline_deit_base": Summary(448, "I", 23_797_096, 17_165_515_776),
    "inline_pvt_tiny": Summary(224, "IIII", 12_032_232, 1_975_066_112),
    "inline_pvt_small": Summary(224, "IIII", 21_556_136, 3_913_413_632),
    "inline_pvt_medium": Summary(224, "IIII", 37_618_856, 6_859_722_752),
    "inline_pvt_large": Summary(224, "IIII", 51_154_280, 10_126_525_696),
    "inline_swin_tiny": Summary(224, "IIIS", 29_223_544, 4_457_619_456),
    "inline_swin_small": Summary(224, "IISS", 49_793_296, 8_718_480_384),
    "inline_swin_base": Summary(224, "I I I:2 S", 88_350_120, 15_396_397_056),
    "inline_swin_base_384": Summary(384, "I I I:2 S", 88_465_320, 46_196_023_296),
    "inline_cswin_tiny": Summary(224, "IISS", 20_604_520, 4_303_584_768),
    "inline_cswin_small": Summary(224, "IISS", 33_032_872, 6_760_931_328),
    "inline_cswin_base": Summary(224, "IISS", 73_413_640, 14_866_656_768),
    "inline_cswin_base_384": Summary(384, "IISS", 73_413_640, 46_167_080_448),
    "softmax_deit_tiny": Summary(224, "S", 5_717_416, 1_253_683_200),
    "softmax_deit_small": Summary(224, "S", 22_050_664, 4_598_882_304),
    "softmax_deit_base": Summary(224, "S", 86_567_656, 17_563_828_224),
    "softmax_pvt_tiny": Summary(224, "SSSS", 13_227_240, 1_926_417_408),
    "softmax_pvt_small": Summary(224, "SSSS", 24_483_816, 3_805_960_192),
    "softmax_pvt_medium": Summary(224, "SSSS", 44_206_056, 6_649_434_112),
    "softmax_pvt_large": Summary(224, "SSSS", 61_367_272, 9_804_024_320),
    "softmax_swin_tiny": Summary(224, "SSSS", 28_288_354, 4_490_566_656),
    "softmax_swin_small": Summary(224, "SSSS", 49_606_258, 8_740_875_264),
    "softmax_swin_base": Summary(224, "SSSS", 87_768_224, 15_430_946_816),
    "softmax_cswin_tiny": Summary(224, "SSSS", 22_320_552, 4_324_203_008),
    "softmax_cswin_small": Summary(224, "SSSS", 34_643_304, 6_800_714_752),
    "softmax_cswin_base": Summary(224, "SSSS", 77_382_184, 14_955_348_480),
    "softmax_deit_study": Summary(64, "S", 2_410_260, 748_639_040),
    "linear_deit_study": Summary(64, "L", 2_410_260, 619_398_880),
    "inline_deit_study": Summary(64, "I", 2_420_340, 529_941_120),
}


def summarise(name: str) -> Summary:
    """The counts from the table, or newly counted for a model that is not in it."""
    return SUMMARIES.get(name) or count(name)


def count(name: str) -> Summary:
    """Build a model on the meta device and count."""
    with torch.device("meta"):
        model = create_model(name)
    assert isinstance(model, VisionModel)
    params = sum(parameter.numel() for parameter in model.parameters())
    return Summary(model.img_size[0], describe_attention(model.attention), params, count_macs(model))
