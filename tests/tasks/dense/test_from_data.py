"""Schedules and sizes that follow from the data: what is chosen, what is said, what wins, what resuming keeps."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import shapes
import yaml
from coco_shapes import draw_shapes

from inline_attention.cli import main
from inline_attention.tasks.detection.annotations import AnnotatedImage, Instance
from inline_attention.tasks.detection.task import Detection
from inline_attention.tasks.detection.task import sizes_for as detection_sizes
from inline_attention.tasks.segmentation.task import Segmentation
from inline_attention.tasks.segmentation.task import sizes_for as segmentation_sizes
from inline_attention.training.config import load_recipe
from inline_attention.training.task import Task


def choose(task: type[Task], data: Path, *overrides: str, world_size: int = 1) -> dict[str, Any]:
    settings = [f"data.path={data}", *overrides]
    config = load_recipe("finetune", defaults=task.defaults(), folder=task.recipes, overrides=settings)
    return task(config).choose_from_data(world_size)


def test_eighteen_images_get_a_short_schedule(tmp_path: Path) -> None:
    """300 updates, where the published recipe has 40,000."""
    data = shapes.write(tmp_path, train=18, val=1)
    chosen = choose(Segmentation, data)
    assert chosen == {
        "data.crop": [64, 64],  # of images with 48 × 64 pixels
        "data.short_side": None,
        "schedule.epochs": 150,  # of two updates
        "schedule.warmup_epochs": 15,
        "log.eval_epochs": 15,
        "checkpoint.every_epochs": 15,
    }
    assert choose(Segmentation, data, world_size=2)["schedule.epochs"] == 300  # of one update


def test_the_length_follows_from_the_number_of_images(tmp_path: Path) -> None:
    """100 passes over the images, but neither fewer than 300 updates nor more than 40,000."""
    data = shapes.write(tmp_path, train=40, val=1)
    updates = {}
    for batch, per_epoch in ((1, 40), (8, 5), (40, 1)):
        updates[batch] = choose(Segmentation, data, f"data.batch_size={batch}")["schedule.epochs"] * per_epoch
    assert updates == {1: 4000, 8: 500, 40: 300}
    assert choose(Segmentation, data, "data.batch_size=1", "optim.accumulate=4")["schedule.epochs"] == 100


def test_what_is_given_is_not_chosen(tmp_path: Path) -> None:
    data = shapes.write(tmp_path, train=18, val=1)
    chosen = choose(Segmentation, data, "schedule.epochs=20", "data.crop=32", "log.eval_epochs=1")
    assert chosen == {"data.short_side": None, "schedule.warmup_epochs": 2, "checkpoint.every_epochs": 2}
    chosen = choose(Segmentation, data, "schedule={steps: 40, warmup_steps: 3}", "data.crop=32")
    assert chosen == {"data.short_side": None, "log.eval_epochs": 2, "checkpoint.every_epochs": 2}
    assert choose(Segmentation, data, "from_data=[]") == {}
    with pytest.raises(ValueError, match=r"from_data=optim.lr: cannot be chosen from the data; expected some of"):
        choose(Segmentation, data, "from_data=[optim.lr]")


@pytest.mark.parametrize(
    ("images", "crop", "short_side"),
    [
        ([(360, 480)] * 3, [352, 480], None),
        ([(2000, 3000)], [512, 512], 512),
        ([(600, 700)], [512, 512], 512),
        ([(20, 20)], [32, 32], None),
        ([(100, 900), (300, 500), (340, 512)], [288, 512], None),
    ],
)
def test_sizes_of_crops(images: list[tuple[int, int]], crop: list[int], short_side: int | None) -> None:
    assert segmentation_sizes(images) == {"data.crop": crop, "data.short_side": short_side}


@pytest.mark.parametrize(
    ("size", "objects", "side"),
    [
        ((480, 640), [100.0] * 10, 480),  # large objects: as they are
        ((480, 640), [16.0] * 10, 800),  # small ones: twice the size would be 960
        ((480, 640), [24.0] * 10, 640),
        ((2000, 3000), [500.0], 800),
        ((480, 640), [4.0] + [100.0] * 10, 480),  # a tenth may be smaller
        ((480, 640), [], 480),
    ],
)
def test_sizes_of_images_with_objects(size: tuple[int, int], objects: list[float], side: int) -> None:
    instances = [Instance(1, (0, 0, length, length), None, None, False) for length in objects]
    chosen = detection_sizes([AnnotatedImage(0, Path("a.png"), size, instances)])
    assert chosen["data.short_side"] == side
    assert chosen["data.train_short_sides"][-1] == side
    assert min(chosen["data.train_short_sides"]) == pytest.approx(0.6 * side, abs=16)


def test_a_detector_takes_its_sizes_from_the_boxes(tmp_path: Path) -> None:
    draw_shapes(tmp_path, split="train", images=9)
    chosen = choose(Detection, tmp_path, "data.batch_size=2")
    assert chosen["schedule.epochs"] == 100  # of four updates
    assert chosen["data.short_side"] == 160  # of 64 pixels, with objects of 13 pixels and more


TINY = (
    "model.kwargs={embed_dims: [8, 16, 16, 32], depths: [1, 1, 1, 1], num_heads: [1, 2, 2, 4]}",
    "model.head_kwargs={dim: 8}", "model.weights=null", "data.batch_size=2", "data.workers=0",
    "log.tensorboard=false",
)  # fmt: skip


@pytest.mark.usefixtures("without_pictures")
def test_a_run_says_what_was_chosen_and_a_resumed_one_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inline_attention.tasks.dense.from_data.MIN_UPDATES", 4)
    monkeypatch.setattr("inline_attention.tasks.dense.from_data.PASSES", 1)
    data, output = shapes.write(tmp_path / "shapes", train=4, val=1), tmp_path / "run"
    command = ["segment", "train", f"--output={output}", "--device=cpu"]
    assert main([*command, "finetune", f"--data={data}", *TINY]) == 0
    said = [line for line in capsys.readouterr().out.split("\n") if "chosen from the data" in line]
    assert len(said) == 1
    assert "data.crop=[64, 64] data.short_side=null schedule.epochs=2" in " ".join(said[0].split())
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert config["from_data"] == []
    assert (config["schedule"]["epochs"], config["data"]["crop"]) == (2, [64, 64])

    shutil.rmtree(data)
    shapes.write(data, train=8, val=1)  # more images: another schedule would be chosen now
    assert main([*command, "--resume=auto"]) == 0
    assert "chosen" not in capsys.readouterr().out
    assert yaml.safe_load((output / "config.yaml").read_text())["schedule"]["epochs"] == 2
