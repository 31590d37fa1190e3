import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inline_attention import create_model, linearize
from inline_attention.cli import main
from inline_attention.data import DataConfig, open_eval_data
from inline_attention.models.weights import save_weights
from inline_attention.tasks.classification.classifier import load_classifier
from inline_attention.tasks.classification.evaluation import evaluate


def command(weights: object, *more: object, data: object = "digits") -> list[str]:
    options = ("--weights", weights, "--data", data, "--device", "cpu", "--workers", 0, *more)
    return ["eval", "inline_deit_tiny", *map(str, options)]


def test_digits(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv_file, json_file = tmp_path / "classes.csv", tmp_path / "result.json"
    assert main(command(weights, "--csv", csv_file, "--json", json_file)) == 0
    config = DataConfig(img_size=8, in_chans=1, mean=[0.3], std=[0.4], eval_transform="resize", workers=0)
    expected = evaluate(load_classifier("inline_deit_tiny", str(weights)).model, open_eval_data(config), device="cpu")
    result = json.loads(json_file.read_text())
    assert result["top1"] == expected.top1  # also: the preparation of images came from the file
    assert result["top5"] == expected.top5
    assert result["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert (result["images"], result["skipped"], result["img_size"]) == (450, 0, [8, 8])
    output = capsys.readouterr()
    assert f"top-1 {expected.top1:.3f}%" in output.out
    assert "450 images" in output.out
    assert "evaluating: 450/450" in output.err  # no terminal: plain lines
    rows = list(csv.DictReader(csv_file.open()))
    assert [row["class"] for row in rows] == [str(digit) for digit in range(10)]
    assert [[int(row["correct"]), int(row["total"])] for row in rows] == expected.per_class.tolist()


def test_classes_are_matched_by_name(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for name in ("7", "3"):  # two of the model's ten classes
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        for number in range(3):
            image = Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8))
            image.save(tmp_path / "data" / "val" / name / f"{number}.png")
    csv_file = tmp_path / "classes.csv"
    assert main(command(weights, "--csv", csv_file, data=tmp_path / "data")) == 0
    assert [(row["class"], row["total"]) for row in csv.DictReader(csv_file.open())] == [("3", "3"), ("7", "3")]
    assert main(command(weights, "--by-position", data=tmp_path / "data")) == 2
    assert "the model has 10 outputs, the data 2 classes" in capsys.readouterr().err
    (tmp_path / "data" / "val" / "3").rename(tmp_path / "data" / "val" / "three")
    assert main(command(weights, data=tmp_path / "data")) == 2
    assert "1 of the 2 classes of the data are not among the model's 10: 'three'" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "expected"), [((12,), [12, 12]), ((8, 16), [8, 16])])
def test_other_resolutions(weights: Path, tmp_path: Path, size: tuple[int, ...], expected: list[int]) -> None:
    assert main(command(weights, "--img-size", *size, "--json", tmp_path / "result.json")) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["images"], result["img_size"]) == (450, expected)


def test_unreadable_images_are_listed(weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "val" / "1"
    folder.mkdir(parents=True)
    for number in range(3):
        Image.new("L", (8, 8)).save(folder / f"{number}.png")
    (folder / "1.png").write_bytes(b"")
    assert main(command(weights, "--json", tmp_path / "result.json", data=tmp_path / "data")) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["images"], result["skipped"]) == (2, 1)
    assert result["skipped_images"] == [{"path": str(folder / "1.png"), "reason": "empty file (0 bytes)"}]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--data", "/no/such/place"), "data path '/no/such/place' does not exist"),
        (("--split", "test"), "no split 'test' in 'digits'"),
        (("--img-size", 1, 2, 3), "--img-size is 1 2 3; expected a side, or height and width"),
        (("--device", "tpu9"), "device 'tpu9' cannot be used"),
        (("--batch-size", 0), "--batch-size is 0; expected at least 1"),
        (("--num-classes", 5), "data.num_classes is 5; expected null: 'digits' lists its classes"),
        (("--split-file", "split.csv"), "data.split_file is 'split.csv'; expected null: 'digits' has splits"),
        (("--train-split", "val"), "--train-split val names the images that vote: give --knn K too"),
        (("--knn", 3, "--by-position"), "--knn does not use the classes of the model: leave out --by-position"),
        (("--max-broken", "nan"), "--max-broken is nan; expected at least 0"),
        (("--csv", "/no/such/place/classes.csv"), "'/no/such/place/classes.csv' cannot be written: expected a file's"),
        (("--json", "/"), "'/' cannot be written: expected a file's name in a folder that exists"),
    ],
)
def test_errors(weights: Path, more: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(weights, *more)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_weights_errors(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path / "gone.safetensors")) == 2
    assert "gone.safetensors" in capsys.readouterr().err
    assert main(["eval", "inline_deit_small", *command(weights)[2:]]) == 2
    assert "holds weights of inline_deit_tiny, not of inline_deit_small" in capsys.readouterr().err


def test_a_student_is_called_linearised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = dict(img_size=8, embed_dim=16, depth=1, num_heads=2, patch_size=4)
    student = create_model("softmax_deit_tiny", in_chans=1, num_classes=10, **small)
    linearize(student)
    file = save_weights(student, tmp_path / "student.safetensors")
    assert main(["eval", "--weights", str(file), "--data", "digits", "--device", "cpu", "--workers", "0"]) == 0
    assert "linearised softmax_deit_tiny on digits [val]" in capsys.readouterr().out
    assert main(["info", "--weights", str(file)]) == 0
    assert "linearised softmax_deit_tiny at 8×8" in capsys.readouterr().out


def test_nearest_neighbours(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even untrained features find most digits again; with k as large as the data, the largest class wins."""
    assert main(command(weights, "--knn", 5, "--json", tmp_path / "result.json")) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["knn"], result["images"], result["training_images"]) == (5, 450, 1347)
    assert result["knn_top1"] > 60
    assert f"top-1 {result['knn_top1']:.3f}% by a vote of the 5 nearest of 1347" in capsys.readouterr().out
    assert main(command(weights, "--knn", 1348)) == 2
    assert "--knn 1348: expected 1 to 1347" in capsys.readouterr().err
    assert main(command(weights, "--knn", 5, "--real")) == 2
    assert "leave out --csv and --real" in capsys.readouterr().err
