"""The backbones under segmentation heads: commands, the table, and real runs that are as small as they can be."""

import json
from pathlib import Path

import pytest
import shapes

from inline_attention import create_model, save_weights
from study import segmentation
from study.__main__ import main

TINY = (
    "model.kwargs={embed_dim: 8, depths: [1, 1, 1, 1], num_heads: [1, 2, 2, 4]}", "model.head_kwargs={dim: 8}",
    "data.crop=32", "data.batch_size=8", "data.workers=0", "data.ignore_index=255", "schedule.steps=2",
    "schedule.warmup_steps=1", "log.tensorboard=false", "device=cpu", "run.compile=false",
)  # fmt: skip


def test_four_models_and_three_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["segment", "--data", "camvid11", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(set(lines)) == 12
    assert lines[0] == (
        "inline segment train camvid_fpn --data camvid11 --seed 0 --output runs/camvid/inline_pvt_tiny-s0 "
        "--resume auto model.name=inline_pvt_tiny "
        "model.weights=runs/study/tiny_imagenet-p4-e40-inline_pvt_tiny-s0/checkpoints/last.safetensors"
    )


def test_missing_backbones_and_wrong_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["segment", "--data", str(tmp_path), "--backbones", str(tmp_path)]) == 2
    assert "e40-softmax_swin_tiny-s0/checkpoints/last.safetensors: no such file" in capsys.readouterr().err
    assert main(["segment", "--data", str(tmp_path), "--models", "resnet50"]) == 2
    assert "there is no backbone resnet50" in capsys.readouterr().err


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """Seeds differ by far more than the models."""
    miou = {"inline_swin_tiny": [41.0, 46.1, 51.2], "softmax_swin_tiny": [40.0, 45.0, 50.0], "inline_pvt_tiny": [30.0]}
    for model, values in miou.items():
        for seed, value in enumerate(values):
            folder = tmp_path / f"{model}-s{seed}"
            folder.mkdir()
            summary = {"val_miou": value, "val_macc": value + 5, "seconds": 9.0}
            (folder / "summary.json").write_text(json.dumps(summary))
    text = segmentation.write_results(tmp_path)
    assert "| inline_swin_tiny − softmax_swin_tiny | +1.10 ± 0.25" in text
    assert "46.10 ± 5.10" in text
    assert "| 30.00 " in text
    assert "inline_pvt_tiny −" not in text  # softmax is missing
    found = json.loads((tmp_path / "segmentation.json").read_text())
    assert [(row["model"], row["seeds"]) for row in found["rows"]] == [
        ("inline_pvt_tiny", [0]), ("inline_swin_tiny", [0, 1, 2]), ("softmax_swin_tiny", [0, 1, 2]),
    ]  # fmt: skip


@pytest.mark.slow
def test_runs_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backbones, out, models = tmp_path / "study", tmp_path / "camvid", ["inline_swin_tiny", "softmax_swin_tiny"]
    for run in segmentation.build_runs(backbones, models)[:2]:
        run.weights.parent.mkdir(parents=True)
        sizes = dict(embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4])
        save_weights(create_model(run.row, img_size=64, num_classes=100, **sizes), run.weights)
    words = ["segment", "--data", str(shapes.folder()), "--output", str(out), "--backbones", str(backbones)]
    words += ["--models", *models, "--jobs", "2", "--set", *TINY]
    assert main(words) == 0, "\n".join(path.read_text() for path in out.glob("*/log.txt"))
    table = capsys.readouterr().out
    assert "inline_swin_tiny − softmax_swin_tiny" in table
    assert json.loads((out / "segmentation.json").read_text())["differences"]
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    assert len(before) == 6
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")} == before
