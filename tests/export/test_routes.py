"""Every format on every family, as docs/export.md says, and what each file says about itself."""

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from small import FAMILIES, create_shallow

from inline_attention.export import FORMATS, Exported, Format, export_model
from inline_attention.export.model import ROUTES

CLASSES = ["ant", "bee", "great cat", "hund & katze", "eel"]
PREPROCESSING = dict(
    mean=(0.5, 0.25, 0.125), std=(0.25, 0.5, 1.0), interpolation="bilinear", crop_pct=0.75, crop_mode="center"
)
PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def table() -> dict[str, str]:
    """format → what the page says about the images that a file takes"""
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(.+?)` \| [^|]* \| (any|one) size \|", text, re.MULTILINE))


def skip_without(format: str) -> None:
    for package in ROUTES[format].packages:
        pytest.importorskip(package, reason=f"{format} needs {package}, which is not installed")


def test_the_table_is_complete() -> None:
    assert list(table()) == list(FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_the_table_is_true(format: Format, family: str, tmp_path: Path) -> None:
    skip_without(format)
    model, path = create_shallow(f"inline_{family}_tiny"), tmp_path / f"file{ROUTES[format].suffix}"
    is_any = table()[format] == "any"
    assert ROUTES[format].is_dynamic == is_any
    exported = export_model(model, path, format=format, class_names=CLASSES, dynamic_batch=is_any, dynamic_size=is_any)
    assert [check.shape[0] for check in exported.checks] == ([1, 3, 1] if is_any else [1])
    assert all(check.passed for check in exported.checks), exported.checks


# What a file says. Each reads it with the format's own library.


def read_onnx(path: Path) -> dict[str, str]:
    import onnx

    model = onnx.load(path)
    (image,) = model.graph.input
    assert [d.dim_param or d.dim_value for d in image.type.tensor_type.shape.dim] == ["batch", 3, "height", "width"]
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    return {entry.key: entry.value for entry in model.metadata_props}


def read_pt2(path: Path) -> dict[str, str]:
    files = {"metadata.json": ""}
    torch.export.load(path, extra_files=files)
    return json.loads(files["metadata.json"])


def read_torchscript(path: Path) -> dict[str, str]:
    files = {"metadata.json": ""}
    torch.jit.load(path, _extra_files=files)
    return json.loads(files["metadata.json"])


def read_openvino(path: Path) -> dict[str, str]:
    import openvino

    model = openvino.Core().read_model(path)
    assert [str(dim) for dim in model.inputs[0].partial_shape] == ["?", "3", "?", "?"]
    return {key: value.astype(str) for key, value in model.rt_info["model_info"].items()}


def read_coreml(path: Path) -> dict[str, str]:
    import coremltools

    model = coremltools.models.MLModel(str(path), skip_model_load=True)
    description = model.get_spec().description
    assert description.input[0].type.WhichOneof("Type") == "imageType"
    assert description.predictedFeatureName == "classLabel"
    return dict(model.user_defined_metadata)


def read_litert(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.read("labels.txt").decode().split("\n") == CLASSES
        return json.loads(archive.read("metadata.json"))


def read_hf(path: Path) -> dict[str, str]:
    config = json.loads((path / "config.json").read_text())
    cfg: dict[str, Any] = config["pretrained_cfg"]
    lists = {key: json.dumps(cfg[key]) for key in ("input_size", "mean", "std")}
    lists["class_names"] = json.dumps(config["label_names"])
    return lists | {key: str(cfg[key]) for key in ("interpolation", "crop_pct", "crop_mode")}


READERS = {
    "onnx": read_onnx, "pt2": read_pt2, "pt2-int8": read_pt2, "torchscript": read_torchscript,
    "openvino": read_openvino, "coreml": read_coreml, "litert": read_litert, "hf": read_hf,
}  # fmt: skip
FAST = ("torchscript", "hf")


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("format", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in FORMATS])
def test_what_a_file_says(format: Format, tmp_path: Path) -> None:
    skip_without(format)
    is_any = ROUTES[format].is_dynamic
    exported: Exported = export_model(
        create_shallow("inline_deit_tiny"), tmp_path / f"file{ROUTES[format].suffix}", format=format,
        class_names=CLASSES, preprocessing=PREPROCESSING, dynamic_batch=is_any, dynamic_size=is_any,
    )  # fmt: skip
    about = READERS[format](exported.path)
    assert json.loads(about["class_names"]) == CLASSES
    assert json.loads(about["mean"]) == list(PREPROCESSING["mean"])
    assert json.loads(about["std"]) == list(PREPROCESSING["std"])
    assert json.loads(about["input_size"]) == [3, 64, 64]
    assert {key: about[key] for key in ("interpolation", "crop_pct", "crop_mode")} == dict(
        interpolation="bilinear", crop_pct="0.75", crop_mode="center"
    )


@pytest.mark.slow
def test_int8_files_are_smaller_and_need_no_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("pt2-int8")
    from small import create_small

    model = create_small("inline_deit_tiny", embed_dim=256, depth=1)
    files = {name: export_model(model, tmp_path / name, format=name) for name in ("pt2", "pt2-int8")}
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    saved = files["pt2"].path.stat().st_size - files["pt2-int8"].path.stat().st_size
    assert saved > 2.5 * weights  # of the 3 bytes that each loses
    assert re.fullmatch(
        r"int8 weights change the outputs by [0-2]\.\d% of their norm, on noise", files["pt2-int8"].note
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert torch.export.load(files["pt2-int8"].path).module()(torch.zeros(1, 3, 64, 64)).shape == (1, 5)
