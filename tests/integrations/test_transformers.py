"""`attn_implementation="inline"` and "tangent" in small random models of transformers."""

from typing import Any

import pytest
import torch
from on_use import OnUse
from torch import Tensor

from inline_attention.ops import inline_attention, tangent_attention

transformers = OnUse("transformers")
OPERATIONS: dict[str, Any] = {"inline": inline_attention, "tangent": tangent_attention}
SIZES: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
VISION: dict[str, Any] = dict(**SIZES, image_size=32, patch_size=8)
every_operation = pytest.mark.parametrize("kind", OPERATIONS)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from inline_attention.integrations.transformers import register

    register()
    register()


def build(name: str, kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**VISION)
    config._attn_implementation = kind
    model = getattr(transformers, f"{name}Model")(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def recorded(monkeypatch: pytest.MonkeyPatch, kind: str) -> list[tuple[Any, ...]]:
    """What each call of the attention gets and returns, by a function registered around ours"""
    calls = []
    ours = transformers.AttentionInterface()[kind]

    def spy(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        out = ours(module, q, k, v, mask, **options)
        calls.append((q, k, v, mask, options["scaling"], out[0]))
        return out

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, kind, spy)
    return calls


@every_operation
@pytest.mark.parametrize("name", ["ViT", "Dinov2", "SiglipVision", "CLIPVision"])
def test_models_call_the_operation(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer, on the model's own q, k and v"""
    calls = recorded(monkeypatch, kind)
    model = build(name, kind)
    with torch.no_grad():
        out = model(pixel_values=images()).last_hidden_state
        softmax = build(name, "sdpa")(pixel_values=images()).last_hidden_state
    assert out.isfinite().all()
    assert out.shape == softmax.shape
    assert not torch.allclose(out, softmax)
    assert len(calls) == 2
    for q, k, v, mask, scaling, result in calls:
        assert mask is None
        expected = OPERATIONS[kind](*(x.transpose(1, 2) for x in (q, k, v)), scale=scaling)
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)


@every_operation
def test_a_model_trains(kind: str) -> None:
    model = build("ViT", kind).train()
    model(pixel_values=images()).last_hidden_state.square().sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for name, p in model.named_parameters() if "pooler" not in name
    )


def test_flat_scores_make_the_tangent_equal_to_softmax() -> None:
    """Queries of zero are their own anchor, so that nothing is approximated."""
    outs = []
    for kind in ("tangent", "sdpa"):
        model = build("ViT", kind)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "q_proj.weight" in name:
                    parameter.zero_()
            outs.append(model(pixel_values=images()).last_hidden_state)
    torch.testing.assert_close(outs[0], outs[1], atol=1e-10, rtol=1e-10)


@every_operation
def test_a_mask_over_tokens_reaches_the_operation(kind: str) -> None:
    """SigLIP's text tower is bidirectional, so padding does not change the tokens before it."""
    config = transformers.SiglipTextConfig(**SIZES, vocab_size=50, max_position_embeddings=8)
    config._attn_implementation = kind
    torch.manual_seed(0)
    model = transformers.SiglipTextModel(config).double().eval()
    words = torch.arange(8)[None] + 3
    mask = (torch.arange(8) < 5)[None].long()
    with torch.no_grad():
        padded = model(input_ids=words, attention_mask=mask).last_hidden_state[:, :5]
        alone = model(input_ids=words[:, :5]).last_hidden_state
        unmasked = model(input_ids=words).last_hidden_state[:, :5]
    torch.testing.assert_close(padded, alone, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(unmasked, alone)


def small_clip(**options: Any) -> Any:
    config = transformers.CLIPConfig(
        text_config=dict(**SIZES, vocab_size=50, max_position_embeddings=8, eos_token_id=49), vision_config=VISION
    )
    return transformers.CLIPModel._from_config(config, **options).eval()


def test_a_causal_tower_is_refused_and_the_advice_works() -> None:
    inputs = dict(input_ids=torch.arange(6)[None] + 3, pixel_values=images().float()[:1])
    with pytest.raises(ValueError, match=r"causal or has a mask over pairs.*'vision_config': 'inline'"):
        small_clip(attn_implementation="inline")(**inputs)
    model = small_clip(attn_implementation={"vision_config": "inline", "text_config": "sdpa"})
    assert model.vision_model.config._attn_implementation == "inline"
    assert model(**inputs).logits_per_image.isfinite().all()
    model = small_clip(attn_implementation="sdpa")
    model.vision_model.set_attn_implementation("inline")
    assert model(**inputs).logits_per_image.isfinite().all()


def test_what_cannot_work_is_refused() -> None:
    forward = transformers.AttentionInterface()["inline"]
    module = torch.nn.Identity()
    q = torch.randn(2, 2, 5, 4)
    whole = torch.ones(2, 5, dtype=torch.bool)
    for mask in (whole, whole.long(), whole[:, None, None]):
        torch.testing.assert_close(forward(module, q, q, q, mask)[0], forward(module, q, q, q, None)[0])
    for mask in (torch.ones(2, 1, 5, 5, dtype=torch.bool), torch.zeros(2, 1, 1, 5), torch.ones(5, 5).tril().bool()):
        with pytest.raises(ValueError, match=r"expected a mask over tokens, \(B, N\) = \(2, 5\)"):
            forward(module, q, q, q, mask)
    for options, message in (
        (dict(is_causal=True), "Identity is causal"),
        (dict(dropout=0.1), "dropout=0.1 of attention weights"),
        (dict(position_bias=q), "position_bias"),
        (dict(softcap=5.0), "softcap"),
    ):
        with pytest.raises(ValueError, match=message):
            forward(module, q, q, q, None, **options)
    with pytest.raises(ValueError, match="2 query heads share 1 key heads"):
        forward(module, q, q[:, :1], q[:, :1], None)
