"""Masks over keys that timm's and transformers' models pass."""

import pytest
import torch

from inline_attention.layers.token_grid import token_mask_of

X = torch.zeros(1, 3, 8)


def additive(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[None, None, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_numbers_stand_for_absent_keys(dtype: torch.dtype) -> None:
    mask = additive(0, -float("inf"), torch.finfo(dtype).min, dtype=dtype)
    for _ in range(2):  # the second layer that gets it
        found = token_mask_of(mask, False, X)
        assert found is not None
        assert found.tolist() == [[True, False, False]]
    widened = token_mask_of(mask.float(), False, X)
    assert widened is not None
    assert widened.tolist() == [[True, False, False]]


@pytest.mark.parametrize("bias", [-0.5, 1.0, -100.0, float("nan")])
def test_a_bias_of_a_key_is_refused(bias: float) -> None:
    """It would count as absent, although softmax gives it weight."""
    with pytest.raises(ValueError, match=f"attn_mask adds {bias:g} to the logits of a key"):
        token_mask_of(additive(0, bias, 0), False, X)


def test_a_mask_is_compiled_without_a_break() -> None:
    mask = additive(0, -float("inf"), 0)
    compiled = torch.compile(lambda mask: token_mask_of(mask, False, X), backend="eager", fullgraph=True)
    assert compiled(mask).tolist() == [[True, False, True]]
