import numpy as np
import pytest
import torch
from PIL import Image

from inline_attention.data import DataConfig
from inline_attention.data.seeding import derive_seed, seed_generators
from inline_attention.data.transforms import BoxErasing, erase_, eval_transform, train_transform

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 40, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(28, 28), (33, 20), (384, 384)])
def test_published_evaluation(size: tuple[int, int]) -> None:
    """Both sides are resized to int(size·256/224), without keeping the aspect ratio. Then the centre is cropped."""
    height, width = (int(side * 256 / 224) for side in size)
    resized = np.asarray(PHOTO.resize((width, height), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    expected = resized[:, top : top + size[0], left : left + size[1]]
    result = eval_transform(DataConfig(img_size=list(size)))(PHOTO)
    assert result.dtype == torch.uint8
    assert (result.numpy() == expected).all()


def test_resize_evaluation() -> None:
    result = eval_transform(DataConfig(img_size=[24, 32], eval_transform="resize"))(PHOTO)
    expected = np.asarray(PHOTO.resize((32, 24), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert (result.numpy() == expected).all()


def test_timm_evaluation_keeps_the_aspect_ratio() -> None:
    result = eval_transform(DataConfig(img_size=28, eval_transform="timm", crop_pct=0.7))(PHOTO)
    resized = np.asarray(PHOTO.resize((40, 61), Image.Resampling.BICUBIC))  # the short side is 28 / 0.7 already
    top, left = round((61 - 28) / 2), round((40 - 28) / 2)
    assert (result.numpy() == resized[top : top + 28, left : left + 28].transpose(2, 0, 1)).all()


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"data\.auto_augment is 'rond-m9'"):
        train_transform(DataConfig(auto_augment="rond-m9"))


@pytest.mark.parametrize("in_chans", [1, 3])
def test_strongest_augmentation(in_chans: int) -> None:
    """Magnitude 10 asks posterising to keep 0 bits, at which newer Pillow releases raise."""
    transform = train_transform(DataConfig(img_size=8, in_chans=in_chans, auto_augment="rand-m10-n8-p1.0-inc1"))
    image = PHOTO if in_chans == 3 else PHOTO.convert("L")
    for seed in range(20):
        seed_generators(seed)
        assert transform(image).shape == (in_chans, 8, 8)


def test_erasing_is_timm_s() -> None:
    """Drawn apart and applied after normalisation, the result is what timm's random erasing gives."""
    from timm.data.random_erasing import RandomErasing

    images = torch.randn(6, 3, 16, 12, generator=torch.Generator().manual_seed(0))
    apart, direct = BoxErasing(1.0), RandomErasing(1.0, mode="pixel", device="cpu")
    boxes, noise, expected = [], [], []
    for number, image in enumerate(images):
        if number == 2:  # one that is not erased
            boxes.append((0, 0, 0, 0))
            expected.append(image)
            continue
        seed_generators(number)
        assert BoxErasing(0.0)(image) is None  # draws once, as `apart` does to decide
        expected.append(direct(image.clone()))
        seed_generators(number)
        erased = apart(image)
        assert erased is not None
        boxes.append(erased.box)
        noise.append(erased.noise.flatten())
    result = erase_(images.clone(), torch.tensor(boxes), torch.cat(noise))
    torch.testing.assert_close(result, torch.stack(expected), rtol=0, atol=0)
    assert not torch.equal(result, images)


def test_erasing_probability() -> None:
    erasing = BoxErasing(0.25)
    seed_generators(0)
    count = sum(erasing(torch.zeros(1, 16, 16)) is not None for _ in range(2000))
    assert 420 < count < 580


def test_seeds_differ_by_purpose_and_part() -> None:
    seeds = [derive_seed(p, *parts) for p in ("order", "augment") for parts in ((0, 1), (1, 0), (0, 1, 0), (-1, 2))]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("order", 0, 1) == 9179690762293077606  # a saved run must find its order again
