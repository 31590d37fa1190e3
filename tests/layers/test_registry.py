"""Attentions by name, and which attention each block of a model has."""

from typing import Any

import pytest

from inline_attention.layers import ATTENTIONS, Attention, register_attention
from inline_attention.layers.registry import describe_attention, parse_attention


def test_registering_an_attention() -> None:
    before = dict(ATTENTIONS)

    class Nameless(Attention):
        pass

    class Second(Attention):
        kind = "inline"

    with pytest.raises(ValueError, match=r"Nameless\.kind is None; expected the name"):
        register_attention(Nameless)
    with pytest.raises(ValueError, match=r"Second\.kind is 'inline', which is InLineAttention; choose another"):
        register_attention(Second)
    assert before == ATTENTIONS


@pytest.mark.parametrize(
    ("spec", "expected", "short"),
    [
        ("IISL", [["inline"], ["inline"] * 2, ["softmax"] * 3, ["linear"]], "IISL"),
        ("softmax", [["softmax"], ["softmax"] * 2, ["softmax"] * 3, ["softmax"]], "SSSS"),
        (
            ["inline", "linear", "inline:2", "S"],
            [["inline"], ["linear"] * 2, ["inline", "inline", "softmax"], ["softmax"]],
            "I L I:2 S",
        ),
        ("inline:1", [["inline"], ["inline", "softmax"], ["inline", "softmax", "softmax"], ["inline"]], "I I:1 I:1 I"),
        (["inline:0", "I", "I", "I"], [["softmax"], ["inline"] * 2, ["inline"] * 3, ["inline"]], "SIII"),
    ],
)
def test_parse_attention(spec: Any, expected: list[list[str]], short: str) -> None:
    assert parse_attention(spec, (1, 2, 3, 1)) == expected
    assert describe_attention(expected) == short


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (3, "attention=3: expected a name"),
        ([["inline"], "I", "I", "I"], r"attention=\[\['inline'\], .*: expected a name"),
        ("III", "names 3 stages but the model has 4"),
        ("IIIX", "'X' is unknown; expected a letter"),
        ("inlin", "names 5 stages but the model has 4"),
        (["inline", "inline", "inlin", "S"], "'inlin' is unknown"),
        (["inline:x", "I", "I", "I"], "'inline:x' is unknown"),
        (["inline:2", "I", "I", "I"], "'inline:2' asks for 2 blocks of a stage that has 1"),
    ],
)
def test_parse_attention_errors(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_attention(spec, (1, 2, 3, 1))
