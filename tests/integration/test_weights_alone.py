"""A weights file is enough for every command: no model name, no class count, no image size."""

import json
from pathlib import Path

import pytest
import timm
import torch
import training_runs as _runs
from PIL import Image
from safetensors.torch import save_file

from inline_attention import create_model
from inline_attention.cli import main
from inline_attention.models.weights import load_model, save_weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weights file of a run on the digits. Its model differs from the registered one in every argument."""
    folder = tmp_path_factory.mktemp("run") / "run"
    settings = [
        "model.kwargs.depth=2", "model.kwargs.embed_dim=16", "model.kwargs.num_heads=2", "model.kwargs.patch_size=4",
        "schedule.epochs=1", "schedule.warmup_epochs=0", "data.workers=0", "log.tensorboard=false",
    ]  # fmt: skip
    with _runs.without_pictures():
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


def test_export(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--weights", str(weights), "--format", "pt2"]) == 0
    model = load_model(weights).eval()
    x = torch.randn(1, model.in_chans, *model.img_size)
    torch.testing.assert_close(torch.export.load("inline_deit_tiny.pt2").module()(x), model(x))
    assert main(["export", "--weights", str(weights), "--num-classes", "3"]) == 2
    assert "--num-classes 3: the weights decide" in capsys.readouterr().err


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


@pytest.fixture(
    scope="module", params=[pytest.param("softmax_deit_tiny", marks=pytest.mark.slow), "vit_tiny_patch16_224"]
)
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `inline linearize` on digits, with a teacher of this library and with one of timm."""
    folder, name = tmp_path_factory.mktemp("student"), request.param
    torch.manual_seed(0)
    arguments = {**SMALL, "num_classes": 10, "in_chans": 1}
    settings = ["data.workers=0", "data.batch_size=16", "match.steps=1", "schedule.epochs=1", "log.tensorboard=false"]
    path = folder / "teacher.safetensors"
    if name == "softmax_deit_tiny":
        save_weights(create_model(name, img_size=8, **arguments), path)
    else:  # a file of timm says nothing about its model
        save_file(timm.create_model(name, img_size=8, **arguments).state_dict(), path)
        settings += [f"model.kwargs={json.dumps(arguments)}", "data.img_size=8"]
    given = ["--weights", str(path), "--data", _runs.images(), "--device", "cpu"]
    assert main(["linearize", name, *given, "--output", str(folder / "run"), "--no-report", *settings]) == 0
    return folder / "run" / "student.safetensors"


SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 2}


def test_a_student(student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of a linearised model, in every command."""
    on_cpu = ["--device", "cpu"]
    model = load_model(student).eval()
    images = torch.randn(1, 1, 8, 8)
    assert model(images).shape == (1, 10)

    options = ["--data", _runs.images(), *on_cpu, "--workers", "0"]
    assert main(["eval", "--weights", str(student), *options, "--json", str(tmp_path / "eval.json")]) == 0
    result = json.loads((tmp_path / "eval.json").read_text())
    assert (result["img_size"], result["images"]) == ([8, 8], 41)

    Image.new("L", (8, 8), 128).save(tmp_path / "digit.png")
    capsys.readouterr()
    assert main(["predict", "--weights", str(student), str(tmp_path / "digit.png"), *on_cpu]) == 0
    assert capsys.readouterr().out.count("%") == 5

    assert main(["info", "--weights", str(student)]) == 0

    exported = tmp_path / "student.pt2"
    assert main(["export", "--weights", str(student), "--format", "pt2", "--output", str(exported)]) == 0
    torch.testing.assert_close(torch.export.load(exported).module()(images), model(images))

    timed = ["--contenders", "student", "--quick", "--infer", "--no-latency", "--img-sizes", "16", *on_cpu]
    assert main(["bench", "model", str(student), *timed, "--json", str(tmp_path / "bench.json")]) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["results"][0]["error"] is None

    assert main(["analyze", "rank", "--weights", str(student), "--output", str(tmp_path / "a"), *on_cpu]) == 0
    assert json.loads((tmp_path / "a" / "rank.json").read_text())["models"][0]["attention"] == "tangent"


def test_what_needs_a_model_of_this_library(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_own = "run" in student.parts and load_model(student).__class__.__module__.startswith("inline_attention")
    if not is_own:
        assert main(["export", "--weights", str(student), "--format", "pt2", "--dynamic-size"]) == 2
        assert "which is exported at one size" in capsys.readouterr().err


def test_a_file_that_does_not_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "other.pth")
    for command in (["info"], ["export"], ["eval", "--data", "digits"]):
        assert main([*command, "--weights", str(tmp_path / "other.pth")]) == 2
        assert "does not say which model it is for" in capsys.readouterr().err
    assert main(["info"]) == 2
    assert "there is neither a model nor a weights file" in capsys.readouterr().err
