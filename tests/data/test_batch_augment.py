"""Augmentation of whole batches: the right pixels, and the same ones for every division of an epoch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inline_attention.data import Data, DataConfig, open_data
from inline_attention.data.batch_augment import ERASE_DRAWS, crop_and_flip, crop_boxes, erased_boxes, jitter_colours
from inline_attention.data.seeding import seed_generators
from inline_attention.data.transforms import BoxErasing

PLAIN = dict(scale=[1.0, 1.0], ratio=[1.0, 1.0], hflip=0.0, color_jitter=0.0)


def open_digits(*, batch_size: int = 32, rank: int = 0, world_size: int = 1, seed: int = 1, **options: object) -> Data:
    settings: dict[str, object] = dict(
        path="digits", img_size=8, in_chans=1, batch_size=batch_size, in_memory=True, augment_on_device=True,
        auto_augment=None, random_erase=0.0, eval_transform="resize", workers=0,
    )  # fmt: skip
    return open_data(DataConfig(**{**settings, **options}), seed=seed, rank=rank, world_size=world_size)


def epoch_images(data: Data, epoch: int, start_step: int = 0) -> dict[int, torch.Tensor]:
    batches = list(data.train.epoch(epoch, start_step=start_step))
    return {int(i): image for b in batches for i, image in zip(b.sample_ids, b.images, strict=True)}


def test_nothing_drawn_leaves_the_images_alone() -> None:
    augmented = epoch_images(open_digits(**PLAIN), 0)
    plain = epoch_images(open_digits(augment=False, augment_on_device=False), 0)
    assert augmented.keys() == plain.keys()
    for sample, image in plain.items():
        torch.testing.assert_close(augmented[sample], image, rtol=0, atol=1e-5)


def test_flip() -> None:
    plain, flipped = (epoch_images(open_digits(**{**PLAIN, "hflip": p}), 0) for p in (0.0, 1.0))
    for sample, image in plain.items():
        torch.testing.assert_close(flipped[sample], image.flip(-1), rtol=0, atol=1e-4)


PUBLISHED: dict[str, object] = dict(auto_augment="rand-m9-mstd0.5-inc1", random_erase=0.25)


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["jitter", "published"])
def test_an_image_depends_on_seed_epoch_and_sample_alone(options: dict[str, object]) -> None:
    whole = epoch_images(open_digits(**options), 2)
    late = epoch_images(open_digits(**options), 2, start_step=20)
    other_ranks = [epoch_images(open_digits(batch_size=16, rank=rank, world_size=2, **options), 2) for rank in range(2)]
    for part in (late, *other_ranks):
        assert part
        assert all(torch.equal(image, whole[sample]) for sample, image in part.items())
    for other in (epoch_images(open_digits(**options), 3), epoch_images(open_digits(seed=2, **options), 2)):
        shared = other.keys() & whole.keys()
        assert sum(torch.equal(other[sample], whole[sample]) for sample in shared) < len(shared) / 20


def test_copies_of_repeated_augmentation_differ() -> None:
    batch = next(open_digits(repeats=2).train.epoch(0))
    assert torch.equal(batch.sample_ids[::2], batch.sample_ids[1::2])
    assert not torch.equal(batch.images[::2], batch.images[1::2])


def test_boxes_have_the_area_and_ratio_asked_for_and_lie_inside() -> None:
    draws = torch.rand(2000, 4, generator=torch.Generator().manual_seed(0))
    top, left, height, width = crop_boxes(draws, size=(40, 80), scale=[0.1, 0.4], ratio=[0.5, 2.0]).unbind(1)
    assert bool((top >= 0).all() and (left >= 0).all() and (top + height <= 1 + 1e-6).all())
    assert bool((left + width <= 1 + 1e-6).all())
    whole = (height < 1) & (width < 1)  # not cut down to the image
    area, ratio = (height * width)[whole], (width * 80 / (height * 40))[whole]
    assert 0.1 - 1e-6 <= area.min() < 0.11 < 0.39 < area.max() <= 0.4 + 1e-6
    assert 0.5 - 1e-5 <= ratio.min() < 0.52 < 1.9 < ratio.max() <= 2.0 + 1e-5


def test_erased_boxes_are_timms() -> None:
    """The share of images, and areas and ratios of the boxes, beside those that timm draws."""
    generator = torch.Generator().manual_seed(0)
    boxes = erased_boxes(torch.rand(20_000, ERASE_DRAWS, generator=generator), size=(64, 48), probability=0.25)
    top, left, height, width = boxes.double().unbind(1)
    assert bool((boxes >= 0).all() and (top + height <= 64).all() and (left + width <= 48).all())
    erased = height > 0
    assert erased.double().mean().item() == pytest.approx(0.25, abs=0.01)
    seed_generators(0)
    timms = [BoxErasing(1.0)(torch.zeros(1, 64, 48, dtype=torch.uint8)) for _ in range(2000)]
    expected = torch.tensor([box.box for box in timms if box is not None]).double()
    for found, timm in zip(boxes[erased].double().unbind(1), expected.unbind(1), strict=True):
        assert found.mean().item() == pytest.approx(timm.mean().item(), abs=1.0)
        assert found.std().item() == pytest.approx(timm.std().item(), rel=0.1)  # those that do not fit are clipped


def test_erased_pixels_are_normal_noise() -> None:
    options = {**PLAIN, "in_chans": 3, "img_size": 16}
    plain, erased = (epoch_images(open_digits(**options, random_erase=p), 0) for p in (0.0, 1.0))
    changed = torch.cat([image[image != plain[sample]] for sample, image in erased.items()])
    total = sum(image.numel() for image in plain.values())
    assert 0.1 < len(changed) / total < 0.2  # 2 to 33 per cent of an image
    assert changed.mean().item() == pytest.approx(0, abs=0.02)
    assert changed.std().item() == pytest.approx(1, abs=0.02)
    one, other = (erased[sample][erased[sample] != plain[sample]] for sample in list(plain)[:2])
    assert not torch.equal(one[:10], other[:10])


def test_a_policy_changes_some_images_and_keeps_the_others() -> None:
    plain = epoch_images(open_digits(**PLAIN), 0)
    found = epoch_images(open_digits(**PLAIN, auto_augment="rand-m9-mstd0.5-inc1-p0.5"), 0)
    kept = sum(torch.allclose(found[sample], image, atol=1e-5) for sample, image in plain.items()) / len(plain)
    assert 0.2 < kept < 0.5  # two layers, each with a probability of a half; some operations change nothing


# A ramp comes out of linear interpolation as it is; PyTorch's cubic bends it by a few hundredths of a step.
@pytest.mark.parametrize(("mode", "tolerance"), [("bilinear", 1e-3), ("bicubic", 0.6)])
def test_a_crop_samples_the_places_it_should(mode: str, tolerance: float) -> None:
    rows, columns = 12, 16
    ramp = (10 * torch.arange(columns) + torch.arange(rows)[:, None]).float().expand(1, 1, -1, -1)
    box = torch.tensor([[0.25, 0.25, 0.5, 0.5]])
    out = crop_and_flip(ramp, box, torch.tensor([False]), mode=mode)[0, 0]
    across = 0.25 * columns - 0.5 + 0.5 * (torch.arange(columns) + 0.5)
    down = 0.25 * rows - 0.5 + 0.5 * (torch.arange(rows) + 0.5)
    torch.testing.assert_close(out, 10 * across + down[:, None], rtol=0, atol=tolerance)


def test_colour_jitter() -> None:
    images = 255 * torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    same = jitter_colours(images, torch.ones(2, 3))
    torch.testing.assert_close(same, images)
    grey = jitter_colours(images, torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]))
    assert grey[0].std(0).max() < 1e-3  # no saturation: the channels are equal
    assert grey[1].std() < 1e-3  # no contrast: one value
    dark = jitter_colours(images, torch.tensor([[0.5, 1.0, 1.0]]).expand(2, 3))
    torch.testing.assert_close(dark, images / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(in_memory=False), "data.in_memory is False; expected true with data.augment_on_device"),
        (dict(auto_augment="augmix-m3"), "data.auto_augment is 'augmix-m3', not a RandAugment; expected a policy"),
        (
            dict(auto_augment="rand-m9-x2"),
            "not a RandAugment that timm understands .Unknown RandAugment config",
        ),
        (dict(auto_augment="rand-m9-t3a"), "data.auto_augment is 'rand-m9-t3a', a set of operations of its own"),
        (
            dict(auto_augment="rand-m9-tweights"),
            "'rand-m9-tweights', a set of operations of its own; expected",
        ),
        (dict(interpolation="lanczos"), "data.interpolation is 'lanczos'; expected bilinear or bicubic"),
    ],
)
def test_what_cannot_be_done_by_the_batch_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_digits(**options)


def test_an_unreadable_image_is_replaced(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(train={"a": 9, "b": 8}, val={"a": 2, "b": 2})
    next((folder / "train" / "a").iterdir()).write_bytes(b"")
    data = open_digits(path=str(folder), img_size=16, in_chans=3, batch_size=4, max_broken=2)
    batches = list(data.train.epoch(0))
    assert len(batches) == 4
    assert len(data.train.skipped) == 1
    assert all(batch.images.isfinite().all() for batch in batches)
