"""Views, batches and plans: what a detector is shown is a function of (seed, epoch, sample)."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from coco_shapes import draw_shapes, write_annotations
from PIL import Image

from inline_attention.tasks.detection.annotations import with_classes
from inline_attention.tasks.detection.coco import read_coco
from inline_attention.tasks.detection.config import DetectionDataConfig
from inline_attention.tasks.detection.data import (
    DetectionBatch,
    DetectionEvalLoader,
    GroupedBatchSampler,
    fitted_size,
    load,
    open_detection_data,
    show,
)

pytest.importorskip("pycocotools")

SIDES = (48, 64, 80)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    draw_shapes(root, split="train2017", images=11, seed=1)
    draw_shapes(root, split="val2017", images=5, seed=2)
    return root


def config(root: Path, **changes: Any) -> DetectionDataConfig:
    options = dict(batch_size=2, short_side=64, train_short_sides=SIDES, max_side=200, workers=0)
    return DetectionDataConfig(path=str(root), **{**options, **changes})  # type: ignore[arg-type]  # values of any kind


@pytest.mark.parametrize(
    ("size", "expected"),
    [((480, 640), (800, 1067)), ((640, 480), (1067, 800)), ((375, 1242), (402, 1333)), ((1, 1), (800, 800))],
)
def test_fitted_size(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert fitted_size(size, short_side=800, max_side=1333) == expected


@pytest.mark.parametrize("flipped", [False, True])
def test_boxes_and_masks_follow_the_pixels(shapes: Path, flipped: bool) -> None:
    """The mask is where the bright colour is, and the box is around the mask."""
    annotated = read_coco(shapes, "train2017").images[0]
    pixels, target = show(load(annotated), annotated, (128, 192), flipped=flipped, masks=True)
    assert pixels.shape == (3, 128, 192)
    assert target["masks"].shape == (len(annotated.objects), 128, 192)
    covered = target["masks"].any(0)
    bright = pixels.max(0).values > 150
    assert (covered == bright).float().mean() > 0.97
    for box, mask in zip(target["boxes"], target["masks"], strict=True):
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        around = torch.tensor([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()
        assert (box - around).abs().max() < 3  # a pixel of the original is two here


def flat(batch: DetectionBatch, rows: slice = slice(None)) -> list[torch.Tensor]:
    """Without the padding, which may differ"""
    targets = [value for target in batch.targets[rows] for value in target.values()]
    images = [image[:, :h, :w] for image, (h, w) in zip(batch.images[rows], batch.sizes[rows], strict=True)]
    return [*images, torch.tensor(batch.sizes[rows]), batch.sample_ids[rows], batch.keys[rows], *targets]


def test_batches_depend_neither_on_ranks_nor_on_workers_nor_on_where_they_start(shapes: Path) -> None:
    """Two ranks of two images see what one rank of four sees."""
    one = list(open_detection_data(config(shapes, batch_size=4), seed=3).train.epoch(1))
    assert len(one) == 2
    for rank, workers in ((0, 0), (1, 1)):
        loader = open_detection_data(config(shapes, workers=workers), seed=3, rank=rank, world_size=2).train
        two = list(loader.epoch(1))
        again = list(loader.epoch(1, start_step=1))
        rows = slice(2 * rank, 2 * rank + 2)
        for whole, part in zip(one + one[1:], two + again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(flat(whole, rows), flat(part), strict=True))


def test_a_batch_is_normalised_and_no_larger_than_its_images(shapes: Path) -> None:
    for batch in open_detection_data(config(shapes, batch_size=4)).train.epoch(0):
        assert tuple(batch.images.shape[2:]) == tuple(max(sides) for sides in zip(*batch.sizes, strict=True))
        for image, (h, w), target in zip(batch.images, batch.sizes, batch.targets, strict=True):
            assert min(h, w) in SIDES
            assert -2.2 < image.min() < 0 < image.max() < 2.7
            assert target["masks"].shape[1:] == (h, w)
            assert (target["boxes"][:, 2] <= w).all()


def test_epochs_differ_and_show_every_image(shapes: Path) -> None:
    images = read_coco(shapes, "train2017").images
    sampler = GroupedBatchSampler(images, config=config(shapes, batch_size=1), seed=0, rank=0, world_size=1)
    epochs = [[key.sample for (key,) in sampler.batches(epoch, 0)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(11))
    assert epochs[0] != epochs[1]


def test_landscape_and_portrait_images_are_kept_apart(shapes: Path) -> None:
    """Six landscape images and five portrait ones; what is left of both may make a batch together."""
    images = read_coco(shapes, "train2017").images
    sampler = GroupedBatchSampler(images, config=config(shapes), seed=0, rank=0, world_size=1)
    for epoch in range(5):
        kinds = [{images[key.sample].size for key in keys} for keys in sampler.batches(epoch, 0)]
        assert len(kinds) == sampler.steps == 5
        assert sorted(map(len, kinds)) == [1, 1, 1, 1, 1]
    sampler = GroupedBatchSampler(images, config=config(shapes, batch_size=4), seed=0, rank=0, world_size=1)
    for epoch in range(5):
        assert [len({images[key.sample].size for key in keys}) for keys in sampler.batches(epoch, 0)] == [1, 1]
    sampler = GroupedBatchSampler(images, config=config(shapes, batch_size=7), seed=0, rank=0, world_size=1)
    assert [len(keys) for keys in sampler.batches(0, 0)] == [7]  # neither group fills it alone


def test_every_image_is_evaluated_once_over_the_ranks(shapes: Path) -> None:
    data = read_coco(shapes, "val2017")
    seen: Counter[int] = Counter()
    for rank in range(3):
        for batch in DetectionEvalLoader(data, config=config(shapes), rank=rank, world_size=3):
            assert len(batch.images) == 1
            assert min(batch.sizes[0]) == 64
            seen.update(batch.sample_ids.tolist())
    assert seen == dict.fromkeys(range(5), 1)


def test_images_without_objects(tmp_path: Path) -> None:
    content = draw_shapes(tmp_path, split="train2017", images=4)
    content["annotations"] = [entry for entry in content["annotations"] if entry["image_id"] == 2]
    write_annotations(tmp_path, "train2017", content)
    draw_shapes(tmp_path, split="val2017", images=1)
    published = open_detection_data(config(tmp_path, batch_size=1))
    assert published.train.steps_per_epoch == 1
    everything = open_detection_data(config(tmp_path, batch_size=4, skip_empty=False))
    (batch,) = everything.train.epoch(0)
    assert sorted(len(target["labels"]) for target in batch.targets)[:3] == [0, 0, 0]
    assert all(target["masks"].ndim == 3 for target in batch.targets)


def test_nothing_to_learn_or_to_find(tmp_path: Path) -> None:
    for split in ("train2017", "val2017"):
        content = draw_shapes(tmp_path, split=split, images=1)
    write_annotations(tmp_path, "val2017", {**content, "annotations": []})
    with pytest.raises(ValueError, match=r"instances_val2017.json: none of its 1 images has an object"):
        open_detection_data(config(tmp_path, batch_size=1))
    write_annotations(tmp_path, "val2017", content)
    lowered = open_detection_data(config(tmp_path)).train  # to the one image there is
    assert [len(batch.images) for batch in lowered.epoch(0)] == [lowered.batch_size] == [1]


def test_unreadable_images_are_replaced_in_training_and_left_out_of_evaluation(tmp_path: Path) -> None:
    for split in ("train2017", "val2017"):
        draw_shapes(tmp_path, split=split, images=4)
        (tmp_path / split / "0001.png").write_bytes(b"")
    data = open_detection_data(config(tmp_path, batch_size=4, max_broken=1))
    (batch,) = data.train.epoch(0)
    assert 1 not in batch.sample_ids
    assert [image.reason for image in data.train.skipped] == ["empty file (0 bytes)"]
    assert [batch.sample_ids.tolist() for batch in data.val] == [[0], [2], [3]]
    strict = open_detection_data(config(tmp_path, batch_size=4, max_broken=0))
    with pytest.raises(ValueError, match=r"1 unreadable images, more than the limit of 0: .*0001.png"):
        list(strict.train.epoch(0))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_of_another_size_than_its_annotations_is_named(tmp_path: Path, workers: int) -> None:
    for split in ("train2017", "val2017"):
        draw_shapes(tmp_path, split=split, images=2)
        Image.new("RGB", (90, 70)).save(tmp_path / split / "0001.png")
    data = open_detection_data(config(tmp_path, workers=workers))
    message = r"0001.png is 70×90 \(height × width\), but its annotations are for 96×64"
    for loader in (data.train.epoch(0), data.val):
        with pytest.raises(ValueError, match=message) as caught:
            list(loader)
        assert "Traceback" not in str(caught.value)


def test_wrong_settings(shapes: Path) -> None:
    for changes, message in (
        (dict(train_short_sides=()), r"data.train_short_sides is \(\); expected positive sides"),
        (dict(max_side=0), "data.max_side is 0; expected a positive side"),
        (dict(hflip=2), "data.hflip is 2; expected a probability"),
        (dict(in_memory=True), "data.in_memory is True; expected false"),
    ):
        with pytest.raises(ValueError, match=message):
            config(shapes, **changes).validate()


def test_the_annotations_are_coco(shapes: Path) -> None:
    """What the tests draw can be read by pycocotools itself."""
    from pycocotools.coco import COCO

    path = shapes / "annotations" / "instances_val2017.json"
    coco = COCO(str(path))
    assert len(coco.getImgIds()) == len(json.loads(path.read_text())["images"]) == 5


def test_classes_are_matched_by_name(shapes: Path) -> None:
    data = read_coco(shapes, "val2017")
    matched = with_classes(data, ["triangle", "star", "disc", "square"])
    names = [[data.class_names[instance.label - 1] for instance in image.instances] for image in data.images]
    assert names == [[matched.class_names[i.label - 1] for i in image.instances] for image in matched.images]
    with pytest.raises(ValueError, match="classes that the model does not know: triangle"):
        with_classes(data, ["disc", "square"])
