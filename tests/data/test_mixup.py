import random

import numpy as np
import pytest
import torch

from inline_attention.data import DataConfig, Mixup
from inline_attention.data.sampler import rank_positions

IMAGES = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(12) % 5


def mixed(mixup: Mixup, images: torch.Tensor = IMAGES, targets: torch.Tensor = TARGETS, **position: int):
    return mixup(images.clone(), targets, **position)


def test_randomness_is_of_seed_epoch_and_step() -> None:
    mixup = Mixup(DataConfig(), num_classes=5, seed=3)
    first = mixed(mixup, epoch=1, step=2)
    for other in ({"epoch": 1, "step": 3}, {"epoch": 2, "step": 2}):
        assert not torch.equal(mixed(mixup, **other)[0], first[0])
    assert not torch.equal(mixed(Mixup(DataConfig(), num_classes=5, seed=4), epoch=1, step=2)[0], first[0])
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    again = mixed(Mixup(DataConfig(), num_classes=5, seed=3), epoch=1, step=2)
    assert torch.equal(again[0], first[0])
    assert torch.equal(again[1], first[1])


def test_global_generators_are_left_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = draw()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    mixed(Mixup(DataConfig(), num_classes=5), epoch=0, step=0)
    assert draw() == expected


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_mix_what_one_rank_mixes(world_size: int) -> None:
    mixup = Mixup(DataConfig(), num_classes=5, seed=1)
    batch_size = 12 // world_size
    for step in range(8):  # mixup and cutmix both occur
        images, targets = mixed(mixup, epoch=0, step=step)
        for rank in range(world_size):
            positions = rank_positions(batch_size, rank=rank, world_size=world_size)
            local = mixed(mixup, IMAGES[positions], TARGETS[positions], epoch=0, step=step)
            assert torch.equal(local[0], images[positions])
            assert torch.equal(local[1], targets[positions])


def test_targets_are_distributions() -> None:
    _, targets = mixed(Mixup(DataConfig(), num_classes=5), epoch=0, step=0)
    torch.testing.assert_close(targets.sum(1), torch.ones(12))
    assert targets.min() >= 0


def test_without_mixing() -> None:
    mixup = Mixup(DataConfig(mixup=0, cutmix=0), num_classes=5)
    images, targets = mixed(mixup, IMAGES[:3], TARGETS[:3], epoch=0, step=0)  # an odd batch will do
    assert torch.equal(images, IMAGES[:3])
    torch.testing.assert_close(targets, torch.eye(5)[TARGETS[:3]])


def test_several_labels_are_mixed_as_their_images() -> None:
    """With one label each, the result is that of class numbers."""
    one_hot = torch.nn.functional.one_hot(TARGETS, 5).float()
    mixup = Mixup(DataConfig(), num_classes=5, seed=3)
    for step in range(4):  # mixup and cutmix
        images, targets = mixed(mixup, epoch=0, step=step)
        same_images, same = mixed(mixup, targets=one_hot, epoch=0, step=step)
        assert torch.equal(images, same_images)
        assert torch.allclose(targets, same, atol=1e-6)
        mixup = Mixup(DataConfig(), num_classes=5, seed=3)
    both = one_hot.clone()
    both[:, 0] = 1
    assert torch.allclose(mixed(mixup, targets=both, epoch=0, step=1)[1][:, 0], torch.ones(12))
    unmixed = Mixup(DataConfig(mixup=0, cutmix=0), num_classes=5)
    assert torch.equal(mixed(unmixed, targets=both, epoch=0, step=0)[1], both)
