"""Reading YOLO's folders: what they hold, what is wrong with them, and how layouts are told apart."""

import logging
import os
from pathlib import Path

import pytest
import torch
from coco_shapes import NAMES, draw_shapes, draw_yolo, write_annotations
from PIL import Image

from inline_attention.tasks.detection import yolo
from inline_attention.tasks.detection.coco import read_coco
from inline_attention.tasks.detection.config import DetectionDataConfig
from inline_attention.tasks.detection.data import open_detection_data
from inline_attention.tasks.detection.layouts import find_layout, read_split
from inline_attention.tasks.detection.yolo import read_yolo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw_yolo(tmp_path, splits={"train": 3, "val": 2})
    return tmp_path


def test_what_is_read_is_what_coco_says_of_the_same_boxes(tmp_path: Path) -> None:
    content = draw_yolo(tmp_path / "yolo", splits={"train": 4})["train"]
    draw_shapes(tmp_path / "coco", split="train", images=4)
    write_annotations(tmp_path / "coco", "train", content)
    expected = read_coco(tmp_path / "coco", "train", masks=False)
    data = read_yolo(tmp_path / "yolo", "train")
    assert data.class_names == expected.class_names == list(NAMES)
    for image, other in zip(data.images, expected.images, strict=True):
        assert (image.path.name, image.size) == (other.path.name, other.size)
        assert [instance.label for instance in image.instances] == [instance.label for instance in other.instances]
        for instance, same in zip(image.instances, other.instances, strict=True):
            assert instance.box == pytest.approx(same.box)
            assert instance.segmentation is None


def test_other_folders_and_other_ways_to_name_classes(folder: Path) -> None:
    """As exporters write them: train/images, ../ before it, names by number, and a stale path."""
    expected = read_yolo(folder, "train")
    for kind in ("images", "labels"):
        for split, name in (("train", "train"), ("val", "valid")):
            (folder / name).mkdir(exist_ok=True)
            (folder / kind / split).rename(folder / name / kind)
    (folder / "data.yaml").write_text(
        "path: /content/datasets/shapes\ntrain: ../train/images\nval: [valid/images]\nnc: 3\n"
        "names: {2: triangle, 0: disc, 1: 'no'}\n"
    )
    data = read_yolo(folder / "data.yaml", "train")
    assert data.class_names == ["disc", "no", "triangle"]
    assert [image.instances for image in data.images] == [image.instances for image in expected.images]
    assert len(read_yolo(folder, "val").images) == 2
    (folder / "data.yaml").write_text("valid: valid/images\nnames: [disc, square, no]\n")
    assert read_yolo(folder, "val").class_names[2] == "no"


def test_the_path_of_the_description_counts_inside_its_folder(folder: Path) -> None:
    (folder / "below").mkdir()
    for kind in ("images", "labels"):
        (folder / kind).rename(folder / "below" / kind)
    text = (folder / "data.yaml").read_text()
    (folder / "data.yaml").write_text(f"path: below\n{text}")
    assert len(read_yolo(folder, "train").images) == 3


def test_images_without_objects_and_boxes_at_the_border(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = folder / "labels" / "train"
    (labels / "0000.txt").unlink()
    (labels / "0001.txt").write_text("")
    (labels / "0002.txt").write_text("\n1.0 0.5 1 1 0.5\r\n2 0.2 0.2 0 0.1\n")
    with caplog.at_level(logging.WARNING):
        first, second, third = read_yolo(folder, "train").images
    assert first.instances == second.instances == []
    (instance,) = third.objects
    assert (instance.label, instance.box) == (2, (0, 48, 96, 64))  # 96 wide, 64 high
    assert "1 objects with an empty box or mask are not used in training" in caplog.text


def test_an_unreadable_image_is_left_to_the_loader(folder: Path) -> None:
    (folder / "images" / "train" / "0001.png").write_bytes(b"no image")
    assert [image.size for image in read_yolo(folder, "train").images] == [(64, 96), (1, 1), (64, 96)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0.5 0.5 0.1", r"0000.txt, line 2 is '0 0.5 0.5 0.1'; expected class cx cy w h"),
        ("0 0.1 0.1 0.2 0.1 0.2 0.2", "expected class cx cy w h"),
        ("3 0.5 0.5 0.1 0.1", "line 2: class is '3'; expected a number from 0 to 2"),
        ("-1 0.5 0.5 0.1 0.1", "class is '-1'; expected a number from 0 to 2"),
        ("0.5 0.5 0.5 0.1 0.1", "class is '0.5'; expected"),
        ("disc 0.5 0.5 0.1 0.1", "class is 'disc'; expected"),
        ("nan 0.5 0.5 0.1 0.1", "class is 'nan'; expected"),
        ("0 320 0.5 0.1 0.1", "cx is '320'; expected a share of the image's width or height, from 0 to 1"),
        ("0 0.5 -0.5 0.1 0.1", "cy is '-0.5'; expected a share"),
        ("0 0.5 0.5 nan 0.1", "w is 'nan'; expected a share"),
        ("0 0.5 0.5 0.1 inf", "h is 'inf'; expected a share"),
        ("0 0.5 0.5 0.1 1e400", "h is '1e400'; expected a share"),
        ("0 0.5 0.5 0.1 x", "h is 'x'; expected a share"),
        ("0 0.5 0.5 0.1 " + "9" * 5000, "h is '9999"),
        ("0 0.5 0.5 0.1 0.1\n" * 10_001, r"line 10001: 0000.png has more than 10,000 objects"),
    ],
)
def test_wrong_labels_are_named(folder: Path, line: str, message: str) -> None:
    path = folder / "labels" / "train" / "0000.txt"
    path.write_text(line if line.count("\n") > 1 else f"1 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_yolo(folder, "train")
    assert len(str(caught.value)) < 400


def test_files_that_are_no_labels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "labels" / "train" / "0000.txt"
    path.write_bytes(b"\xff\xfe0")
    with pytest.raises(ValueError, match=r"0000.txt is not text"):
        read_yolo(folder, "train")
    path.unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(path)  # reading it would wait for a writer
        with pytest.raises(ValueError, match=r"0000.txt cannot be read: not a regular file"):
            read_yolo(folder, "train")
        path.unlink()
    monkeypatch.setattr(yolo, "MAX_BYTES", 2**20)
    path.write_text("0 0.5 0.5 0.1 0.1\n" * 2**16)
    with pytest.raises(ValueError, match=r"0000.txt is larger than 1 MiB"):
        read_yolo(folder, "train")


REPEATED = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [", "data.yaml is not YAML"),
        pytest.param("[" * 2_000, "data.yaml nests lists too deeply", marks=pytest.mark.slow),  # PyYAML takes seconds
        ("- cat", r"data.yaml holds \['cat'\]; expected the entries names, train and val"),
        ("train: images/train", "names is missing; expected a list of class names"),
        ("names: cat", "names is 'cat'; expected a list"),
        ("names: []", r"names is \[\]; expected a list"),
        ("names: [cat, [dog]]", r"names has \['dog'\]; expected text"),
        ("names: [cat, cat]", "names has 'cat' twice"),
        ("names: {0: cat, 2: dog}", r"names has the keys \['0', '2'\]; expected 0, 1, 2, …"),
        ("{names: [cat, dog], nc: 3}", "nc is '3', but names has 2 classes"),
        (f"{REPEATED}names: *i", r"names has \[\[\["),
        ("names: [a, b, c]", "train is missing; expected the folder of the split's images. It names no split"),
        ("{names: [a, b, c], val: images/val}", "train is missing; .* It names val"),
        ("{names: [a, b, c], train: [[images/train]]}", r"train is \[\['images/train'\]\]; expected the folder"),
        ("{names: [a, b, c], train: /etc}", "train is '/etc'; expected a path inside"),
        ("{names: [a, b, c], train: ../../images}", r"train is '../../images'; expected a path inside"),
        ("{names: [a, b, c], train: images/../../x}", "expected a path inside"),
        ("{names: [a, b, c], train: 'C:\\images'}", "expected a path inside"),
        ("{names: [a, b, c], train: images/gone}", "train is 'images/gone', but there is no folder"),
        ("{names: [a, b, c], train: labels}", "no images in the split 'train'"),
        ("!!python/object/apply:os.system ['true']", "data.yaml is not YAML"),
    ],
)
def test_wrong_descriptions_are_named(folder: Path, text: str, message: str) -> None:
    (folder / "data.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_yolo(folder, "train")
    assert len(str(caught.value)) < 500


def test_no_labels_at_all(folder: Path) -> None:
    (folder / "labels").rename(folder / "boxes")
    with pytest.raises(ValueError, match=r"none of the 3 images of the split 'train' has .*labels/train/0000.txt"):
        read_yolo(folder, "train")


def test_layouts_are_found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert find_layout(folder) == find_layout(folder / "data.yaml") == "yolo"
    (folder / "data.yaml").rename(folder / "shapes.yml")
    assert find_layout(folder) == "yolo"
    coco = tmp_path_factory.mktemp("coco")
    draw_shapes(coco, split="train", images=1)
    assert find_layout(coco) == "coco"
    (coco / "data.yaml").write_text("names: [a]")
    with pytest.raises(ValueError, match=r"has both .* choose one with data.layout=coco or data.layout=yolo"):
        find_layout(coco)
    assert len(read_split(DetectionDataConfig(path=str(coco), layout="coco"), "train", masks=True).images) == 1


def test_a_folder_without_annotations_says_what_was_looked_for(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    message = r"annotations/instances_SPLIT.json .*\(COCO\), or with data.yaml, .*\(YOLO\); there is 'photo.png'"
    with pytest.raises(ValueError, match=message):
        find_layout(tmp_path)
    with pytest.raises(ValueError, match="does not exist; expected a folder with annotations"):
        find_layout(tmp_path / "gone")


def test_mask_heads_cannot_learn_from_boxes(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has YOLO labels, which are boxes.* train with model.head=faster_rcnn"):
        read_split(DetectionDataConfig(path=str(folder)), "train", masks=True)


def test_batches_of_boxes_are_padded_and_mirrored_as_those_with_masks(tmp_path: Path) -> None:
    """The same images and objects from both layouts: the same pixels, sizes and boxes, without masks."""
    pytest.importorskip("pycocotools")
    contents = draw_yolo(tmp_path / "yolo", splits={"train": 3, "val": 1})
    for split, content in contents.items():
        draw_shapes(tmp_path / "coco", split=split, images=len(content["images"]), seed=list(contents).index(split))
    batches = []
    for layout in ("yolo", "coco"):
        config = DetectionDataConfig(path=str(tmp_path / layout), batch_size=3, train_short_sides=(48, 80), workers=0)
        (batch,) = open_detection_data(config, masks=layout == "coco", seed=4).train.epoch(0)
        batches.append(batch)
    boxes, masks = batches
    assert len(set(boxes.sizes)) > 1
    assert boxes.sizes == masks.sizes
    assert torch.equal(boxes.images, masks.images)
    for target, other in zip(boxes.targets, masks.targets, strict=True):
        assert target.keys() == {"boxes", "labels"}
        torch.testing.assert_close(target["boxes"], other["boxes"], rtol=1e-5, atol=1e-4)
        assert torch.equal(target["labels"], other["labels"])
