"""Vision models of transformers, where it is installed."""

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from on_use import OnUse
from torch import nn

from inline_attention import load_model, save_weights
from inline_attention.linearize import calibrate, layer_costs, linearize, restore

transformers = OnUse("transformers", minversion="4.51")

SMALL: dict[str, Any] = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=48, patch_size=16
)
NAMES = ["ViT", "Dinov2", "SiglipVision"]


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**SMALL)).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def images(height: int = 48, width: int = 48) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, height, width, dtype=torch.float64)


def run(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    # DINOv2 takes any size without being asked, and in older releases it has no such argument.
    any_size = {"interpolate_pos_encoding": True} if "Dinov2" not in type(model).__name__ else {}
    with torch.no_grad():
        return model(pixels, **any_size).last_hidden_state


@pytest.mark.parametrize("attention", ["inline", "tangent"])
@pytest.mark.parametrize("name", NAMES)
def test_the_difference_shrinks_with_the_square_of_the_logits(name: str, attention: str) -> None:
    differences = []
    for factor in (2**-7, 2**-8):
        model = build(name)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if ".q_proj." in parameter_name or ".query." in parameter_name:
                    parameter.mul_(factor)
        expected = run(model, images(32, 80))
        report = linearize(model, attention=attention)
        assert len(report.linear()) == 2
        differences.append((run(model, images(32, 80)) - expected).norm().item())
    assert math.log2(differences[0] / differences[1]) == pytest.approx(2, abs=0.08)


@pytest.mark.parametrize("name", NAMES)
def test_weights_stay_and_restoring_gives_the_model_back(name: str) -> None:
    model = build(name)
    before, expected = dict(model.named_parameters()), run(model, images())
    linearize(model)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(".local.fc" in name for name in after.keys() - before.keys())
    assert not torch.equal(run(model, images()), expected)
    model(images()).last_hidden_state.square().mean().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".local.fc2." in n)
    restore(model)
    assert torch.equal(run(model, images()), expected)


def test_siglips_pooling_is_left_alone() -> None:
    report = linearize(build("SiglipVision"))
    assert any("it pools" in layer.action for layer in report.layers)


@pytest.mark.parametrize("keep_softmax", [None, [0]])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_exported_whole(name: str, keep_softmax: list[int] | None) -> None:
    model = build(name)
    linearize(model, keep_softmax=keep_softmax)
    expected = model(images()).last_hidden_state
    exported = torch.export.export(model, (images(),)).module()(images())
    torch.testing.assert_close(exported.last_hidden_state, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_compiled_to_one_graph(name: str) -> None:
    model = build(name)
    linearize(model, keep_softmax=[0])
    sizes = (images(), images(32, 80))
    expected = [run(model, pixels) for pixels in sizes]
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    for pixels, out in zip(sizes, expected, strict=True):
        torch.testing.assert_close(run(model, pixels), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_runs_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model = build(name)
    linearize(model, keep_softmax=[0])
    expected = run(model, images())
    out = run(model.to(dtype), images().to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = build(name).float()
    linearize(model)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    twin = build(name).float()
    linearize(twin)
    load_model(save_weights(model, tmp_path / "student.safetensors"), model=twin)
    assert torch.equal(run(twin, images().float()), run(model, images().float()))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_over_tokens_reaches_every_attention(implementation: str) -> None:
    model = build("ViT")
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        pytest.skip("this release of transformers has no such argument")
    model.set_attn_implementation(implementation)
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 5:] = 0
    linearize(model, keep_softmax=[0], local_residual=False)
    pixels, changed = images(), images()
    changed[1, :, -16:] += 1  # the last row of patches, which the second image does not have
    with torch.no_grad():
        out, other = (model(x, attention_mask=mask).last_hidden_state for x in (pixels, changed))
        seen = model(changed).last_hidden_state
    torch.testing.assert_close(out[1, :5], other[1, :5])
    assert not torch.allclose(other[1, :5], seen[1, :5])


@pytest.mark.parametrize("name", NAMES)
def test_configurations_are_restored(name: str) -> None:
    model = build(name)
    before = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    linearize(model, keep_softmax="auto:1", images=images())
    for twin in (model, copy.deepcopy(model)):
        restore(twin)
        assert {m.config._attn_implementation for m in twin.modules() if hasattr(m, "config")} == {"sdpa"}
    assert all(model.get_submodule(name).config is config for name, config in before.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_a_head_is_calibrated_and_measured(name: str) -> None:
    model = build(name)
    linearize(model)
    errors = calibrate(model, images())
    assert all(after <= before for before, after in errors.values())
    costs = layer_costs(model, images())
    assert all(layer.change > 0 and layer.agreement is None for layer in costs.layers)


def test_the_costs_of_a_classifier_are_those_of_its_logits() -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SMALL, num_labels=5)
    model = transformers.ViTForImageClassification(config).double().eval()
    linearize(model)
    assert all(layer.agreement is not None for layer in layer_costs(model, images()).layers)


def test_a_whole_siglip_is_refused_with_advice_to_take_its_vision_model() -> None:
    sizes = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    text = {**sizes, "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 8, "projection_size": 24}
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=SMALL))
    for local_residual in (True, False):
        with pytest.raises(ValueError, match=r"linearize\(model.vision_model\)"):
            linearize(model, local_residual=local_residual)
    linearize(model.vision_model)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model(input_ids=tokens, pixel_values=images().float()).logits_per_image.sum().backward()
