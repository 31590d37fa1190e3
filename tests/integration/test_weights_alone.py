"""A weights file is enough for every command: no model name, no class count, no image size."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from inline_attention.cli import main
from inline_attention.models.weights import load_model


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run on the digits with a model that differs from the registered one in everything."""
    folder = tmp_path_factory.mktemp("run") / "run"
    settings = [
        "model.kwargs.depth=2", "model.kwargs.embed_dim=16", "model.kwargs.num_heads=2", "model.kwargs.patch_size=4",
        "schedule.epochs=1", "schedule.warmup_epochs=0", "data.workers=0", "log.tensorboard=false",
    ]  # fmt: skip
    assert main(["train", "quickstart", "--device", "cpu", "--output", str(folder), *settings]) == 0
    return folder / "checkpoints" / "last.safetensors"


def test_eval(weights: Path, tmp_path: Path) -> None:
    options = ["--data", "digits", "--device", "cpu", "--workers", "0"]
    assert main(["eval", "--weights", str(weights), *options, "--json", str(tmp_path / "alone.json")]) == 0
    named = ["eval", "inline_deit_tiny", "--weights", str(weights), *options]
    assert main([*named, "--json", str(tmp_path / "named.json")]) == 0
    alone, by_name = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "named"))
    assert alone["model"] == "inline_deit_tiny"
    assert alone["top1"] == by_name["top1"]


def test_predict(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (8, 8), 128).save(tmp_path / "digit.png")
    assert main(["predict", "--weights", str(weights), str(tmp_path / "digit.png"), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("%") == 5


def test_export(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--weights", str(weights), "--format", "pt2"]) == 0
    model = load_model(weights).eval()
    x = torch.randn(1, model.in_chans, *model.img_size)
    torch.testing.assert_close(torch.export.load("inline_deit_tiny.pt2").module()(x), model(x))
    assert main(["export", "--weights", str(weights), "--num-classes", "3"]) == 2


def test_info(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--weights", str(weights), "--json", "-"]) == 0
    stages = json.loads(capsys.readouterr().out)
    model = load_model(weights)
    assert sum(stage["params"] for stage in stages) == sum(p.numel() for p in model.parameters())
    assert stages[-1]["shape"] == [10]


def test_analyze(weights: Path, tmp_path: Path) -> None:
    options = ["--data", "digits", "--max-images", "4", "--device", "cpu", "--workers", "0", "--output", str(tmp_path)]
    assert main(["analyze", "rank", "--weights", str(weights), *options]) == 0
    assert (tmp_path / "rank.png").exists()


def test_convert(weights: Path, tmp_path: Path) -> None:
    assert main(["convert", str(weights), str(tmp_path / "copy.safetensors")]) == 0
    assert load_model(tmp_path / "copy.safetensors").img_size == load_model(weights).img_size


def test_a_file_that_does_not_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "other.pth")
    for command in (["info"], ["export"], ["eval", "--data", "digits"]):
        assert main([*command, "--weights", str(tmp_path / "other.pth")]) == 2
        assert "does not say which model it is for" in capsys.readouterr().err
    assert main(["info"]) == 2
    assert "there is neither a model nor a weights file" in capsys.readouterr().err
