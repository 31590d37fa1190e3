"""Reading COCO's format: every kind of mask, and a message for everything that is wrong with the files."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_shapes import CATEGORY_IDS, NAMES, draw_shapes, write_annotations

from inline_attention.tasks.detection.annotations import check_same_categories
from inline_attention.tasks.detection.coco import _uncompressed, decode_masks, read_coco

mask_utils = pytest.importorskip("pycocotools.mask")

SPLIT = "train"


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    return draw_shapes(tmp_path, split=SPLIT, images=3)


def read(root: Path, content: Any) -> Any:
    write_annotations(root, SPLIT, content)
    return read_coco(root, SPLIT)


def test_what_is_read_is_what_was_drawn(tmp_path: Path, content: dict[str, Any]) -> None:
    data = read_coco(tmp_path, SPLIT)
    assert data.class_names == list(NAMES)
    assert data.category_ids == list(CATEGORY_IDS)
    assert [image.path.name for image in data.images] == ["0000.png", "0001.png", "0002.png"]
    assert [image.size for image in data.images] == [(64, 96), (96, 64), (64, 96)]
    instances = [instance for image in data.images for instance in image.instances]
    assert len(instances) == len(content["annotations"])
    for instance, entry in zip(instances, content["annotations"], strict=True):
        assert CATEGORY_IDS[instance.label - 1] == entry["category_id"]
        x, y, width, height = entry["bbox"]
        assert instance.box == pytest.approx((x, y, x + width, y + height))
        assert not instance.crowd


def test_polygons_and_both_kinds_of_run_lengths_are_the_same_mask(tmp_path: Path, content: dict[str, Any]) -> None:
    expected = np.zeros((64, 96), np.uint8)
    expected[10:30, 20:50] = 1
    columns = expected.ravel(order="F")
    starts = np.flatnonzero(np.diff(columns, prepend=0, append=0)).tolist()
    runs = np.diff([0, *starts, columns.size]).tolist()
    compressed = mask_utils.encode(np.asfortranarray(expected))
    segmentations = [
        [[20, 10, 50, 10, 50, 30, 20, 30]],
        {"size": [64, 96], "counts": runs},
        {"size": [64, 96], "counts": compressed["counts"].decode()},
        [[20, 10, 35, 10, 35, 30, 20, 30], [35, 10, 50, 10, 50, 30, 35, 30]],  # two halves
    ]
    image = content["images"][0]["id"]
    content["annotations"] = [
        {"id": n, "image_id": image, "category_id": 3, "bbox": [20, 10, 30, 20], "segmentation": s, "iscrowd": n == 1}
        for n, s in enumerate(segmentations)
    ]
    annotated = read(tmp_path, content).images[0]
    assert [instance.crowd for instance in annotated.instances] == [False, True, False, False]
    assert len(annotated.objects) == 3  # nothing is learnt from crowds
    for mask in decode_masks(annotated, annotated.instances):
        assert np.array_equal(mask, expected)


def test_a_single_pixel_and_an_image_without_objects(tmp_path: Path, content: dict[str, Any]) -> None:
    pixel = {"image_id": 0, "category_id": 7, "bbox": [5, 6, 1, 1], "segmentation": [[5, 6, 6, 6, 6, 7, 5, 7]]}
    content["annotations"] = [pixel]
    first, second, _ = read(tmp_path, content).images
    (instance,) = first.instances
    assert (instance.label, instance.box, instance.area, instance.crowd) == (2, (5, 6, 6, 7), None, False)
    mask = decode_masks(first, [instance])[0]
    assert mask.sum() == mask[6, 5] == 1
    assert second.instances == []
    assert decode_masks(second, []).shape == (0, 96, 64)


def test_boxes_are_cut_at_the_border_and_empty_ones_not_learnt(
    tmp_path: Path, content: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    polygon = [[0, 0, 9, 0, 9, 9]]
    boxes = [[-5, 60, 10, 10], [10, 10, 0, 5], [200, 10, 5, 5], [50, 10, 1e-6, 5]]  # 50 + 1e-6 is 50 in float32
    content["annotations"] = [{"image_id": 0, "category_id": 3, "bbox": box, "segmentation": polygon} for box in boxes]
    for nothing in (
        [[1, 1, 4, 4]],
        {"size": [64, 96], "counts": [64 * 96]},
        {"size": [64, 96], "counts": [64 * 96, 0]},
    ):
        content["annotations"].append({"image_id": 0, "category_id": 3, "bbox": [1, 1, 5, 5], "segmentation": nothing})
    with caplog.at_level(logging.WARNING):
        image = read(tmp_path, content).images[0]
    (instance,) = image.objects
    assert instance.box == (0, 60, 5, 64)
    assert "6 objects with an empty box or mask are not used in training" in caplog.text
    assert [instance.empty for instance in image.instances] == [False, *[True] * 6]
    assert decode_masks(image, image.instances).any((1, 2)).tolist() == [*[True] * 4, *[False] * 3]


def annotation(**changes: Any) -> dict[str, Any]:
    polygon = [[1, 1, 9, 1, 9, 9]]
    return {"id": 42, "image_id": 0, "category_id": 3, "bbox": [1, 1, 8, 8], "segmentation": polygon, **changes}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (annotation(category_id=4), r"annotation 42 of image 0: category id 4 is not in the file's list \(3, 7, 11\)"),
        (annotation(image_id=77), "annotation 42 of image 77: there is no image of that id"),
        (annotation(bbox=[1, 2, 3]), r"bbox is \[1, 2, 3\]; expected four numbers"),
        (annotation(bbox=[1, 2, 3, None]), "expected four numbers"),
        (annotation(segmentation=[[1, 1, 2]]), r"a polygon is \[1, 1, 2\]; expected x0, y0, x1, y1"),
        (annotation(segmentation="all"), "segmentation is 'all'; expected polygons or run lengths"),
        (
            annotation(segmentation={"size": [96, 64], "counts": [96 * 64]}),
            r"its mask is for \[96, 64\] \(height, width\), but the image 0000.png is listed with \[64, 96\]",
        ),
        (
            annotation(segmentation={"size": [64, 96], "counts": [5, 7]}),
            "its run lengths add up to 12 pixels, not 6144",
        ),
        (annotation(segmentation={"size": [64, 96]}), "its run lengths are missing; expected a list of numbers"),
        (annotation(segmentation={"size": None, "counts": [1]}), r"its mask is for missing \(height, width\)"),
        (annotation(segmentation={"size": [64, 96], "counts": ["a"]}), r"its run lengths are \['a'\]; expected a list"),
        (annotation(segmentation={"size": [64, 96], "counts": [6149, -5]}), r"its run lengths are \[6149, -5\]"),
        (annotation(image_id=[0]), r"image_id of annotations\[0\] is \[0\]; expected a whole number"),
        (annotation(category_id={}), r"category_id of annotations\[0\] is {}; expected a whole number"),
        (annotation(bbox="all"), r"bbox of annotations\[0\] is 'all'; expected a list"),
        (annotation(area="large"), "annotation 42 of image 0: area is 'large'; expected a number"),
        (annotation(iscrowd="no"), "annotation 42 of image 0: iscrowd is 'no'; expected 0 or 1"),
        ("all", r"annotations\[0\] is 'all'; expected an object"),
        # pycocotools crashes, or takes as much memory as the outline is long.
        (
            annotation(segmentation=[[0, 0, 2.5e7, 0, 0, 9]]),
            r"a polygon reaches x = 2.5e\+07, far outside of its image",
        ),
        (annotation(segmentation=[[0, 0, 4e8, 0, 0, 4e8]]), r"a polygon reaches x = 4e\+08, far outside of its image"),
        (annotation(segmentation=[[0, 0, 9, 0, 0, -4e8]]), r"a polygon reaches y = -4e\+08, far outside of its image"),
        (annotation(segmentation=[[0, 0, 95, 63] * 9000]), "its polygons are 1,710,000 pixels long; expected at most"),
        (annotation(segmentation=[[0, 0, 10**400, 0, 0, 9]]), "a polygon is .*; expected x0, y0"),
        (annotation(bbox=[0, 0, 10**400, 9]), "expected four numbers"),
        (annotation(bbox=[0, 0, True, 9]), "expected four numbers"),
        (annotation(image_id=2**64), r"image_id of annotations\[0\] is too large"),
        # Compressed run lengths: pycocotools would read or write beyond its memory.
        (annotation(segmentation={"size": [64, 96], "counts": "ooooooo"}), "its run lengths are 'ooooooo'; expected"),
        (annotation(segmentation={"size": [64, 96], "counts": "PPPPPPPP0"}), "its run lengths are 'PPPPPPPP0'"),
        (annotation(segmentation={"size": [64, 96], "counts": "é"}), "its run lengths are 'é'; expected"),
        (annotation(segmentation={"size": [64, 96], "counts": ""}), "its run lengths are ''; expected"),
        (annotation(segmentation={"size": [64, 96], "counts": "5"}), "its run lengths add up to 5 pixels, not 6144"),
        ({"id": 42, "image_id": 0, "category_id": 3}, r"annotations\[0\] has no bbox"),
    ],
)
def test_wrong_annotations_are_named(tmp_path: Path, content: dict[str, Any], wrong: Any, message: str) -> None:
    content["annotations"] = [wrong]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


def test_damaged_json_is_an_error_with_its_line(tmp_path: Path, content: dict[str, Any]) -> None:
    path = write_annotations(tmp_path, SPLIT, content)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:20]))  # cut short, as by an interrupted download
    with pytest.raises(ValueError, match=r"instances_train.json is not JSON: .* in line 20, column \d+"):
        read_coco(tmp_path, SPLIT)
    path.write_bytes(b'{"images": "\x80"}')
    with pytest.raises(ValueError, match="is not text"):
        read_coco(tmp_path, SPLIT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nests lists too deeply"),
        ('{"images": ' + "9" * 5000 + "}", "cannot be read: Exceeds the limit"),
    ],
    ids=["nested", "digits"],
)
def test_json_that_python_refuses(tmp_path: Path, content: dict[str, Any], text: str, message: str) -> None:
    write_annotations(tmp_path, SPLIT, content).write_text(text)
    with pytest.raises(ValueError, match=rf"instances_train.json {message}"):
        read_coco(tmp_path, SPLIT)


def test_polygons_that_cross_the_border_are_cut_there(tmp_path: Path, content: dict[str, Any]) -> None:
    """Some tools draw polygons beyond the image. The part outside is dropped."""
    content["annotations"] = [annotation(bbox=[80, 50, 90, 60], segmentation=[[80, 50, 170, 50, 170, 110, 80, 110]])]
    image = read(tmp_path, content).images[0]
    expected = np.zeros((64, 96), np.uint8)
    expected[50:, 80:] = 1
    assert np.array_equal(decode_masks(image, image.instances)[0], expected)


def test_masks_that_would_not_fit_into_memory(tmp_path: Path, content: dict[str, Any]) -> None:
    content["images"][0].update(height=9000, width=9000)
    content["annotations"] = [annotation()] * 60
    with pytest.raises(ValueError, match="so many objects that their masks take more than 4 GiB"):
        read(tmp_path, content)


def test_compressed_run_lengths_are_read_as_pycocotools_writes_them() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        mask = (draw.random(draw.integers(1, 90, 2)) < draw.random()).astype(np.uint8)
        mask[: len(mask) // 2] &= mask[0, 0]  # long runs, too
        columns = mask.ravel(order="F")
        starts = np.flatnonzero(np.diff(columns, prepend=0)).tolist()
        runs = np.diff([0, *starts, columns.size]).tolist()
        assert _uncompressed(mask_utils.encode(np.asfortranarray(mask))["counts"].decode()) == runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("images"), "no list of images; expected COCO's instances format"),
        (lambda c: c.update(categories=[]), "no list of categories"),
        (lambda c: c["images"][1].update(id=0), "two images have the id 0"),
        (lambda c: c["categories"][1].update(id=3), "two categories have the id 3 or the name 'square'"),
        (lambda c: c["categories"][1].update(name="disc"), "two categories have the id 7 or the name 'disc'"),
        (lambda c: c["categories"][1].update(id=None), r"id of categories\[1\] is missing; expected a whole number"),
        (lambda c: c["images"][0].update(file_name=5), r"file_name of images\[0\] is 5; expected text"),
        (lambda c: c["images"][0].update(height="64"), r"height of images\[0\] is '64'; expected a whole number"),
        (lambda c: c.update(annotations=5), "annotations is 5; expected a list of objects"),
        (lambda c: c["images"][0].update(height=0), "image 0 is 0 high and 96 wide"),
        (lambda c: c["images"][0].update(height=10**9), "image 0 is 1000000000 high and 96 wide; expected at most"),
        (lambda c: c["images"][0].update(id=10**30), r"id of images\[0\] is too large"),
        (
            lambda c: c["images"][0].update(file_name="/etc/passwd"),
            "file_name is '/etc/passwd'; expected a path inside",
        ),
        (lambda c: c["images"][0].update(file_name="../val/1.png"), "file_name is '../val/1.png'; expected a path"),
        (lambda c: c["images"][0].update(file_name="a/../../1.png"), "expected a path inside the folder of images"),
        (lambda c: c["images"][0].update(file_name="C:\\1.png"), "expected a path inside the folder of images"),
        (lambda c: c["images"][0].update(file_name=""), "file_name is ''; expected a path inside"),
        (lambda c: c["images"][0].pop("width"), r"images\[0\] has no width"),
        (
            lambda c: c["images"][2].update(file_name="gone.png"),
            "names 1 of 3 images that do not exist, such as .*gone",
        ),
    ],
)
def test_wrong_lists_are_named(tmp_path: Path, content: dict[str, Any], change: Any, message: str) -> None:
    change(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


def test_a_missing_split_says_what_is_expected(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"instances_test.json does not exist; expected annotations/instances_SPLIT.json and the images in SPLIT/",
    ):
        read_coco(tmp_path, "test")
    write_annotations(tmp_path, SPLIT, [1])
    with pytest.raises(ValueError, match="holds a list"):
        read_coco(tmp_path, SPLIT)


def test_splits_must_have_the_same_categories(tmp_path: Path, content: dict[str, Any]) -> None:
    train = read_coco(tmp_path, SPLIT)
    content["categories"][0]["name"] = "circle"
    with pytest.raises(ValueError, match="different categories: circle, disc"):
        check_same_categories(train, read(tmp_path, content))


def without_masks(content: dict[str, Any], *, every: int = 1) -> dict[str, Any]:
    """The annotations, every n-th of them without its segmentation"""
    entries = [
        {key: value for key, value in entry.items() if key != "segmentation" or number % every}
        for number, entry in enumerate(content["annotations"])
    ]
    return {**content, "annotations": entries}


def test_boxes_are_read_with_or_without_masks_beside_them(tmp_path: Path, content: dict[str, Any]) -> None:
    write_annotations(tmp_path, SPLIT, content)
    whole = read_coco(tmp_path, SPLIT)
    boxes = read_coco(tmp_path, SPLIT, masks=False)
    write_annotations(tmp_path, SPLIT, without_masks(content))
    alone = read_coco(tmp_path, SPLIT, masks=False)
    assert boxes == alone
    for image, other in zip(whole.images, alone.images, strict=True):
        assert [(i.label, i.box, i.area) for i in image.instances] == [
            (i.label, i.box, i.area) for i in other.instances
        ]
        assert all(instance.segmentation is None for instance in other.instances)


@pytest.mark.parametrize("every", [1, 2])
def test_mask_heads_need_a_mask_for_every_object(tmp_path: Path, content: dict[str, Any], every: int) -> None:
    total = len(content["annotations"])
    missing = -(-total // every)
    message = (
        rf"{missing} of {total} annotations have no segmentation, such as annotation 1 of image 0; mask heads need .*"
        "train with model.head=faster_rcnn or cascade_rcnn"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path, without_masks(content, every=every))


def test_a_damaged_mask_does_not_matter_to_boxes(tmp_path: Path, content: dict[str, Any]) -> None:
    content["annotations"] = [annotation(segmentation=[[0, 0, 2.5e7, 0, 0, 9]])]
    write_annotations(tmp_path, SPLIT, content)
    (instance,) = read_coco(tmp_path, SPLIT, masks=False).images[0].instances
    assert instance.box == (1, 1, 9, 9)


def test_more_objects_than_any_image_has(tmp_path: Path, content: dict[str, Any]) -> None:
    content["annotations"] = [annotation()] * 10_001
    write_annotations(tmp_path, SPLIT, content)
    with pytest.raises(ValueError, match=r"0000.png has more than 10,000 objects"):
        read_coco(tmp_path, SPLIT, masks=False)


def test_train_and_val_are_also_the_splits_of_coco_itself(tmp_path: Path) -> None:
    draw_shapes(tmp_path, split="val2017", images=1)
    assert read_coco(tmp_path, "val").source.name == "instances_val2017.json"
    draw_shapes(tmp_path, split="val", images=2)
    assert read_coco(tmp_path, "val").source.name == "instances_val.json"
    with pytest.raises(ValueError, match=r"instances_train.json and .*instances_train2017.json do not exist"):
        read_coco(tmp_path, "train")
