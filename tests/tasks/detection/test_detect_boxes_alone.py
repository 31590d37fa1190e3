"""`inline detect` on boxes alone, from COCO and YOLO files: train, eval, predict, and what the weights file says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from coco_shapes import draw_shapes, draw_yolo, write_annotations
from PIL import Image
from safetensors.torch import load_file

from inline_attention.cli import main
from inline_attention.models.weights import read_metadata
from inline_attention.tasks.detection.prediction import DetectedFile, detect_files
from inline_attention.tasks.detection.weights import load_detector

pytest.importorskip("pycocotools")

KWARGS = "{embed_dims: [8, 16, 16, 32], depths: [1, 1, 1, 1], num_heads: [1, 2, 2, 4]}"
TINY = (
    f"model.kwargs={KWARGS}", "model.channels=32", "model.regions=16", "model.weights=null",
    "data.short_side=64", "data.train_short_sides=[64]", "data.batch_size=2", "data.workers=0", "optim.lr=1e-3",
    "schedule.epochs=1", "schedule.drop_at=[]", "schedule.warmup_steps=0", "log.tensorboard=false",
)  # fmt: skip
SPLITS = {"train": 4, "val": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images and boxes as a YOLO folder and as COCO's files without segmentations"""
    root = tmp_path_factory.mktemp("boxes")
    for number, (split, content) in enumerate(draw_yolo(root / "yolo", splits=SPLITS).items()):
        draw_shapes(root / "coco", split=split, images=SPLITS[split], seed=number)
        for entry in content["annotations"]:
            del entry["segmentation"], entry["area"]
        write_annotations(root / "coco", split, content)
    return {"yolo": root / "yolo", "coco": root / "coco"}


def train(data: Path, output: Path, *, recipe: str = "faster_rcnn_inline_pvt_tiny_1x") -> Path:
    command = ["detect", "train", recipe, *TINY, f"--data={data}", f"--output={output}", "--device=cpu"]
    assert main(command) == 0
    return output


@pytest.fixture(scope="module")
def run(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(folders["yolo"], tmp_path_factory.mktemp("runs") / "yolo")


def test_a_run_on_boxes_leaves_figures_of_boxes(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["model"] == "inline_pvt_tiny + Faster R-CNN"
    assert "val_box_ap" in summary
    assert not [key for key in summary if "mask" in key]
    precision = json.loads((run / "average_precision.json").read_text())
    assert precision.keys() == {"images", "box"}
    assert (run / "per_class.csv").read_text().splitlines()[0] == "class,box AP"


def test_the_weights_file_says_that_it_has_no_masks_and_builds_its_model(run: Path) -> None:
    file = run / "checkpoints" / "last.safetensors"
    assert json.loads(read_metadata(file)["config"])["head"] == "faster_rcnn"
    assert not [name for name in load_file(file) if "mask" in name]
    trained = load_detector(str(file))
    assert not trained.model.has_masks


def test_coco_and_yolo_files_of_the_same_boxes_train_the_same_model(
    run: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    other = train(folders["coco"], tmp_path / "coco")
    one, two = (load_file(folder / "checkpoints" / "last.safetensors") for folder in (run, other))
    assert all(np.allclose(one[name], two[name], atol=1e-5) for name in one.keys() | two.keys())


def test_eval_and_predict(
    run: Path, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = f"--weights={run / 'checkpoints' / 'last.safetensors'}"
    results = []
    for name, folder in folders.items():
        result = tmp_path / f"{name}.json"
        assert main(["detect", "eval", weights, f"--data={folder}", f"--json={result}", "--device=cpu"]) == 0
        results.append(json.loads(result.read_text()))
    printed = capsys.readouterr().out
    assert "\nbox " in printed
    assert "\nmask " not in printed
    assert results[0]["box"] == pytest.approx(results[1]["box"])
    assert results[0].keys() & {"mask"} == set()
    assert all(figures.keys() == {"box"} for figures in results[0]["per_class"].values())

    pictures, images = tmp_path / "pictures", folders["yolo"] / "images" / "val"
    command = ["detect", "predict", weights, str(images), "--min-score=0", "--device=cpu", f"--output={pictures}"]
    assert main(command) == 0
    content = json.loads((pictures / "objects.json").read_text())
    assert content["images"][0]["objects"][0].keys() == {"class", "score", "box"}
    drawn = np.asarray(Image.open(pictures / "0000.jpg").convert("RGB"), dtype=int)
    plain = np.asarray(Image.open(images / "0000.png"), dtype=int)
    assert (np.abs(drawn - plain).max(2) > 60).mean() > 0.02


def test_an_interrupted_prediction_keeps_its_objects(run: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    def stop(file: DetectedFile) -> None:
        raise KeyboardInterrupt

    trained = load_detector(str(run / "checkpoints" / "last.safetensors"))
    paths = sorted((folders["yolo"] / "images" / "val").iterdir())
    with pytest.raises(KeyboardInterrupt):
        detect_files(trained, paths, tmp_path, device=torch.device("cpu"), on_file=stop)
    written = json.loads((tmp_path / "objects.json").read_text())["images"]
    assert [image["image"] for image in written] == [str(paths[0])]


def test_masks_are_asked_for_by_mask_heads_alone(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for folder, message in (("coco", "annotations have no segmentation"), ("yolo", "has YOLO labels")):
        command = ["detect", "train", "mask_rcnn_inline_pvt_tiny_1x", *TINY, f"--data={folders[folder]}"]
        assert main([*command, "--device=cpu"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "model.head=faster_rcnn" in error


def test_annotations_without_any_object_are_no_evaluation(
    run: Path, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As COCO's image_info files of its test splits."""
    content = draw_shapes(tmp_path, split="val", images=1)
    write_annotations(tmp_path, "val", {**content, "annotations": []})
    weights = f"--weights={run / 'checkpoints' / 'last.safetensors'}"
    assert main(["detect", "eval", weights, f"--data={tmp_path}", "--device=cpu", "--workers=0"]) == 2
    assert "instances_val.json: none of its 1 images has an object to learn or to find" in capsys.readouterr().err


def test_an_argument_of_the_wrong_type_is_one_line(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        *TINY,
        "model.kwargs={embed_dims: [a,b,c,d]}",
        f"--data={folders['yolo']}",
        f"--output={tmp_path / 'run'}",
    ]
    assert main(["detect", "train", "faster_rcnn_inline_pvt_tiny_1x", *options, "--device=cpu"]) == 2
    error = capsys.readouterr().err
    assert "embed_dims[0]='a'; expected a positive integer" in error
    assert error.count("\n") == 1
