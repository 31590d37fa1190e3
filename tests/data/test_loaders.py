import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from inline_attention.data import Batch, DataConfig, Mixup, open_data, open_eval_data, open_files

MakeFolder = Callable[..., Path]

CLASSES = {"a": 9, "b": 8, "c": 7}


def config(path: object, **options: object) -> DataConfig:
    """Everything random is on: the published augmentation, at 8 pixels."""
    defaults: dict[str, object] = {"img_size": 8, "batch_size": 4, "workers": 0, "random_erase": 0.5}
    return DataConfig(path=str(path), **{**defaults, **options})


def merged(batches: Iterator[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    parts = list(batches)
    return tuple(torch.cat([getattr(part, name) for part in parts]) for name in ("images", "targets", "sample_ids"))


def assert_equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def folder(make_folder: MakeFolder) -> Path:
    return make_folder(train=CLASSES, val=CLASSES)


def test_a_share_of_the_training_images(folder: Path) -> None:
    """Every class keeps its share, and all validation images stay."""
    whole, half = (open_data(config(folder, train_share=share), seed=1) for share in (1.0, 0.5))
    assert 2 * half.train.steps_per_epoch == whole.train.steps_per_epoch
    assert half.val.num_images == whole.val.num_images
    _, labels, _ = merged(half.train.epoch(0))
    assert len(labels.unique()) == len(half.class_names)
    with pytest.raises(ValueError, match=r"data\.train_share is 0; expected above 0"):
        open_data(config(folder, train_share=0))
    with pytest.raises(ValueError, match="expected 1 for the stream"):
        open_data(config("wds/nowhere", train_share=0.5))


# Randomness


def test_workers_do_not_matter(folder: Path) -> None:
    alone = open_data(config(folder), seed=1).train
    for workers in (1, 2):
        loader = open_data(config(folder, workers=workers), seed=1).train
        for epoch in (0, 3):
            assert_equal(merged(loader.epoch(epoch)), merged(alone.epoch(epoch)))


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_epoch(folder: Path, workers: int) -> None:
    loader = open_data(config(folder, workers=workers), seed=1).train
    whole = list(loader.epoch(5))
    assert len(whole) == loader.steps_per_epoch == 6
    abandoned = loader.epoch(2)  # an abandoned iteration must not affect the next one
    next(abandoned)
    resumed = list(loader.epoch(5, start_step=4))
    assert len(resumed) == 2
    assert_equal(merged(iter(resumed)), merged(iter(whole[4:])))
    assert list(loader.epoch(5, start_step=6)) == []
    with pytest.raises(ValueError, match="start_step is 7; an epoch has 6 steps"):
        loader.epoch(5, start_step=7)


def test_augmentation_is_of_seed_epoch_and_sample(folder: Path) -> None:
    def by_sample(batches: Iterator[Batch]) -> dict[int, Tensor]:
        images, _, ids = merged(batches)
        return {int(i): image for i, image in zip(ids, images, strict=True)}

    loader = open_data(config(folder), seed=1).train
    first = by_sample(loader.epoch(0))
    assert len(first) == 24
    for other in (by_sample(loader.epoch(1)), by_sample(open_data(config(folder), seed=2).train.epoch(0))):
        assert sum(torch.equal(image, other[i]) for i, image in first.items()) < 3
    # A different batch size only changes which images share a batch.
    other = by_sample(open_data(config(folder, batch_size=6), seed=1).train.epoch(0))
    assert all(torch.equal(image, other[i]) for i, image in first.items())


def test_repeated_augmentation_gives_different_copies(folder: Path) -> None:
    loader = open_data(config(folder, repeats=2), seed=1).train
    for batch in loader.epoch(0):
        assert batch.sample_ids[0] == batch.sample_ids[1]
        assert batch.sample_ids[2] == batch.sample_ids[3]
        assert not torch.equal(batch.images[0], batch.images[1])


def test_global_generators_are_left_alone(folder: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    data = open_data(config(folder), seed=1)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    list(data.train.epoch(0)), list(data.val)
    assert draw() == expected
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    assert_equal(merged(data.train.epoch(0)), merged(open_data(config(folder), seed=1).train.epoch(0)))


def test_workers_can_be_spawned(folder: Path) -> None:
    """If processes do not fork (macOS), everything that a worker needs is pickled."""
    import pickle

    from inline_attention.data.dataset import TrainDataset
    from inline_attention.data.factory import open_source
    from inline_attention.data.sampler import SampleKey

    samples = TrainDataset(open_source(config(folder), "train"), config=config(folder), seed=0)
    copy = pickle.loads(pickle.dumps(samples))
    keys = [SampleKey(0, 5, 0), SampleKey(1, 7, 0)]
    assert torch.equal(copy.__getitems__(keys).images, samples.__getitems__(keys).images)


# Ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_see_what_one_rank_sees(folder: Path, world_size: int) -> None:
    """At each step, the global batch and the mixed pairs are the same."""
    whole = open_data(config(folder, batch_size=4 * world_size), seed=1).train
    ranks = [open_data(config(folder), seed=1, rank=r, world_size=world_size).train for r in range(world_size)]
    assert {loader.steps_per_epoch for loader in ranks} == {whole.steps_per_epoch}
    mixup = Mixup(DataConfig(), num_classes=3, seed=1)

    def mixed(batch: Batch, step: int) -> dict[int, tuple[Tensor, Tensor]]:
        images, targets = mixup(batch.images, batch.targets, epoch=2, step=step)
        return dict(zip(batch.sample_ids.tolist(), zip(images, targets, strict=True), strict=True))

    for step, (batch, *parts) in enumerate(zip(whole.epoch(2), *(r.epoch(2) for r in ranks), strict=True)):
        expected = mixed(batch, step)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for part in parts:
            found |= mixed(part, step)
        assert found.keys() == expected.keys()
        for sample, pair in expected.items():
            assert_equal(found[sample], pair)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 5, 30])  # 30: some ranks have no image
def test_every_image_is_evaluated_once(folder: Path, world_size: int, in_memory: bool) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        loader = open_eval_data(config(folder, in_memory=in_memory), rank=rank, world_size=world_size)
        batches = list(loader)
        assert len(batches) <= loader.max_batches
        seen += [int(i) for batch in batches for i in batch.sample_ids]
    assert sorted(seen) == list(range(24))


# Memory


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("augment", [True, False])
def test_in_memory_is_the_same(folder: Path, augment: bool, in_chans: int) -> None:
    options = {"augment": augment, "in_chans": in_chans}
    memory = open_data(config(folder, in_memory=True, **options), seed=1)
    files = open_data(config(folder, **options), seed=1)
    assert_equal(merged(memory.train.epoch(1, start_step=2)), merged(files.train.epoch(1, start_step=2)))
    assert_equal(merged(iter(memory.val)), merged(iter(files.val)))
    (folder / "train" / "a" / "000.png").unlink()
    assert len(merged(memory.train.epoch(2))[0]) == 24  # reads nothing any more


def test_images_are_normalised(folder: Path) -> None:
    options = {"augment": False, "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    plain = open_data(config(folder, augment=False, mean=[0.0] * 3, std=[1.0] * 3)).train
    normalised = open_data(config(folder, **options)).train
    x, y = (next(loader.epoch(0)).images for loader in (plain, normalised))
    assert 0 <= x.min() < x.max() <= 1
    mean, std = (torch.tensor(options[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(y, (x - mean) / std)


def test_waiting_is_measured(folder: Path) -> None:
    loader = open_data(config(folder)).train
    assert loader.waiting_seconds == 0
    list(loader.epoch(0))
    assert loader.waiting_seconds > 0


# Unreadable images


def damage(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).write_bytes(b"<html>404 not found</html>")
    return [str(folder / name) for name in names]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("augment", [True, False])
def test_training_replaces_the_unreadable(folder: Path, in_memory: bool, augment: bool, caplog) -> None:
    bad = damage(folder / "train", "a/001.png", "b/003.png")
    options = {"in_memory": in_memory, "augment": augment, "max_broken": 2}
    loader = open_data(config(folder, **options), seed=1).train
    first = merged(loader.epoch(0))
    assert first[0].shape[0] == 24  # batches keep their shape
    assert {1, 12}.isdisjoint(first[2].tolist())  # the samples' numbers are those of the images shown
    assert len(set(first[2].tolist())) == 22
    assert {image.path for image in loader.skipped} == set(bad)
    assert {image.reason for image in loader.skipped} == {"not an image in a known format"}
    assert loader.skipped.replaced == 2
    assert sum("skipping unreadable image" in message for message in caplog.messages) == 2
    list(loader.epoch(1))
    assert len(loader.skipped) == 2  # a file is counted once
    assert loader.skipped.replaced == 4
    # The replacement is a function of (seed, epoch, sample), with any number of workers.
    again = open_data(config(folder, workers=2, **options), seed=1).train
    assert_equal(merged(again.epoch(0)), first)


def test_a_replaced_label_is_that_of_the_image(folder: Path) -> None:
    damage(folder / "train", *(f"a/{number:03}.png" for number in range(8)))
    loader = open_data(config(folder, max_broken=8)).train
    _, targets, ids = merged(loader.epoch(0))
    assert torch.equal(targets, torch.where(ids < 9, 0, torch.where(ids < 17, 1, 2)))


@pytest.mark.parametrize("in_memory", [False, True])
def test_evaluation_leaves_out_the_unreadable(folder: Path, in_memory: bool, caplog) -> None:
    bad = damage(folder / "val", "a/000.png", "a/001.png", "a/002.png", "a/003.png")  # the whole first batch
    loader = open_eval_data(config(folder, in_memory=in_memory, max_broken=0.5))
    for _ in range(2):
        ids = merged(iter(loader))[2]
        assert ids.tolist() == list(range(4, 24))
        assert [image.path for image in loader.skipped] == bad  # anew in every pass
    assert caplog.text.count("skipping unreadable image") == len(bad)


def test_images_of_a_few_pixels(folder: Path) -> None:
    for name, size in (("000", (1, 1)), ("001", (2, 1)), ("002", (300, 1))):
        Image.new("RGB", size).save(folder / "train" / "a" / f"{name}.png")
    data = open_data(config(folder))
    for epoch in range(3):
        assert len(merged(data.train.epoch(epoch))[0]) == 24


def test_a_line_that_a_transform_would_blow_up(folder: Path) -> None:
    """The transform enlarges the short side to the size of the input, and the long side with it."""
    Image.new("L", (1, 65_000)).save(folder / "val" / "a" / "000.png")
    loader = open_eval_data(config(folder, img_size=224, eval_transform="timm"))
    assert sum(len(batch.images) for batch in loader) == 23
    (skipped,) = loader.skipped
    assert skipped.reason == "256 × 16640000 pixels, more than the limit of 89,478,485; scale it down"
    whole = open_eval_data(config(folder, img_size=224))  # both sides are resized: no side of this is long
    assert sum(len(batch.images) for batch in whole) == 24


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_a_transform_cannot_handle_is_skipped(
    folder: Path, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (31, 7)).save(folder / "train" / "a" / "000.png")
    Image.new("RGB", (31, 7)).save(folder / "val" / "a" / "000.png")
    for name in ("resize", "crop"):
        original = getattr(Image.Image, name)

        def out_of_memory(
            image: Image.Image, *args: object, original: Callable = original, **kwargs: object
        ) -> Image.Image:
            if image.width == 31:
                raise MemoryError
            return original(image, *args, **kwargs)

        monkeypatch.setattr(Image.Image, name, out_of_memory)
    data = open_data(config(folder, in_memory=in_memory, auto_augment=None))
    assert len(merged(data.train.epoch(0))[0]) == 24
    assert len(merged(iter(data.val))[0]) == 23
    for loader in (data.train, data.val):
        assert [image.reason for image in loader.skipped] == ["it cannot be transformed (MemoryError: )"]


@pytest.mark.parametrize(("max_broken", "allowed"), [(0, 0), (0.01, 1), (0.1, 3), (2, 2)])
def test_too_many_unreadable_stop_the_run(folder: Path, max_broken: float, allowed: int) -> None:
    names = [f"b/{number:03}.png" for number in range(allowed)]
    damage(folder / "train", *names)
    list(open_data(config(folder, max_broken=max_broken)).train.epoch(0))
    damage(folder / "train", "c/000.png")
    message = rf"{allowed + 1} unreadable images, more than the limit of {allowed}: .*data\.max_broken"
    with pytest.raises(ValueError, match=message):
        list(open_data(config(folder, max_broken=max_broken)).train.epoch(0))
    with pytest.raises(ValueError, match=message):  # in memory: before training
        open_data(config(folder, max_broken=max_broken, in_memory=True, augment=False))


@pytest.mark.parametrize("options", [{}, {"in_memory": True}, {"in_memory": True, "augment": False}])
def test_nothing_can_be_read(folder: Path, options: dict[str, bool]) -> None:
    damage(folder / "train", *(str(path.relative_to(folder / "train")) for path in (folder / "train").rglob("*.png")))
    with pytest.raises(ValueError, match=r"none of the training images|no readable image"):
        list(open_data(config(folder, max_broken=100, **options)).train.epoch(0))


# Files


def test_pixels_that_do_not_fit_in_memory(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"24 images need [\d,]+ GiB of memory; set data\.in_memory=false"):
        open_data(config(folder, in_memory=True, augment=False, img_size=10**7))


def test_files_keep_their_order(folder: Path) -> None:
    paths = sorted((folder / "val").rglob("*.png"), reverse=True)
    loader = open_files(paths, config=config("unused", max_broken=1))
    damage(paths[3].parent, paths[3].name)
    ids = merged(iter(loader))[2].tolist()
    assert ids == [i for i in range(24) if i != 3]
    assert [image.path for image in loader.skipped] == [str(paths[3])]
