"""The commands that show and export models, and how errors reach the shell."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch

from inline_attention import __version__, create_model, linearize, list_models, restore, save_weights
from inline_attention.cli import main
from inline_attention.models import deit


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert __version__ in out
    assert all(f"\n{name} " in out for name in ("torch", "timm", "triton", "onnxruntime", "cpu"))
    assert "s3cret" not in out
    assert str(Path.home()) not in out
    assert str(Path.cwd()) not in out


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in list_models())
    assert main(["models", "*swin_base*", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in facts] == list_models("*swin_base*")
    assert facts[0] == dict(
        name="inline_swin_base",
        top1=84.1,
        weights=True,
        img_size=224,
        attention="I I I:2 S",
        params=88_350_120,
        macs=facts[0]["macs"],
    )


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "inline_pvt_tiny", "--img-size", "64", "96"]) == 0
    out = capsys.readouterr().out
    assert "inline_pvt_tiny at 64×96" in out
    assert "16 × 24 × 64" in out
    assert "12.03M" in out
    assert main(["info", "inline_pvt_tiny", "--json", "-"]) == 0
    stages = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in stages] == ["stem", "stage 1", "stage 2", "stage 3", "stage 4", "head"]
    assert stages[1]["shape"] == [56, 56, 64]


def test_info_of_a_student_of_timm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = dict(depth=2, embed_dim=48, num_heads=2)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, **arguments)
    costs = []
    for local_residual in (False, True):
        linearize(model, arguments=arguments, local_residual=local_residual)
        path = save_weights(model, tmp_path / "student.safetensors")
        assert main(["info", "--weights", str(path), "--json", "-"]) == 0
        costs += json.loads(capsys.readouterr().out)
        parameters = sum(p.numel() for p in model.parameters())
        assert (costs[-1]["name"], costs[-1]["shape"], costs[-1]["params"]) == ("model", [5], parameters)
        restore(model)
    from_mean = 2 * (2 * (1 + 9) * 24 * 24 + 48 * 48)  # of two layers: the local weight of two heads, the mean query
    assert costs[1]["macs"] - costs[0]["macs"] == from_mean + 2 * 9 * 48 * 17  # 16 patches and a class token
    assert main(["info", "--weights", str(path), "--img-size", "32", "96"]) == 0
    out = capsys.readouterr().out
    assert "linearised vit_tiny_patch16_224 at 32×96" in out
    assert "stage" in out


def test_export(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deit, "STUDY", {**deit.STUDY, "depth": 1})
    path = tmp_path / "m.pt2"
    arguments = ["export", "inline_deit_study", "--format", "pt2", "--img-size", "32", "48", "--output", str(path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert path.exists()
    assert "covers:  1 × 3 × 32 × 48" in out
    assert "weights: random" in out
    assert "inside:  no class names; mean [0.485, 0.456, 0.406]" in out
    assert re.search(r"check:   1 × 3 × 32 × 48: max \|file − model\| = \d\.\d\de[-+]\d\d ok", out)


@pytest.mark.slow
def test_export_with_the_weights_of_the_package(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    arguments = ["export", "inline_deit_study", "--format", "pt2", "--weights", "pretrained", "--output", str(path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "random" not in out
    assert "inside:  the names of 100 classes" in out
    x = torch.rand(1, 3, 64, 64)
    model = create_model("inline_deit_study", pretrained=True).eval()
    torch.testing.assert_close(torch.export.load(path).module()(x), model(x))


def test_export_fails_loudly(
    weights: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inline_attention.export.route.TOLERANCE", -1.0)
    arguments = ["export", "--weights", str(weights), "--format", "pt2"]
    assert main([*arguments, "--output", str(tmp_path / "m.pt2")]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models", "vgg*"], "inline models: no model matches 'vgg*'"),
        (["models", "inline_dit_tiny"], "no model matches 'inline_dit_tiny'; did you mean inline_deit_tiny"),
        (["models", "--json", "/dev/null/x.json"], "'/dev/null/x.json' cannot be written"),
        (["info", "inline_swin"], "inline info: there is no model 'inline_swin'; did you mean"),
        (["info", "resnet18"], "resnet18 is a model of timm, not one of this library"),
        (
            ["info", "inline_deit_tiny", "--img-size", "0", "3"],
            "--img-size is 0 3; expected a side, or height and width",
        ),
        (["info", "best.safetensors"], "no model 'best.safetensors'; a file of weights is given with --weights"),
        (["predict", "photo.png", "best.safetensors"], "'best.safetensors' is a file of weights, not an image"),
        (["train", "softmax_deit_tiny"], "`finetune model.name=softmax_deit_tiny` trains this model"),
        (["export", "inline_deit_tiny", "--weights", "none.safetensors"], "none.safetensors"),
        (["export", "inline_deit_tiny", "--output", "/dev/null/m.onnx"], "'/dev/null/m.onnx' cannot be written"),
        (["export", "inline_deit_tiny", "--num-classes", "-3"], "--num-classes -3: expected 0 or more"),
        (
            ["export", "inline_deit_tiny", "--output", "m.pt2"],
            "--output m.pt2 has the ending of another format than --format onnx",
        ),
        (
            ["predict", "inline_dit_study", "photo.png"],
            "no file, folder or model 'inline_dit_study'; did you mean inline",
        ),
        (
            ["bench", "model", "inline_dit_tiny"],
            "there is no model or file inline_dit_tiny; did you mean inline_deit_tiny",
        ),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
