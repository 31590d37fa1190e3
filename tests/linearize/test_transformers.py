"""Vision models of transformers, where it is installed."""

import math
from typing import Any

import pytest
import torch
from on_use import OnUse
from torch import nn

from inline_attention.linearize import linearize, restore

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
