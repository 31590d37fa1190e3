"""Gains, softmax layers and costs of the small classifier, on two images of it."""

import json
from pathlib import Path

import pytest
from PIL import Image

from inline_attention.tasks.classification.classifier import load_classifier
from study import calibration, expansion
from study.__main__ import main


def make_images(folder: Path) -> None:
    names = load_classifier(expansion.TEACHER, "pretrained").class_names
    assert names is not None
    for split in ("train", "val"):
        for name, colour in zip(names[:2], ("red", "blue"), strict=True):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (64, 64), colour).save(folder / split / name / "0.png")


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "data")
    record, picture = tmp_path / "table.json", tmp_path / "costs.png"
    cases = [("softmax", 0, False), ("tangent", 1, True)]
    monkeypatch.setattr(calibration, "CASES", cases)
    words = ["calibration", "--data", str(tmp_path / "data"), "--workers", "0", "--max-images", "2"]
    words += ["--json", str(record), "--picture", str(picture)]
    assert main(words) == 0
    content = json.loads(record.read_text())
    assert [(row["attention"], row["softmax_layers"], row["gains"]) for row in content["rows"]] == cases
    assert [len(row["kept"]) for row in content["rows"]] == [0, 1]
    costs = {cost["name"]: cost["change"] for cost in content["costs"]}
    assert len(costs) == 7
    assert content["rows"][1]["kept"] == [max(costs, key=lambda name: costs[name])]
    assert picture.stat().st_size > 1000

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("it is in the record")

    monkeypatch.setattr(calibration, "evaluate", fail)
    monkeypatch.setattr(calibration, "measure_costs", fail)
    before = record.read_text()
    assert main(words) == 0  # continued, with nothing left to do
    assert record.read_text() == before
    capsys.readouterr()
    assert main([*words, "--max-images", "1"]) == 2
    assert "another number of images; name another file" in capsys.readouterr().err
