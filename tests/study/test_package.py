"""Real rows of the grid, on data as small as they take, become the package's weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inline_attention import create_model
from inline_attention.cli import main
from inline_attention.models import shipped
from inline_attention.models.weights import read_metadata
from inline_attention.study.grid import Run
from inline_attention.study.package import PACKED_ROWS
from inline_attention.study.results import collect
from inline_attention.study.runner import GridRunner

SETTINGS = ["run.compile=false", "data.batch_size=50", "data.workers=0", "device=cpu"]
RUNS = [Run("tiny_imagenet", row, 1, 0, 4) for row in PACKED_ROWS.values()]


def make_images(root: Path) -> None:
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(100):
            (root / split / f"n{number:08}").mkdir(parents=True)
            pixels = noise.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / f"n{number:08}" / "0.png")


@pytest.mark.slow
def test_the_grid_makes_what_is_shipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "images")
    out, packed = tmp_path / "study", tmp_path / "packed"
    runner = GridRunner(out, paths={"tiny_imagenet": str(tmp_path / "images")}, settings=SETTINGS)
    assert runner.make(RUNS).failed == []
    assert main(["study", "pack", str(out), "--to", str(packed)]) == 0
    assert {path.stem for path in packed.iterdir()} == set(shipped.SHIPPED)
    assert sum(path.stat().st_size for path in packed.iterdir()) < 15e6
    results = collect(out)
    setting = results.main_setting
    assert setting is not None
    for name, row in PACKED_ROWS.items():
        about, result = read_metadata(packed / f"{name}.safetensors"), results.find(setting, row)
        assert result is not None
        assert about["top1"] == f"{result.top1:.2f}"
        assert about["recipe"].startswith("inline train study --data TINY_IMAGENET --seed 0")
        assert "of 100 validation images" in about["data"]
    x = torch.randn(2, 3, 64, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "FOLDER", packed)
        assert create_model("inline_deit_study", pretrained=True).eval()(x).shape == (2, 100)
    (out / RUNS[0].name / "checkpoints" / "last.safetensors").unlink()
    assert main(["study", "pack", str(out), "--to", str(packed)]) == 2
    assert "last.safetensors is missing: softmax_deit_study is made from it" in capsys.readouterr().err
