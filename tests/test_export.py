"""Files that run without this library, with any number of images of any size."""

from pathlib import Path

import pytest
import torch
from small import FAMILIES, create_shallow, create_small, image

import inline_attention
from inline_attention import export
from inline_attention.export import Check, export_model

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
    run = export._load_onnx(exported.path)
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


@pytest.mark.parametrize("format", export.FORMATS)
def test_fixed_size(format: export.Format, tmp_path: Path) -> None:
    model = create_shallow("inline_deit_tiny")
    exported = export_model(model, tmp_path / "sub" / "file", format=format, img_size=(48, 65))
    assert exported.covers == "1 × 3 × 48 × 65"
    assert [check.shape for check in exported.checks] == [(1, 3, 48, 65)]
    assert exported.checks[0].passed


def test_smallest_sizes() -> None:
    """Of the published models: DeiT and PVT any, Swin above its window in the last stage, CSwin above its stripes."""
    expected = {"inline_deit_tiny": 32, "inline_pvt_tiny": 32, "inline_swin_tiny": 7 * 32 + 1}
    expected |= {"inline_cswin_tiny": 7 * 16 + 1, "softmax_pvt_tiny": 32}
    for name, smallest in expected.items():
        with torch.device("meta"):
            assert inline_attention.create_model(name).minimum_size() == smallest


def test_errors(tmp_path: Path) -> None:
    model = create_small("inline_swin_tiny")
    with pytest.raises(ValueError, match="format='tflite'; expected one of onnx, pt2"):
        export_model(model, tmp_path / "m", format="tflite")
    with pytest.raises(ValueError, match="with dynamic sizes begins at 65"):
        export_model(model, tmp_path / "m", dynamic_size=True, img_size=(64, 64))
    with pytest.raises(ValueError, match=r"call model\.eval"):
        export_model(model.train(), tmp_path / "m")
    assert not Check((1,), float("nan")).passed
    assert not list(tmp_path.iterdir())
