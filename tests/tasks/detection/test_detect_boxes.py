"""Regions, masks and samples against plain definitions."""

import math

import pytest
import torch
from torchvision.ops import roi_align

from inline_attention.tasks.detection.boxes import (
    STRIDES,
    KeyedSampler,
    PyramidAlign,
    mask_targets,
    mean_over_images,
    paste_masks,
)


def test_each_region_comes_from_the_level_of_its_size() -> None:
    """Equation 1 of the FPN paper: level k0 + log2(side / 224), k0 the map of stride 16, kept inside the pyramid."""
    torch.manual_seed(0)
    maps = [torch.randn(2, 3, 512 // stride, 512 // stride) for stride in STRIDES]
    sides = [1, 50, 111, 113, 200, 225, 300, 447, 449, 500]
    boxes = torch.tensor([[5.0, 3.0, 5.0 + side, 3.0 + side] for side in sides])
    pooled = PyramidAlign(7)(maps, [boxes[:4], boxes[4:]])
    for number, side in enumerate(sides):
        level = min(max(math.floor(2 + math.log2(side / 224)), 0), 3)
        roi = torch.cat([torch.tensor([0.0 if number < 4 else 1.0]), boxes[number]])[None]
        expected = roi_align(maps[level], roi, 7, spatial_scale=1 / STRIDES[level], aligned=True)
        assert torch.equal(pooled[number], expected[0]), side


def test_regions_of_no_image() -> None:
    maps = [torch.randn(2, 3, 64 // stride, 64 // stride, requires_grad=True) for stride in STRIDES]
    pooled = PyramidAlign(7)(maps, [torch.zeros(0, 4), torch.zeros(0, 4)])
    assert pooled.shape == (0, 3, 7, 7)
    pooled.sum().backward()  # a rank without regions still takes part in the backward pass


def test_a_pasted_mask_is_the_mask_that_was_cut_out() -> None:
    """Cut a disc out with a box, paste it back: all but the outline agrees."""
    y, x = torch.meshgrid(torch.arange(80) + 0.5, torch.arange(100) + 0.5, indexing="ij")
    disc = (x - 47) ** 2 + (y - 36) ** 2 <= 22**2
    box = torch.tensor([[24.3, 13.6, 70.2, 59.1]])
    targets = mask_targets(disc[None].to(torch.uint8), box, torch.tensor([0]), side=28)
    pasted = paste_masks(targets, box, (80, 100))
    assert pasted.shape == (1, 80, 100)
    wrong = (pasted[0] != disc).sum()
    assert wrong <= 0.02 * disc.sum()


def test_pasted_masks_by_hand() -> None:
    whole = torch.ones(3, 28, 28)
    boxes = torch.tensor([[2.0, 1.0, 5.0, 3.0], [7.0, 7.0, 8.0, 8.0], [-3.0, 6.0, 2.0, 20.0]])
    expected = torch.zeros(3, 10, 9, dtype=torch.bool)
    expected[0, 1:3, 2:5] = True
    expected[1, 7, 7] = True  # a single pixel
    expected[2, 6:10, 0:2] = True  # beyond the image
    assert torch.equal(paste_masks(whole, boxes, (10, 9)), expected)
    assert paste_masks(torch.zeros(0, 28, 28), torch.zeros(0, 4), (10, 9)).shape == (0, 10, 9)


def test_samples_are_a_function_of_the_key() -> None:
    labels = torch.tensor([1, 0, -1, 0, 2] * 40)
    sample = KeyedSampler(50, positive_share=0.25, place=1)
    keys = [torch.tensor(key) for key in (0, 1, 2**62)]
    chosen = [sample(labels, key) for key in keys]
    for positive, negative in chosen:
        assert len(positive) == 12
        assert len(negative) == 38
        assert (labels[positive] > 0).all()
        assert (labels[negative] == 0).all()
        assert len(set(positive.tolist() + negative.tolist())) == 50
    torch.manual_seed(5)  # no generator has a say
    assert all(torch.equal(a, b) for a, b in zip(chosen[0], sample(labels, keys[0]), strict=True))
    assert not torch.equal(chosen[0][0], chosen[1][0])
    assert not torch.equal(chosen[0][0], chosen[2][0])
    other = KeyedSampler(50, positive_share=0.25, place=2)(labels, keys[0])
    assert not torch.equal(chosen[0][1], other[1])


def test_samples_are_fewer_where_there_are_no_more() -> None:
    sample = KeyedSampler(8, positive_share=0.5, place=1)
    positive, negative = sample(torch.tensor([0, 0, 1, 0]), torch.tensor(3))
    assert positive.tolist() == [2]
    assert sorted(negative.tolist()) == [0, 1, 3]
    positive, negative = sample(torch.zeros(0), torch.tensor(3))
    assert len(positive) == len(negative) == 0


def test_every_candidate_is_chosen_as_often() -> None:
    labels = torch.zeros(20)
    sample = KeyedSampler(5, positive_share=0.5, place=1)
    counts = torch.zeros(20)
    for key in range(2000):
        counts[sample(labels, torch.tensor(key))[1]] += 1
    # Each has a chance of 1/4; the standard deviation of its count is 19.4.
    assert ((counts - 500).abs() < 5 * 19.4).all()


def test_mean_over_images_weighs_images_alike() -> None:
    values, images = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([0, 0, 0, 2])
    # (1 + 2 + 3) / 3, nothing, 10 / 5
    assert mean_over_images(values, images, torch.tensor([3, 0, 5])) == pytest.approx((2 + 0 + 2) / 3)
