"""RandAugment of batches does to every image what timm's does."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import AugmentOp

from inline_attention.data.batch_policy import DRAWS, MAPS, PIXELS, BatchPolicy, Level, parse
from inline_attention.data.transforms import use_our_posterize

POLICY, MEAN = "rand-m9-mstd0.5-inc1", (0.485, 0.456, 0.406)


def make_images() -> torch.Tensor:
    """(6, 3, 40, 48): noise, and smooth images of several contrasts"""
    generator = torch.Generator().manual_seed(0)
    smooth = 255 * torch.nn.functional.interpolate(torch.rand(6, 3, 9, 7, generator=generator), size=(40, 48))
    images = smooth.to(torch.uint8)
    images[0] = torch.randint(0, 256, (3, 40, 48), generator=generator)
    images[1] = images[1] // 4 + 50
    return images


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("level", [0.0, 1.3, 9.0, 10.0])
@pytest.mark.parametrize("name", [*PIXELS, *MAPS])
def test_operations_are_timms(name: str, level: float, sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.1 if sign > 0 else 0.9)
    fill = tuple(round(255 * value) for value in MEAN)
    operation = AugmentOp(name, prob=1, magnitude=level, hparams=dict(img_mean=fill, interpolation=Image.BILINEAR))
    use_our_posterize(operation)
    images = make_images()
    expected = [np.asarray(operation(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images]
    policy = BatchPolicy(POLICY, mean=MEAN, mode="bilinear")
    found = policy.apply(name, images, Level(torch.full((6,), level / 10), torch.full((6,), sign)))
    difference = found.int() - torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2).int()
    assert difference.abs().max() <= 1
    assert (difference != 0).float().mean() < 0.05


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_grey_images(mode: str) -> None:
    images = make_images()[:, :1].repeat(20, 1, 1, 1)
    policy = BatchPolicy(POLICY, mean=(0.5,), mode=mode)
    draws = torch.rand(len(images), policy.layers, DRAWS, generator=torch.Generator().manual_seed(0))
    out = policy(images.clone(), draws)
    assert (out.shape, out.dtype) == (images.shape, torch.uint8)
    assert not torch.equal(out, images)


def test_an_image_does_not_depend_on_the_others() -> None:
    images = make_images()
    policy = BatchPolicy(POLICY, mean=MEAN, mode="bicubic")
    draws = torch.rand(6, policy.layers, DRAWS, generator=torch.Generator().manual_seed(1))
    whole = policy(images.clone(), draws)
    for i in range(6):
        assert torch.equal(policy(images[i : i + 1].clone(), draws[i : i + 1])[0], whole[i])


def test_operations_are_drawn_as_often_and_as_strongly_as_by_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, timms = BatchPolicy(POLICY, mean=MEAN, mode="bicubic"), parse(POLICY)
    counts, levels, signs = Counter[str](), [], []

    def record(name: str, images: torch.Tensor, level: Level) -> torch.Tensor:
        counts[name] += len(images)
        levels.append(level.share)
        signs.append(level.sign)
        return images

    monkeypatch.setattr(policy, "apply", record)
    total = 30_000
    draws = torch.rand(total, policy.layers, DRAWS, generator=torch.Generator().manual_seed(0))
    policy(torch.zeros(total, 3, 1, 1, dtype=torch.uint8), draws)
    assert policy.layers == timms.num_layers == 2
    assert counts.keys() == {operation.name for operation in timms.ops}
    expected = 2 * total * timms.ops[0].prob / len(timms.ops)
    assert all(count == pytest.approx(expected, rel=0.1) for count in counts.values())
    share = 10 * torch.cat(levels)
    assert share.mean().item() == pytest.approx(9, abs=0.02)
    assert share.std().item() == pytest.approx(0.5, abs=0.02)
    assert share.max() <= 10
    assert torch.cat(signs).mean().item() == pytest.approx(0, abs=0.02)


def test_levels_without_a_normal_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    draws = torch.rand(20_000, 1, DRAWS, generator=torch.Generator().manual_seed(0))
    for text in ("rand-m6-n1-p1", "rand-m6-n1-p1-mstd101", "rand-m12-n1-p1-mmax15"):
        policy = BatchPolicy(text, mean=MEAN, mode="bicubic")
        found: list[torch.Tensor] = []
        monkeypatch.setattr(policy, "apply", lambda _, images, level, f=found: f.append(level.share) or images)
        policy(torch.zeros(len(draws), 3, 1, 1, dtype=torch.uint8), draws)
        seen.append(10 * torch.cat(found))
    fixed, uniform, strong = seen
    assert bool((fixed == 6).all() and (strong == 12).all())
    assert 0 <= uniform.min() < 0.01 < 5.99 < uniform.max() <= 6
