"""Gains by least squares, the cost of each layer, and hybrids."""

import math
from pathlib import Path

import pytest
import torch
from linearize_cases import CASES, own, shrink_logits, vit

from inline_attention.linearize import calibrate, calibration, layer_costs, linearize, restore
from inline_attention.linearize.calibration import widest_float
from inline_attention.linearize.convert import linearized_modules

OF_NAME = {case.name: case for case in CASES}
KINDS = [
    "vit_tiny_patch16_224", "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224", "softmax_pvt_tiny",
    "softmax_cswin_tiny",
]  # fmt: skip


@pytest.mark.parametrize(("attention", "anchors"), [("tangent", 1), ("tangent", 2), ("inline", 1), ("linear", 1)])
@pytest.mark.parametrize("name", KINDS)
def test_the_gain_is_the_one_of_least_error(name: str, attention: str, anchors: int) -> None:
    case = OF_NAME[name]
    model = case.model
    linearize(model, attention=attention, anchors=anchors)
    errors = calibrate(model, case.images())
    assert all(after <= before for before, after in errors.values())
    assert any(after < 0.99 * before for before, after in errors.values())
    fitted = {layer.name: layer.error for layer in layer_costs(model, case.images()).layers}
    assert fitted == pytest.approx({name: after for name, (_, after) in errors.items()}, rel=1e-4)
    for module in linearized_modules(model).values():  # any other gain is worse
        with torch.no_grad():
            module.gain += 0.01
    worse = {layer.name: layer.error for layer in layer_costs(model, case.images()).layers}
    assert all(worse[name] > error for name, error in fitted.items())


def test_softmax_mode_is_the_original_model() -> None:
    """Costs are measured against this mode. With every layer kept, it changes nothing."""
    for name in KINDS:
        case = OF_NAME[name]
        model = case.model
        with torch.no_grad():
            expected = model(case.images())
        linearize(model)
        for module in linearized_modules(model).values():
            module.observer = lambda module, call: module.softmax_form(call)
        with torch.no_grad():
            torch.testing.assert_close(model(case.images()), expected)


def test_a_residual_that_the_model_had_before_is_kept() -> None:
    case = own("deit", 3, attention="local_softmax")
    differences = []
    for factor in (2**-7, 2**-8):
        model, images = case.model, case.images()
        shrink_logits(model, factor)
        with torch.no_grad():
            expected = model(images)
            linearize(model)
            differences.append((model(images) - expected).norm().item())
    assert math.log2(differences[0] / differences[1]) == pytest.approx(2, abs=0.08)
    measured = []
    model.head.register_forward_hook(lambda module, args, output: measured.append(output))
    calibrate(model, images)  # with the outputs of softmax
    torch.testing.assert_close(measured[0], expected)
    restore(model)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected)


def test_costs_are_those_of_each_layer_alone() -> None:
    case = vit("vit_tiny_patch16_224", depth=3)
    model, images = case.model, case.images()
    with torch.no_grad():
        expected = model(images)
    linearize(model)
    costs = layer_costs(model, [images[:1], images[1:]])
    assert costs.images == 2
    for i, layer in enumerate(costs.layers):
        restore(model)
        linearize(model, keep_softmax=[j for j in range(3) if j != i])
        with torch.no_grad():
            found = model(images)
        spread = (expected - expected.mean(0)).square().sum()
        assert layer.name == f"blocks.{i}.attn"
        assert layer.change == pytest.approx(((found - expected).square().sum() / spread).item(), rel=1e-6)
        assert layer.agreement == (found.argmax(1) == expected.argmax(1)).double().mean().item()
        assert layer.error > 0


def test_the_table_and_the_picture_name_every_layer(tmp_path: Path) -> None:
    case = OF_NAME["vit_tiny_patch16_224"]
    model = case.model
    linearize(model)
    costs = layer_costs(model, case.images())
    assert all(layer.name in str(costs) for layer in costs.layers)
    drawn = costs.draw(tmp_path / "costs.svg").read_text()
    assert "<svg" in drawn


def test_images_get_the_precision_of_the_model() -> None:
    case = OF_NAME["vit_tiny_patch16_224"]
    model = case.model.bfloat16()
    linearize(model)
    errors = calibrate(model, case.images())
    assert all(after <= before for before, after in errors.values())
    with pytest.raises(ValueError, match="expected floats"):  # pixels that were not preprocessed
        calibrate(model, torch.zeros(1, 3, 48, 48, dtype=torch.uint8))


def test_auto_keeps_the_layers_that_cost_most() -> None:
    case = vit("vit_tiny_patch16_224", depth=3)
    model, images = case.model, case.images()
    linearize(model)
    costs = sorted(layer_costs(model, images).layers, key=lambda layer: layer.change)
    restore(model)
    report = linearize(model, keep_softmax="auto:2", images=images)
    assert [layer.name for layer in report.linear()] == [costs[0].name]
    with pytest.raises(ValueError, match="3 attentions"):
        linearize(case.model, keep_softmax="auto:4", images=images)
    with pytest.raises(ValueError, match="two or more different images"):
        linearize(case.model, keep_softmax="auto:1", images=images[:1])
    untouched = case.model
    with pytest.raises(ValueError, match="at least one image"):
        linearize(untouched, keep_softmax="auto:1", images=[])
    assert not hasattr(untouched, "linearization")


def test_an_interrupted_measurement_leaves_the_model_as_it_was() -> None:
    case = vit("vit_tiny_patch16_224", depth=3)
    model = case.model

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model.get_submodule("blocks.2").register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        linearize(model, keep_softmax="auto:1", images=case.images())
    assert not hasattr(model, "linearization")


def test_mps_has_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """There all sums are float32."""
    assert widest_float(torch.device("mps")) == torch.float32
    assert widest_float(torch.device("cpu")) == torch.float64
    monkeypatch.setattr(calibration, "widest_float", lambda device: torch.float32)
    case = OF_NAME["vit_tiny_patch16_224"]
    model, images = case.model.float(), case.images().float()
    linearize(model)
    monkeypatch.setattr(torch.Tensor, "double", None)
    assert all(after <= before for before, after in calibrate(model, images).values())
    assert all(0 < layer.error < 10 for layer in layer_costs(model, images).layers)
