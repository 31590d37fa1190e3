"""What the count of timm's models says about single ones."""

import pytest

from study.coverage import NO_MAP, NONE, PARTLY, REFUSED, WHOLE, classify


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_tiny_patch16_224", (WHOLE, ())),
        ("davit_tiny", (PARTLY, ("ChannelAttention",))),
        ("mobilevit_xxs", (NO_MAP, ())),
        ("cait_xxs24_224", (REFUSED, ("timm.models.cait.TalkingHeadAttn",))),
        ("resnet18", (NONE, ())),
    ],
)
def test_a_model_is_classified(name: str, expected: tuple[str, tuple[str, ...]]) -> None:
    assert classify(name) == expected
