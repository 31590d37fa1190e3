"""Images and masks: layouts, augmentation, loaders, and everything that can be wrong with them."""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shapes
import torch
from PIL import Image

from inline_attention.data.decode import UnreadableImage
from inline_attention.tasks.segmentation.config import SegmentDataConfig
from inline_attention.tasks.segmentation.data import open_eval_images, open_segment_data
from inline_attention.tasks.segmentation.sources import IGNORED, open_split
from inline_attention.tasks.segmentation.task import Segmentation
from inline_attention.tasks.segmentation.transforms import TrainTransform, distort, target_size
from inline_attention.training.config import load_recipe


def config(path: Path | str, **settings: object) -> SegmentDataConfig:
    defaults: dict[str, object] = dict(path=str(path), crop=32, short_side=None, batch_size=4, workers=0)
    return SegmentDataConfig(**defaults | settings)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shapes.write(tmp_path / "shapes", train=6, val=3)


def test_folders(folder: Path) -> None:
    source = open_split(config(folder), "train")
    assert source.class_names == list(shapes.CLASSES)
    assert len(source) == 6
    pixels, mask = source.read(2)
    expected = shapes.draw(2)
    assert np.array_equal(pixels, expected[0])
    assert np.array_equal(mask, expected[1])


def write_pair(image: Path, mask: Path, numbers: np.ndarray) -> None:
    for path in (image, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((*numbers.shape, 3), np.uint8)).save(image)
    Image.fromarray(numbers).save(mask)


def test_ade20k_layout(tmp_path: Path) -> None:
    """0 is "other" and counts for nothing, 1 is the first class."""
    numbers = np.array([[0, 1], [2, 3]], dtype=np.uint8)
    for split in ("training", "validation"):
        write_pair(tmp_path / f"images/{split}/a.jpg", tmp_path / f"annotations/{split}/a.png", numbers)
    listed = ["Idx\tRatio\tName", "1\t0.1\twall", "2\t0.1\tbuilding, edifice", "3\t0.1\tsky"]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(listed))
    source = open_split(config(tmp_path), "val")  # the layout is found
    assert source.class_names == ["wall", "building", "sky"]
    assert source.read(0)[1].tolist() == [[IGNORED, 0], [1, 2]]


@pytest.mark.parametrize("ending", ["labelIds", "labelTrainIds"])
def test_cityscapes_layout(ending: str, tmp_path: Path) -> None:
    original, training = [[7, 8, 33], [0, 4, 11]], [[0, 1, 18], [255, 255, 2]]
    numbers = np.array(original if ending == "labelIds" else training, dtype=np.uint8)
    for city in ("ulm", "bonn"):
        image = tmp_path / f"leftImg8bit/val/{city}/{city}_1_leftImg8bit.png"
        write_pair(image, tmp_path / f"gtFine/val/{city}/{city}_1_gtFine_{ending}.png", numbers)
    source = open_split(config(tmp_path), "val")
    assert len(source.class_names) == 19
    assert (source.class_names[0], source.class_names[18]) == ("road", "bicycle")
    assert len(source) == 2
    assert source.read(0)[1].tolist() == training


def test_a_layout_that_is_not_found_or_not_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    message = (
        r"looked for images/ and masks/ \(folders\), images/ and annotations/ \(ade20k\), "
        r"leftImg8bit/ and gtFine/ \(cityscapes\); there is 'images', 'labels'"
    )
    with pytest.raises(ValueError, match=message):
        open_split(config(tmp_path), "train")
    for folder in ("masks", "annotations"):
        (tmp_path / folder).mkdir()
    with pytest.raises(ValueError, match=r"several layouts, folders and ade20k; choose one with data.layout"):
        open_split(config(tmp_path), "train")
    with pytest.raises(ValueError, match=r"no class names: expected .*classes.txt"):
        open_split(config(tmp_path, layout="folders"), "train")


def test_camvid_layout(tmp_path: Path) -> None:
    """The list of classes names the ignored number too, and masks hold it."""
    numbers = np.array([[0, 1], [2, 2]], dtype=np.uint8)
    write_pair(tmp_path / "images/train/a.jpg", tmp_path / "masks/train/a.png", numbers)
    (tmp_path / "classes.txt").write_text("Sky\nRoad\nUnlabelled\n")
    source = open_split(config(tmp_path, ignore_index=2), "train")
    assert source.class_names == ["Sky", "Road"]
    assert source.read(0)[1].tolist() == [[0, 1], [IGNORED, IGNORED]]
    with pytest.raises(ValueError, match=r"data.ignore_index=1 is the number of the class 'Road'"):
        open_split(config(tmp_path, ignore_index=1), "train")


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (b"disc\n", r"1 classes in data.classes or classes.txt; expected 2 to 255, with the background"),
        (b"background\ndisc\ndisc\n", "the class 'disc' is listed twice"),
        (b"back\xffground\ndisc\n", r"classes.txt is not UTF-8 text"),
    ],
)
def test_wrong_lists_of_classes(listed: bytes, message: str, folder: Path) -> None:
    (folder / "classes.txt").write_bytes(listed)
    with pytest.raises(ValueError, match=message):
        open_split(config(folder), "train")


def test_classes_on_the_command_line() -> None:
    for text, classes in (("[sky, road]", ["sky", "road"]), ("names.txt", "names.txt"), ("null", None)):
        changed = load_recipe(
            "finetune",
            defaults=Segmentation.defaults(),
            folder=Segmentation.recipes,
            overrides=[f"data.classes={text}"],
        )
        assert changed.data.classes == classes


def test_an_ignored_number_that_is_a_class(tmp_path: Path) -> None:
    numbers = np.array([[0, 1], [2, 3]], dtype=np.uint8)
    write_pair(tmp_path / "images/training/a.jpg", tmp_path / "annotations/training/a.png", numbers)
    (tmp_path / "classes.txt").write_text("wall\nbuilding\nsky\n")
    with pytest.raises(ValueError, match=r"data.ignore_index=2 is the number of the class 'building'"):
        open_split(config(tmp_path, ignore_index=2), "train")


def test_masks_of_0_and_255_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """255 is ignored, so nothing would be learnt."""
    for path in (folder / "masks/train").iterdir():
        Image.fromarray(np.where(np.asarray(Image.open(path)) > 0, 255, 0).astype(np.uint8)).save(path)
    (folder / "classes.txt").write_text("background\nobject\n")
    open_split(config(folder), "train")
    assert "the masks hold only the class 'background' and ignored pixels" in caplog.text


def test_masks_of_other_kinds(folder: Path) -> None:
    """A palette's indices are the numbers; so are 16-bit values."""
    path = folder / "masks" / "train" / "0.png"
    numbers = np.asarray(Image.open(path))
    palette = Image.fromarray(numbers)
    palette.putpalette([255 - i // 3 for i in range(768)])
    palette.save(path)
    wide = np.asarray(Image.open(folder / "masks/train/1.png")).astype(np.uint16)
    Image.fromarray(wide).save(folder / "masks/train/1.png")
    source = open_split(config(folder), "train")
    assert np.array_equal(source.read(0)[1], numbers)
    assert np.array_equal(source.read(1)[1], shapes.draw(1)[1])


def wrong_size(folder: Path) -> None:
    Image.new("L", (64, 47)).save(folder / "masks/train/3.png")


def wrong_class(folder: Path) -> None:
    Image.new("L", (64, 48), 9).save(folder / "masks/train/3.png")


def beyond_sixteen_bits(folder: Path) -> None:
    """A value that would become class 3 if it were cut to sixteen bits."""
    (folder / "masks/train/3.png").unlink()
    Image.new("I", (64, 48), 0x10003).save(folder / "masks/train/3.tif")


def two_of_a_name(folder: Path) -> None:
    Image.new("RGB", (64, 48)).save(folder / "images/train/3.bmp")


def coloured(folder: Path) -> None:
    Image.new("RGB", (64, 48)).save(folder / "masks/train/3.png")


def no_mask(folder: Path) -> None:
    (folder / "masks/train/3.png").unlink()


def no_classes(folder: Path) -> None:
    (folder / "classes.txt").unlink()


def no_masks(folder: Path) -> None:
    (folder / "masks/train").rename(folder / "masks/other")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_size, r"mask .*3.png has 64×47 pixels, its image .*3.png 64×48"),
        (wrong_class, r"mask .*3.png holds the class number 9; the 4 classes have the numbers 0 to 3"),
        (beyond_sixteen_bits, r"mask .*3.tif holds the numbers 65539 to 65539; expected 0 to 65535"),
        (two_of_a_name, r".*images/train/3.* and .*3.* differ only in their ending; expected one file for each name"),
        (coloured, r"mask .*3.png has colours \(mode RGB\)"),
        (no_mask, r"1 image\(s\) without a mask in .*masks/train: .*3.png"),
        (no_classes, r"no class names: expected .*classes.txt"),
        (no_masks, r"no folder .*masks/train; expected images in"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_wrong_data(damage, message: str, workers: int, folder: Path) -> None:
    """The error names the file when the split is opened or, in a larger split, when a worker reads the pair."""
    damage(folder)
    with pytest.raises(ValueError, match=message):
        open_split(config(folder), "train")
    for number in range(6, 40):
        for kind in ("images", "masks"):
            if (folder / kind / "train").is_dir():
                pixels, mask = shapes.draw(number)
                Image.fromarray(pixels if kind == "images" else mask).save(folder / kind / "train" / f"{number}.png")
    one_line = rf"\A{message}[^\n]*\Z"
    with pytest.raises(ValueError, match=one_line):
        list(open_segment_data(config(folder, workers=workers), seed=0).train.epoch(0))


def test_unreadable_images_are_replaced_and_counted(folder: Path) -> None:
    (folder / "images/train/3.png").write_bytes(b"")
    (folder / "masks/val/1001.png").write_bytes(b"no image")
    data = open_segment_data(config(folder, max_broken=2), seed=0)
    batches = list(data.train.epoch(0))
    assert [len(batch.images) for batch in batches] == [4]
    batches += list(data.train.epoch(1))
    assert not any(3 in batch.sample_ids for batch in batches)
    assert len(data.train.skipped) == 1
    assert [image.sample_id for batch in data.val for image in batch] == [0, 2]
    assert "its mask" in next(iter(data.val.skipped)).reason


def test_a_damaged_mask_is_an_unreadable_image(folder: Path) -> None:
    """Pixels where the name of a chunk should be are a SyntaxError to Pillow."""
    path = folder / "masks/train/3.png"
    before, pixels = path.read_bytes().split(b"IDAT")
    path.write_bytes(before[:-4] + (20).to_bytes(4) + b"IDAT" + pixels)  # the chunk is longer than it says
    with pytest.raises(SyntaxError), Image.open(path) as image:
        image.load()
    with pytest.raises(UnreadableImage, match=r"its mask .*3.png: SyntaxError: broken PNG file"):
        open_split(config(folder), "train").read(3)


def test_an_epoch_is_a_function_of_seed_and_epoch(folder: Path) -> None:
    """It does not depend on the workers, the ranks, or the step at which it starts."""
    base = config(folder, batch_size=2)
    data = open_segment_data(base, seed=3)
    whole = list(data.train.epoch(1))
    again = list(open_segment_data(replace(base, workers=1, in_memory=True), seed=3).train.epoch(1, start_step=1))
    for one, other in zip(whole[1:], again, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.masks, other.masks)
    ranks = [open_segment_data(replace(base, batch_size=1), seed=3, rank=r, world_size=2) for r in (0, 1)]
    for batch, *shares in zip(whole, *(rank.train.epoch(1) for rank in ranks), strict=True):
        by_id = {int(share.sample_ids): share.images[0] for share in shares}
        assert by_id.keys() == set(batch.sample_ids.tolist())
        for image, index in zip(batch.images, batch.sample_ids.tolist(), strict=True):
            assert torch.equal(image, by_id[index])
    assert not torch.equal(next(iter(data.train.epoch(0))).images, whole[0].images)


def test_evaluation_images_keep_their_masks(folder: Path) -> None:
    (batch,) = list(open_eval_images(config(folder, short_side=96, eval_batch_size=4)))
    assert [tuple(image.pixels.shape) for image in batch] == [(3, 96, 128)] * 3
    assert [image.size for image in batch] == [(48, 64)] * 3
    assert np.array_equal(batch[1].mask, shapes.draw(1001)[1])
    shares = [open_eval_images(config(folder), rank=rank, world_size=2) for rank in (0, 1)]
    assert [[image.sample_id for batch in share for image in batch] for share in shares] == [[0, 2], [1]]


def test_image_and_mask_are_cut_alike() -> None:
    """The image shows its own mask, and still does after every geometric augmentation."""
    mask = np.kron(np.arange(12, dtype=np.uint8).reshape(3, 4), np.ones((16, 16), np.uint8))
    pixels = np.repeat((mask * 20)[..., None], 3, axis=2)
    transform = TrainTransform(config("", crop=[40, 24], scale=[0.5, 2.0], photometric=False, max_class_share=1.0))
    for seed in range(20):
        random.seed(seed)
        image, classes = transform(pixels, mask)
        assert image.shape == (*classes.shape, 3)
        assert classes.shape[0] <= 40
        assert classes.shape[1] <= 24
        # Bilinear mixes at borders between cells; away from them both agree.
        assert (np.abs(image[..., 0].astype(int) - classes * 20) <= 1).mean() > 0.6


def test_a_batch_says_which_part_of_a_crop_is_the_image(folder: Path) -> None:
    """The images have 48×64 pixels. Crops of 64×64 are padded below, crops of 32×32 are not."""
    (batch,) = open_segment_data(config(folder, crop=64, scale=[1, 1]), seed=0).train.epoch(0)
    assert batch.images.shape == (4, 3, 64, 64)
    assert batch.sizes is not None
    assert batch.sizes.tolist() == [[48, 64]] * 4
    assert (batch.masks[:, 48:] == IGNORED).all()
    assert (batch.masks[:, :48] != IGNORED).any()
    (batch,) = open_segment_data(config(folder, crop=32, scale=[1, 1]), seed=0).train.epoch(0)
    assert batch.sizes is None


def test_crops_are_not_all_of_one_class() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 48:] = 1
    transform = TrainTransform(config("", crop=16, scale=[1, 1], photometric=False, hflip=0))
    mixed = 0
    for seed in range(50):
        random.seed(seed)
        mixed += len(np.unique(transform(np.zeros((64, 64, 3), np.uint8), mask)[1])) == 2
    # A crop has both classes with probability 15/49, and less than 3/4 of one, in one of ten draws, with 0.87.
    assert mixed > 35


def test_sizes_keep_the_aspect_ratio() -> None:
    settings = config("", short_side=512)
    assert target_size((375, 1242), settings) == (512, 1696)
    assert target_size((100, 1000), settings) == (205, 2048)  # the long side is the limit
    assert target_size((375, 1242), settings, scale=0.5) == (256, 848)
    assert target_size((375, 1242), config("")) == (375, 1242)
    assert target_size((1, 3000), settings) == (1, 2048)


def test_colours_are_distorted_in_bounds() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    changed = []
    for seed in range(40):
        random.seed(seed)
        other = np.asarray(distort(image)).astype(int)
        changed.append(np.abs(other - np.asarray(image)).mean())
    assert min(changed) < 0.5  # now and then nothing happens: (1/2)⁴ of the time
    assert max(changed) > 20
    grey = Image.new("RGB", (4, 4), (100, 100, 100))
    for seed in range(20):
        random.seed(seed)
        assert np.ptp(np.asarray(distort(grey)), axis=2).max() <= 1  # grey has no hue to turn


def test_a_batch_is_no_larger_than_the_data(folder: Path) -> None:
    loader = open_segment_data(config(folder, batch_size=8), seed=0).train
    assert [len(batch.images) for batch in loader.epoch(0)] == [loader.batch_size] == [6]


def test_links_and_pipes(folder: Path) -> None:
    """A link to a parent folder does not make the search endless, and a pipe does not block it."""
    (folder / "images" / "train" / "loop").symlink_to(folder / "images" / "train")
    os.mkfifo(folder / "images" / "train" / "pipe.png")
    shutil.copy(next((folder / "masks" / "train").iterdir()), folder / "masks" / "train" / "pipe.png")
    data = open_segment_data(config(folder, max_broken=1), seed=0)
    assert len(list(data.train.epoch(0))) == 1
    assert {image.reason for image in data.train.skipped} <= {"not a regular file"}
    assert data.train.steps_per_epoch == 7 // 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(crop=[1, 2, 3]), "data.crop is .*; expected a positive side"),
        (dict(scale=[2.0, 0.5]), "data.scale is"),
        (dict(max_class_share=0.0), "data.max_class_share is 0.0"),
        (dict(eval_scales=[]), "data.eval_scales is"),
        (dict(window_stride=0.0), "data.window_stride is"),
        (dict(path="nowhere"), "data path 'nowhere' does not exist"),
        (dict(classes=["one", "two"]), "holds the class number"),
    ],
)
def test_settings_that_cannot_work(setting: dict[str, object], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_segment_data(config(setting.pop("path", folder), **setting), seed=0)
