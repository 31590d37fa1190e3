"""Folders in the layout of Ultralytics' classification data: train/, and val/ or test/, a folder for each class."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inline_attention.cli import main
from inline_attention.tasks.classification import load_classifier


def write_folder(root: Path, *splits: str) -> Path:
    """Dark and bright noise, which anything can tell apart."""
    rng = np.random.default_rng(0)
    for split in splits:
        for name, low in {"dark": 0, "bright": 160}.items():
            (root / split / name).mkdir(parents=True)
            for i in range(8):
                pixels = rng.integers(low, low + 96, (32, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.jpg")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("split", ["val", "test"])
def test_train_and_evaluate(split: str, tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", "train", split)
    chosen = [] if split == "val" else ["data.val_split=test"]
    run = tmp_path / "run"
    options = ["schedule.epochs=2", "data.workers=0", "log.tensorboard=false", "--device", "cpu"]
    assert main(["train", "finetune", "--data", str(data), "--output", str(run), *chosen, *options]) == 0
    best = run / "checkpoints" / "best.safetensors"
    assert load_classifier(None, best).class_names == ["bright", "dark"]
    trained = json.loads((run / "summary.json").read_text())
    results = ["--device", "cpu", "--json", str(tmp_path / "eval.json")]
    assert main(["eval", "--weights", str(best), "--data", str(data), "--split", split, *results]) == 0
    assert json.loads((tmp_path / "eval.json").read_text())["top1"] == trained["best_top1"] > 75


def test_without_val_the_error_names_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_folder(tmp_path / "data", "train", "test")
    assert main(["train", "finetune", "--data", str(data), "--output", str(tmp_path / "run"), "--device", "cpu"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "no split 'val' in" in shown
    assert "there is test, train. Name the splits (training: data.train_split, data.val_split;" in shown
