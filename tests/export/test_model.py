"""Files that run without this library, with any number of images of any size."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small import FAMILIES, create_shallow, create_small, image, shrunk

import inline_attention
from inline_attention.cli import export as cli_export
from inline_attention.export import FORMATS, Check, Format, export_model
from inline_attention.export.model import ROUTES
from inline_attention.export.onnx_files import ONNX
from inline_attention.linearize import linearize
from inline_attention.models import DeiT

ALL = [f"{kind}_{family}_tiny" for kind in ("inline", "softmax") for family in FAMILIES]


# Tracing dynamic sizes takes ten seconds a model, and writing ONNX as long again.
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_onnx_with_dynamic_batch_and_size(name: str, tmp_path: Path) -> None:
    model = create_shallow(name)
    exported = export_model(model, tmp_path / "m.onnx", format="onnx", dynamic_batch=True, dynamic_size=True)
    assert [check.shape[0] for check in exported.checks] == [1, 3, 1]
    assert all(check.passed for check in exported.checks)
    assert str(model.minimum_size()) in exported.covers
    run = ONNX.load(exported.path, request=None)
    for size in ((96, 96), (130, 97), (model.minimum_size(), 224)):
        x = image(*size)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_pt2_with_dynamic_batch_and_size(name: str, tmp_path: Path) -> None:
    model = create_shallow(name)
    exported = export_model(model, tmp_path / "m.pt2", format="pt2", dynamic_batch=True, dynamic_size=True)
    assert all(check.passed for check in exported.checks)
    loaded = torch.export.load(exported.path).module()
    x = image(130, 97)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("format", ["onnx", "pt2", "torchscript", "hf"])
def test_fixed_size(format: Format, tmp_path: Path) -> None:
    model = create_shallow("inline_deit_tiny")
    exported = export_model(model, tmp_path / "sub" / "file", format=format, img_size=(48, 65))
    assert exported.covers == ("any batch and size, as the model itself" if format == "hf" else "1 × 3 × 48 × 65")
    assert [check.shape for check in exported.checks] == [(1, 3, 48, 65)]
    assert exported.checks[0].passed
    if format != "hf":  # the folder holds a model of any size
        assert json.loads(exported.about["input_size"]) == [3, 48, 65]


@pytest.mark.slow
@pytest.mark.parametrize("keep_softmax", [None, [0]])
def test_onnx_of_a_linearised_model_of_timm(keep_softmax: list[int] | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small: dict[str, Any] = dict(img_size=48, depth=2, embed_dim=24, num_heads=2, num_classes=5)
    model = timm.create_model("vit_small_patch14_reg4_dinov2", patch_size=16, **small).eval()
    linearize(model, keep_softmax=keep_softmax)
    for name, parameter in model.named_parameters():
        if "local.fc2" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    exported = export_model(model, tmp_path / "m.onnx", format="onnx", dynamic_batch=True)
    assert all(check.passed for check in exported.checks)
    x = torch.randn(3, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(ONNX.load(exported.path, request=None)(x), model(x), atol=1e-4, rtol=0)


def test_several_labels_without_names(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(format="hf", multi_label=True)
    assert export_model(create_shallow("inline_deit_tiny"), tmp_path, **options).about["multi_label"] == "true"
    assert json.loads((tmp_path / "config.json").read_text())["problem_type"] == "multi_label_classification"


def test_one_number_is_a_square(tmp_path: Path) -> None:
    exported = export_model(create_shallow("inline_deit_tiny"), tmp_path / "m.pt", format="torchscript", img_size=48)
    assert exported.covers == "1 × 3 × 48 × 48"


def test_hf_folder_of_half_precision(tmp_path: Path) -> None:
    exported = export_model(create_shallow("inline_deit_tiny").bfloat16(), tmp_path / "folder", format="hf")
    assert [check.difference for check in exported.checks] == [0]


def test_smallest_sizes() -> None:
    """Of the published models: DeiT and PVT any, Swin above its window in the last stage, CSwin above its stripes."""
    expected = {"inline_deit_tiny": 32, "inline_pvt_tiny": 32, "inline_swin_tiny": 7 * 32 + 1}
    expected |= {"inline_cswin_tiny": 7 * 16 + 1, "softmax_pvt_tiny": 32}
    for name, smallest in expected.items():
        with torch.device("meta"):
            assert inline_attention.create_model(name).minimum_size() == smallest


@pytest.mark.parametrize("format", [name for name in FORMATS if ROUTES[name].packages])
def test_a_missing_converter(format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ROUTES[format].packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=re.escape(f"pip install '{ROUTES[format].install}'")):
        export_model(create_shallow("inline_deit_tiny"), tmp_path / "m", format=format)
    assert not list(tmp_path.iterdir())


def test_extras_exist() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", project, flags=re.MULTILINE)
    for route in ROUTES.values():
        if match := re.fullmatch(r"inline-attention\[(\w+)\]", route.install):
            assert match[1] in extras


def test_the_command_has_all_formats() -> None:
    assert cli_export.FORMATS == FORMATS


def test_errors(tmp_path: Path) -> None:
    model = create_small("inline_swin_tiny")
    with pytest.raises(ValueError, match="format='tflite'; expected one of onnx, pt2, torchscript"):
        export_model(model, tmp_path / "m", format="tflite")
    with pytest.raises(ValueError, match="format='torchscript' takes no dynamic batch or size; onnx, pt2, pt2-int8"):
        export_model(model, tmp_path / "m", format="torchscript", dynamic_batch=True)
    with pytest.raises(ValueError, match="there are 2 class names for the 5 classes"):
        export_model(model, tmp_path / "m", class_names=["a", "b"])
    with pytest.raises(ValueError, match="preprocessing has size; expected mean, std"):
        export_model(model, tmp_path / "m", preprocessing={"size": 224})
    with pytest.raises(ValueError, match="with dynamic sizes begins at 65"):
        export_model(model, tmp_path / "m", dynamic_size=True, img_size=(64, 64))
    with pytest.raises(ValueError, match=r"img_size=\(0, 5\); expected a positive integer or a pair"):
        export_model(model, tmp_path / "m", img_size=(0, 5))
    with pytest.raises(ValueError, match=r"in torch\.bfloat16; .*: call model\.float\(\)"):
        export_model(create_small("inline_swin_tiny").bfloat16(), tmp_path / "m")
    with pytest.raises(ValueError, match=r"the DeiT has no pretrained_cfg, .*: build it with create_model"):
        export_model(DeiT(**shrunk("inline_deit_tiny")).eval(), tmp_path / "m")
    with pytest.raises(ValueError, match="on the meta device"):
        export_model(create_small("inline_swin_tiny").to("meta"), tmp_path / "m")
    with pytest.raises(ValueError, match=r"call model\.eval"):
        export_model(model.train(), tmp_path / "m")
    assert not Check((1,), float("nan")).passed
    assert not list(tmp_path.iterdir())
