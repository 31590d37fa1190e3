import csv
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as F

from inline_attention import create_model
from inline_attention.cli import main
from inline_attention.models.weights import save_weights
from inline_attention.tasks.classification.classifier import load_classifier

SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "img_size": 8}


def command(weights: object, *more: object) -> list[str]:
    return ["predict", "inline_deit_tiny", "--weights", *map(str, (weights, "--device", "cpu", *more))]


def expected_probabilities(weights: Path, image: Path) -> list[float]:
    model = load_classifier("inline_deit_tiny", str(weights)).model.eval()
    pixels = F.to_tensor(Image.open(image).convert("L").resize((8, 8), Image.Resampling.BICUBIC))
    with torch.no_grad():
        return model((pixels[None] - 0.3) / 0.4).softmax(1)[0].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_folder(weights: Path, images: Path, tmp_path: Path, workers: int, capsys, caplog) -> None:
    outputs = ("--json", tmp_path / "out.json", "--csv", tmp_path / "out.csv")
    assert main(command(weights, images, "--topk", 3, "--workers", workers, *outputs)) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert [entry["image"] for entry in result["predictions"]] == [
        str(images / name) for name in ("a.png", "b.jpg", "more/c.PNG")
    ]
    assert result["skipped_images"] == [{"path": str(images / "bad.png"), "reason": "empty file (0 bytes)"}]
    for entry in result["predictions"]:
        probabilities = expected_probabilities(weights, Path(entry["image"]))
        best = sorted(range(10), key=lambda label: -probabilities[label])[:3]
        assert [guess["label"] for guess in entry["guesses"]] == best
        assert [guess["name"] for guess in entry["guesses"]] == [str(label) for label in best]
        for guess in entry["guesses"]:
            assert guess["probability"] == pytest.approx(probabilities[guess["label"]], abs=1e-5)
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert len(rows) == 9
    assert rows[0]["rank"] == "1"
    assert rows[0]["name"] == result["predictions"][0]["guesses"][0]["name"]
    assert str(images / "a.png") in capsys.readouterr().out
    assert "bad.png: empty file" in caplog.text


def test_names_that_are_not_utf8(
    weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All results are written, to an output that is strictly UTF-8."""
    assert (sys.stdout.encoding.lower(), sys.stdout.errors) == ("utf-8", "strict")
    folder = os.fsencode(images)
    os.rename(folder + b"/a.png", folder + b"/caf\xe9.png")
    os.rename(folder + b"/bad.png", folder + b"/bad\xff.png")
    outputs = ("--json", tmp_path / "out.json", "--csv", tmp_path / "out.csv")
    assert main(command(weights, images, *outputs)) == 0
    assert r"caf\udce9.png" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["predictions"]) == 3
    assert [Path(image["path"]).name for image in result["skipped_images"]] == ["bad\\udcff.png"]
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 16


def test_files_in_the_order_given(weights: Path, images: Path, tmp_path: Path) -> None:
    names = ["more/c.PNG", "a.png"]
    arguments = (*(images / name for name in names), "--topk", 99, "--json", tmp_path / "out.json")
    assert main(command(weights, *arguments)) == 0
    predictions = json.loads((tmp_path / "out.json").read_text())["predictions"]
    assert [entry["image"] for entry in predictions] == [str(images / name) for name in names]
    assert all(len(entry["guesses"]) == 10 for entry in predictions)  # no more than there are
    assert sum(guess["probability"] for guess in predictions[0]["guesses"]) == pytest.approx(1)


def test_imagenet_names(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand classes without names are ImageNet's, in words."""
    model = create_model("inline_deit_tiny", **SMALL)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
        model.head.bias[207] = 9.0
    weights = save_weights(model, tmp_path / "imagenet.safetensors")
    assert main(command(weights, images / "a.png", "--topk", 1, "--json", tmp_path / "out.json")) == 0
    assert "golden retriever" in capsys.readouterr().out
    guess = json.loads((tmp_path / "out.json").read_text())["predictions"][0]["guesses"][0]
    assert (guess["label"], guess["name"], guess["description"]) == (207, "n02099601", "golden retriever")


def test_classes_without_names(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = save_weights(create_model("inline_deit_tiny", num_classes=4, **SMALL), tmp_path / "four.safetensors")
    assert main(command(weights, images / "a.png", "--topk", 1)) == 0
    assert capsys.readouterr().out.split("%")[1].strip() in "0123"


def test_weights_that_diverged(weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classifier = load_classifier(None, str(weights))
    with torch.no_grad():
        classifier.model.get_parameter("head.weight").fill_(torch.nan)
    diverged = save_weights(classifier.model, tmp_path / "nan.safetensors")
    assert main(command(diverged, images)) == 2
    assert "the model's outputs are not finite: its weights have diverged" in capsys.readouterr().err


def test_names_of_another_number_of_classes(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = create_model("inline_deit_tiny", num_classes=4, **SMALL)
    weights = save_weights(model, tmp_path / "w.safetensors", metadata={"class_names": '["cat", "dog"]'})
    assert main(command(weights, images / "a.png")) == 2
    assert "names 2 classes, but its model has 4 outputs" in capsys.readouterr().err


def test_errors(weights: Path, images: Path, tmp_path: Path, capsys, caplog) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((images / "gone.png",), "gone.png' does not exist"),
        (("https://host/cat.png",), "https://host/cat.png is an address"),
        ((tmp_path / "empty",), "no images in folder"),
        ((images, "--topk", 0), "--topk is 0; expected at least 1"),
        ((images, "--workers", -1), "--workers is -1; expected at least 0"),
        ((images, "--csv", "-"), "only --json takes - for standard output"),
        ((images / "bad.png",), "no image could be read"),
        ((images, "--csv", tmp_path / "gone" / "a.csv"), "a.csv' cannot be written: expected a file's name"),
    ):
        assert main(command(weights, *arguments)) == 2
        assert message in capsys.readouterr().err
    assert "empty file" in caplog.text


def test_a_model_without_a_classifier(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = save_weights(create_model("inline_deit_tiny", num_classes=0, **SMALL), tmp_path / "backbone.safetensors")
    assert main(["predict", "--weights", str(weights), "--device", "cpu", str(images)]) == 2
    assert "inline_deit_tiny has no classifier (num_classes=0)" in capsys.readouterr().err
