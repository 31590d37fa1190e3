"""WebDataset shards through timm's reader."""

import io
import json
import multiprocessing
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import training_runs
from PIL import Image

from inline_attention.data import DataConfig, open_data, open_eval_data
from inline_attention.data.streams import Item

pytest.importorskip("webdataset")


def config(root: Path, **options: object) -> DataConfig:
    defaults: dict[str, object] = {"img_size": 8, "batch_size": 4, "workers": 0, "num_classes": 3, "augment": False}
    return DataConfig(path=f"wds/{root}", mean=[0.0] * 3, std=[1.0] * 3, **{**defaults, **options})


def encoded(grey: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (10, 10), (grey, grey, grey)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Five shards of 4 to 6 images a split (25 in all); image i is grey 2i, its class i % 3."""
    splits = {}
    for split in ("train", "val"):
        number, lengths = 0, [4, 6, 5, 6, 4]
        names = [f"{split}-{shard:04}.tar" for shard in range(len(lengths))]
        for name, length in zip(names, lengths, strict=True):
            with tarfile.open(tmp_path / name, "w") as tar:
                for _ in range(length):
                    for suffix, content in (("png", encoded(2 * number)), ("cls", str(number % 3).encode())):
                        member = tarfile.TarInfo(f"{number:06}.{suffix}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
                    number += 1
        splits[split] = {"name": split, "filenames": names, "shard_lengths": lengths, "num_samples": sum(lengths)}
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
    return tmp_path


def seen(batches) -> list[tuple[int, int]]:
    """(number of the image, its target) of every image."""
    return [
        (round(float(image.mean()) * 255 / 2), int(target))
        for batch in batches
        for image, target in zip(batch.images, batch.targets, strict=True)
    ]


EVERY_IMAGE = [(number, number % 3) for number in range(25)]


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 2), (2, 0), (3, 2), (7, 1)])
def test_evaluation_counts_every_image_once(shards: Path, world_size: int, workers: int) -> None:
    found = []
    for rank in range(world_size):
        loader = open_eval_data(config(shards, workers=workers), rank=rank, world_size=world_size)
        assert loader.max_batches is None
        assert loader.num_images == 25
        found += seen(loader)
    assert sorted(found) == EVERY_IMAGE


@pytest.mark.parametrize("workers", [0, 2])
def test_training(shards: Path, workers: int) -> None:
    loader = open_data(config(shards, workers=workers), seed=1).train
    assert loader.steps_per_epoch == 6
    assert not loader.exact_resume
    epochs = [list(loader.epoch(epoch)) for epoch in range(2)]
    for batches in epochs:
        assert [len(batch.images) for batch in batches] == [4] * 6
        assert set(seen(batches)) <= set(EVERY_IMAGE)
        ids = torch.cat([batch.sample_ids for batch in batches])
        assert len(ids.unique()) == 24
    assert seen(epochs[0]) != seen(epochs[1])
    again = open_data(config(shards, workers=workers), seed=1).train
    assert seen(again.epoch(1)) == seen(epochs[1])
    # A resumed epoch starts again at its beginning and is shorter by what was done.
    assert seen(again.epoch(1, start_step=4)) == seen(epochs[1][:2])


def test_global_generators_are_left_alone(shards: Path) -> None:
    loader = open_data(config(shards, augment=True, random_erase=1.0), seed=1).train
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn = [torch.rand(()).item() for _, _ in zip(range(3), loader.epoch(0), strict=False)]
    assert drawn == expected.tolist()


def append(shard: Path, name: str, content: bytes, label: bytes = b"1") -> None:
    with tarfile.open(shard, "a") as tar:
        for suffix, part in (("png", content), ("cls", label)):
            member = tarfile.TarInfo(f"{name}.{suffix}")
            member.size = len(part)
            tar.addfile(member, io.BytesIO(part))


def float_tiff() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), dtype=np.float32)).save(buffer, "TIFF")
    return buffer.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("content", "label", "why"),
    [
        (b"no image at all", b"1", "not an image"),
        (EPS, b"1", "not an image"),
        (float_tiff(), b"1", "floating-point"),
        (b"", b"1", "empty file"),
        (b"", b"cat", "its label is b'cat', which is not a number"),
    ],
)
def test_unreadable_images_are_counted(shards: Path, workers: int, content: bytes, label: bytes, why: str) -> None:
    append(shards / "val-0000.tar", "999999", content, label)
    loader = open_eval_data(config(shards, workers=workers))
    for _ in range(2):
        assert sorted(seen(loader)) == EVERY_IMAGE
        (skipped,) = loader.skipped
        assert skipped.path.endswith("val-0000.tar:999999")
        assert why in skipped.reason
    with pytest.raises(ValueError, match="1 unreadable images, more than the limit of 0"):
        seen(open_eval_data(config(shards, max_broken=0, workers=workers)))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_training_goes_on_after_unreadable_images(shards: Path, workers: int) -> None:
    for number, content in enumerate((float_tiff(), EPS, b"no image at all")):
        append(shards / f"train-000{number}.tar", f"99999{number}", content)
    loader = open_data(config(shards, workers=workers, max_broken=5)).train
    for epoch in range(3):
        batches = list(loader.epoch(epoch))
        assert [len(batch.images) for batch in batches] == [4] * loader.steps_per_epoch == [4] * 6
        assert set(seen(batches)) <= set(EVERY_IMAGE)
    assert 0 < len(loader.skipped) <= 3


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_can_be_read(shards: Path, workers: int) -> None:
    for shard in shards.glob("train-*.tar"):
        shard.unlink()
        append(shard, "000000", b"no image at all")
    with pytest.raises(ValueError, match="no readable image found"):
        list(open_data(config(shards, workers=workers, max_broken=5)).train.epoch(0))
    for shard in shards.glob("train-*.tar"):
        shard.write_bytes(bytes(1024))
    with pytest.raises(ValueError, match="no images in 'wds/"):
        list(open_data(config(shards, workers=workers)).train.epoch(0))


def test_every_run_of_unreadable_images_ends_a_batch(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that never came to its next batch would read on for ever, and could not be told to stop."""
    monkeypatch.setattr("inline_attention.data.streams.MAX_REPLACEMENTS", 3)

    def read(**_: object) -> Iterator[Item]:
        yield from (Item(str(number), b"", 0, damage="damaged") for number in range(6))
        raise AssertionError("reads on")

    loader = open_data(config(shards)).train._loader
    monkeypatch.setattr(loader._stream.reader, "read", read)
    batches = iter(loader._dataset)
    assert [len(next(batches).skipped) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_end_after_an_error(shards: Path, workers: int) -> None:
    """They also end if the caller keeps a reference to the iterator, as a traceback does."""
    for shard in shards.glob("*.tar"):
        append(shard, "999999", encoded(0), b"7")
    data = open_data(config(shards, workers=workers))
    for start in (lambda: data.train.epoch(0), lambda: iter(data.val)):
        batches = start()
        with pytest.raises(ValueError, match=r"label 7 of .*\.tar:999999 is out of range; expected 0 to 2"):
            list(batches)
        assert multiprocessing.active_children() == []


def test_workers_end_when_the_loader_is_closed(shards: Path) -> None:
    loader = open_data(config(shards, workers=2)).train
    abandoned = loader.epoch(0)
    next(abandoned)
    loader.close()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_run_with_a_bad_label_ends(shards: Path, tmp_path: Path) -> None:
    for shard in shards.glob("train*.tar"):
        append(shard, "999999", encoded(0), b"7")
    settings = ("data.num_classes=3", "data.in_memory=false", "data.in_chans=3", "data.workers=1", "data.batch_size=4")
    data = f"--data=wds/{shards}"
    log = tmp_path / "log.txt"
    status = training_runs.run(training_runs.arguments(tmp_path / "run", *settings, data), log=log)
    printed = log.read_text()
    assert status == 2, printed
    assert "label 7 of" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_is_missing(shards: Path, workers: int) -> None:
    """It is missing before a run starts, or is removed during the run."""
    data = open_data(config(shards, workers=workers))
    for split in ("train", "val"):
        (shards / f"{split}-0002.tar").unlink()
    for batches in (data.train.epoch(0), iter(data.val)):
        with pytest.raises(ValueError, match=r"shard '.*-0002\.tar' does not exist"):
            list(batches)
    with pytest.raises(ValueError, match=r"1 of 5 shards are missing: .*train-0002\.tar"):
        open_data(config(shards))


def test_a_shard_was_cut_off(shards: Path) -> None:
    shard = shards / "val-0002.tar"
    shard.write_bytes(shard.read_bytes()[:2048])
    with pytest.raises(ValueError, match=r"val-0002\.tar' has no end-of-archive mark"):
        open_eval_data(config(shards))


@pytest.mark.parametrize(
    "info",
    [
        [],
        {"splits": []},
        {"splits": {"val": 3}},
        {"splits": {"val": {"name": "val"}}},
        {"splits": {"val": {"name": "val", "num_samples": 5, "filenames": 7, "shard_lengths": []}}},
        {"splits": {"val": {"name": "val", "num_samples": 5, "filenames": [1, 2], "shard_lengths": []}}},
        {"splits": {"val": {"name": "val", "num_samples": "5", "filenames": ["val-0000.tar"], "shard_lengths": []}}},
        {"splits": {"val": {"name": "val", "num_samples": -5, "filenames": ["val-0000.tar"], "shard_lengths": []}}},
    ],
)
def test_an_info_file_of_another_shape(shards: Path, info: object) -> None:
    (shards / "_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"'val' of 'wds/|the shards of 'wds/"):
        open_eval_data(config(shards))


def test_other_labels_are_in_the_metadata(tmp_path: Path) -> None:
    """Under the name that `_info.json` gives; images with -1 have no such label."""
    with tarfile.open(tmp_path / "val-0000.tar", "w") as tar:
        for number, label in enumerate((2, -1, 1)):
            metadata = json.dumps({"fine": label}).encode()
            for suffix, part in (("png", encoded(2 * number)), ("cls", b"0"), ("json", metadata)):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(part)
                tar.addfile(member, io.BytesIO(part))
    split = {"name": "val", "filenames": ["val-0000.tar"], "shard_lengths": [3], "num_samples": 3, "alt_label": "fine"}
    (tmp_path / "_info.json").write_text(json.dumps({"splits": {"val": split}}))
    loader = open_eval_data(config(tmp_path))
    assert seen(loader) == [(0, 2), (2, 1)]
    assert len(loader.skipped) == 0


def test_names_of_shards_are_not_commands(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """webdataset executes names that begin with "pipe:". A name without a folder in front could begin so."""
    monkeypatch.chdir(shards)
    split = {"name": "val", "num_samples": 1, "filenames": ["pipe:touch executed"], "shard_lengths": [1]}
    (shards / "_info.json").write_text(json.dumps({"splits": {"val": split}}))
    options = config(Path())
    options.path = "wds/"
    with pytest.raises(ValueError, match="1 of 1 shards are missing"):
        list(open_eval_data(options))
    assert not (shards / "executed").exists()


def test_a_batch_is_no_larger_than_the_data(shards: Path) -> None:
    loader = open_data(config(shards, batch_size=64)).train
    assert loader.batch_size == 24
    assert [len(batch.images) for batch in loader.epoch(0)] == [24]


def test_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), 40000, dtype=np.uint16)).save(buffer, "PNG")
    with tarfile.open(tmp_path / "val-0000.tar", "w") as tar:
        for suffix, part in (("png", buffer.getvalue()), ("cls", b"0")):
            member = tarfile.TarInfo(f"a.{suffix}")
            member.size = len(part)
            tar.addfile(member, io.BytesIO(part))
    batch = next(iter(open_eval_data(config(tmp_path, val_split="val-{0000..0000}.tar|1"))))
    assert round(float(batch.images.mean()) * 255) == round(40000 / 257)


def test_errors(shards: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        open_data(config(shards / "nowhere"))
    with pytest.raises(ValueError, match=r"does not say how many classes it has; set data\.num_classes"):
        open_data(config(shards, num_classes=None))
    with pytest.raises(
        ValueError, match=r"split 'test' of 'wds/.*' cannot be opened: split test not found.*_info.json, or a pattern"
    ):
        open_data(config(shards, val_split="test"))
    with pytest.raises(ValueError, match=r"has 5 training shard\(s\) for 6 ranks; every rank needs one"):
        open_data(config(shards, batch_size=2), world_size=6)
    with pytest.raises(ValueError, match=r"data\.in_memory and data\.repeats need random access"):
        open_data(config(shards, in_memory=True))
    with pytest.raises(ValueError, match=r"label 2 of .* is out of range; expected 0 to 1"):
        list(open_data(config(shards, num_classes=2)).train.epoch(0))


def test_tensorflow_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tfds = pytest.importorskip("tensorflow_datasets")
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path), raising=False)
    greys = np.stack([np.full((10, 10, 3), 2 * number, np.uint8) for number in range(25)])
    split = tf.data.Dataset.from_tensor_slices({"image": greys, "label": np.arange(25) % 3})
    label = tfds.features.ClassLabel(names=["cat", "dog", "fox"])
    image = tfds.features.Image(shape=(None, None, 3), encoding_format="png")
    tfds.dataset_builders.store_as_tfds_dataset(
        name="greys",
        version="1.0.0",
        data_dir=str(tmp_path),
        split_datasets={"train": split, "val": split},
        features=tfds.features.FeaturesDict({"image": image, "label": label}),
    )
    options = config(tmp_path, num_classes=None)
    options.path = "tfds/greys"
    data = open_data(options, seed=1)
    assert data.class_names == ["cat", "dog", "fox"]
    batches = list(data.train.epoch(0))
    assert len(batches) == 6
    assert set(seen(batches)) <= set(EVERY_IMAGE)
    found = [pair for rank in range(3) for pair in seen(open_eval_data(options, rank=rank, world_size=3))]
    assert sorted(found) == EVERY_IMAGE
