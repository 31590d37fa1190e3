"""WebDataset shards through timm's reader."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inline_attention.data import DataConfig, open_data, open_eval_data

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


def test_unreadable_images_are_counted(shards: Path) -> None:
    content = b"no image at all"
    with tarfile.open(shards / "val-0000.tar", "a") as tar:
        for suffix, part in (("png", content), ("cls", b"1")):
            member = tarfile.TarInfo(f"999999.{suffix}")
            member.size = len(part)
            tar.addfile(member, io.BytesIO(part))
    loader = open_eval_data(config(shards))
    for _ in range(2):
        assert sorted(seen(loader)) == EVERY_IMAGE
        assert len(loader.skipped) == 1
    assert "cannot identify image" in next(iter(loader.skipped)).reason
    with pytest.raises(ValueError, match="1 unreadable images, more than the limit of 0"):
        seen(open_eval_data(config(shards, max_broken=0)))


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
    with pytest.raises(ValueError, match="label 2 out of range; expected 0 to 1"):
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
