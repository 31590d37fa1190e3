"""What half precision changes is measured against float64."""

import json
from pathlib import Path

import torch
from PIL import Image

from inline_attention.tasks.classification.classifier import load_classifier
from study import precision
from study.__main__ import main
from study.ablation import open_model


def make_images(folder: Path) -> Path:
    names = load_classifier(precision.MODELS[0], "pretrained").class_names
    assert names is not None
    for name in names[:2]:
        (folder / "val" / name).mkdir(parents=True)
        Image.new("RGB", (64, 64), "red").save(folder / "val" / name / "0.png")
    return folder


def test_command(tmp_path: Path) -> None:
    data, table = make_images(tmp_path / "data"), tmp_path / "table.json"
    assert main(["precision", "--data", str(data), "--device=cpu", "--json", str(table)]) == 0
    rows = json.loads(table.read_text())["rows"]
    assert [row["model"] for row in rows[::3]] == list(precision.MODELS)
    errors = [[row["error"] for row in rows if row["condition"] == c.title] for c in precision.CONDITIONS]
    for single, products, stream in zip(*errors, strict=True):
        assert 0 < single < 1e-4 < min(products, stream) <= max(products, stream) < 0.1


def test_the_stream_has_the_dtype_of_its_title(tmp_path: Path) -> None:
    options = dict(path=str(make_images(tmp_path)), device=torch.device("cpu"), images=2, batch_size=2)
    model, loader = open_model(precision.MODELS[0], "pretrained", **options)
    seen = []
    model.blocks[-1].register_forward_hook(lambda block, inputs, out: seen.append((inputs[0].dtype, out.dtype)))
    precision.measure("a model", model, loader)
    streams = (torch.float64, torch.float32, torch.float32, torch.bfloat16)
    assert seen == [(dtype, dtype) for dtype in streams]
    assert next(model.parameters()).dtype == torch.float32  # the model itself is not cast
