"""The teacher of the tables, and its attention replaced without training."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from inline_attention import create_model
from inline_attention.tasks.classification.classifier import load_classifier
from study import expansion
from study.__main__ import main


@pytest.fixture(scope="module")
def teacher() -> torch.nn.Module:
    return create_model(expansion.TEACHER, pretrained=True).eval()


def test_the_teacher_is_the_one_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    expansion.check_teacher()
    monkeypatch.setattr(expansion, "TEACHER_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="expected 0000"):
        expansion.check_teacher()


def test_more_anchors_come_nearer_to_the_teacher(teacher: torch.nn.Module) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = teacher(images)
        errors = [
            float((expansion.carry_over(teacher, attention, anchors)(images) - expected).norm())
            for attention, anchors in expansion.ROWS.values()
        ]
    softmax, linear, inline, tangent, four, sixteen = errors
    assert softmax == 0
    assert sixteen < four < tangent < inline < linear


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = load_classifier(expansion.TEACHER, "pretrained").class_names
    assert names is not None
    for name in names[:2]:
        folder = tmp_path / "val" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (64, 64), "red").save(folder / "0.png")
    monkeypatch.setattr(expansion, "ROWS", {"softmax": ("softmax", 1), "tangent": ("tangent", 1)})
    assert main(["expansion", "--data", str(tmp_path), "--workers", "0", "--json", str(tmp_path / "table.json")]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [(row["title"], row["images"]) for row in rows] == [("softmax", 2), ("tangent", 2)]


def test_a_table_that_was_begun_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, known = tmp_path / "table.json", expansion.Row("softmax", "softmax", 1, 5000, 45.8, 73.0)
    table.write_text(json.dumps({"teacher": expansion.TEACHER_SHA256, "rows": [known._asdict()]}))
    monkeypatch.setattr(expansion, "ROWS", {"softmax": ("softmax", 1)})
    assert list(
        expansion.evaluate_rows(
            "nowhere", device=torch.device("cpu"), batch_size=1, workers=0, known=expansion.read_rows(table)
        )
    ) == [known]
    monkeypatch.setattr(expansion, "evaluate_rows", lambda data, *, known, **_: [more, *known])
    monkeypatch.setattr(expansion, "ROWS", {"linear": ("linear", 1), "softmax": ("softmax", 1)})
    more = known._replace(title="linear")
    assert main(["expansion", "--data", "nowhere", "--json", str(table)]) == 0
    assert expansion.read_rows(table) == [more, known]  # in the order of the table, and nothing is lost
    table.write_text(json.dumps({"teacher": "another", "rows": []}))
    with pytest.raises(ValueError, match="the table of the teacher another"):
        expansion.read_rows(table)
