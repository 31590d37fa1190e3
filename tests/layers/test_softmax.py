"""Softmax attention and its forms with φ."""

import pytest

from inline_attention.layers import ATTENTIONS


@pytest.mark.parametrize("feature_map", ["relu", "relu_affine"])
def test_softmax_takes_no_feature_map(feature_map: str) -> None:
    with pytest.raises(ValueError, match="MappedSoftmaxAttention"):
        ATTENTIONS["softmax"](8, 2, feature_map=feature_map)
    mapped = ATTENTIONS["mapped_softmax"](8, 2, feature_map=feature_map)
    assert (mapped.feature_map, mapped.affine is not None) == ("relu", feature_map == "relu_affine")
