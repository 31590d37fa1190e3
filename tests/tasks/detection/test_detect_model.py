"""Mask R-CNN and Cascade Mask R-CNN on every family, at any size."""

from typing import Any

import pytest
import torch
from small import shrunk
from torch import Tensor

from inline_attention.tasks.detection.model import HEADS, Detector, create_detector
from inline_attention.tasks.detection.roi_heads import CASCADE

CLASSES = 3


def small_detector(
    name: str = "inline_pvt_tiny", head: str = "mask_rcnn", *, seed: int = 0, **options: Any
) -> Detector:
    kwargs = {key: value for key, value in shrunk(name).items() if key not in ("num_classes",)}
    torch.manual_seed(seed)
    return create_detector(name, head, num_classes=CLASSES, channels=32, regions=16, kwargs=kwargs, **options)


def targets(boxes: list[list[float]], labels: list[int], size: tuple[int, int]) -> dict[str, Tensor]:
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[int(y0) : int(y1), int(x0) : int(x1)] = 1
    return {
        "boxes": torch.tensor(boxes).view(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "masks": masks,
    }


def batch() -> tuple[Tensor, list[tuple[int, int]], list[dict[str, Tensor]], Tensor]:
    """Three images on one canvas: two objects and one of a single pixel, nothing, one object; two of them padded."""
    images = torch.randn(3, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    sizes = [(64, 96), (50, 96), (64, 61)]
    for image, (height, width) in zip(images, sizes, strict=True):
        image[:, height:] = 0
        image[:, :, width:] = 0
    found = [
        targets([[3, 4, 50, 60], [40, 10, 90, 40], [7, 7, 8, 8]], [1, 2, 3], (64, 96)),
        targets([], [], (64, 96)),
        targets([[20, 20, 60, 60]], [2], (64, 96)),
    ]
    return images, sizes, found, torch.tensor([11, 2**61, 33])


FAMILIES = [
    "inline_deit_tiny",
    "inline_pvt_tiny",
    "softmax_pvt_tiny",
    "inline_swin_tiny",
    "softmax_swin_tiny",
    "inline_cswin_tiny",
]


# Every family under one head, and every head on one family.
@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, "mask_rcnn") for name in FAMILIES),
        *(("inline_pvt_tiny", head) for head in ("cascade_mask_rcnn", "faster_rcnn", "cascade_rcnn")),
    ],
)
def test_every_family_learns_and_finds(name: str, head: str) -> None:
    model = small_detector(name, head)
    losses = model(*batch())
    parts = {"proposal_score", "proposal_box"}
    suffixes = ("_1", "_2", "_3") if head.startswith("cascade") else ("",)
    learnt = ("class", "box", "mask") if "mask" in head else ("class", "box")
    assert losses.keys() == parts | {f"{part}{suffix}" for part in learnt for suffix in suffixes}
    assert all(loss.isfinite() and loss.ndim == 0 for loss in losses.values())
    sum(losses.values()).backward()  # type: ignore[union-attr]  # never empty
    # Every parameter takes part, so that DistributedDataParallel waits for none.
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []

    model.eval()
    images, sizes, _, _ = batch()
    with torch.no_grad():
        found = model(images, sizes)
    for detections, (height, width) in zip(found, sizes, strict=True):
        count = len(detections.scores)
        assert 0 < count <= 100
        if "mask" in head:
            assert detections.masks.shape == (count, 28, 28)
        else:
            assert detections.masks is None
        assert (detections.scores.diff() <= 0).all()
        assert detections.labels.min() >= 1
        assert detections.labels.max() <= CLASSES
        assert (detections.boxes >= 0).all()
        assert (detections.boxes[:, 2] <= width).all()
        assert (detections.boxes[:, 3] <= height).all()


@pytest.mark.parametrize("head", HEADS)
def test_a_batch_without_objects_reaches_every_parameter(head: str) -> None:
    """Its mask heads get no region, but still take part in the communication of ranks."""
    model = small_detector(head=head)
    nothing = targets([], [], (64, 96))
    losses = model(torch.randn(2, 3, 64, 96), None, [nothing] * 2)
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(loss == 0 for name, loss in losses.items() if "mask" in name or "box" in name)


@pytest.mark.parametrize("size", [(375, 1242), (512, 2048), (33, 47), (1, 1)])
def test_any_size(size: tuple[int, int]) -> None:
    model = small_detector().eval()
    with torch.no_grad():
        (found,) = model(torch.randn(1, 3, *size))
    assert found.masks.shape[1:] == (28, 28)
    assert found.boxes.isfinite().all()


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_of_a_batch_is_the_mean_over_its_images(head: str) -> None:
    """So a step over several ranks, each with some of the images on the same canvas, is the step over all of them."""
    model = small_detector(head=head)
    images, sizes, objects, keys = batch()
    whole = model(images, sizes, objects, keys)
    alone = [model(images[n : n + 1], sizes[n : n + 1], objects[n : n + 1], keys[n : n + 1]) for n in range(3)]
    for name, value in whole.items():
        mean = torch.stack([losses[name] for losses in alone]).mean()
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)


def test_regions_are_chosen_by_the_keys_alone() -> None:
    model = small_detector()
    images, sizes, objects, keys = batch()
    losses = []
    for seed, given in ((1, keys), (2, keys), (1, keys + 1)):
        torch.manual_seed(seed)
        losses.append(sum(model(images, sizes, objects, given).values()))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_half_precision_keeps_coordinates() -> None:
    """bfloat16 has eight bits of precision: boxes computed in it would be off by up to four pixels here."""
    model = small_detector().eval()
    images = torch.randn(1, 3, 96, 1300)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        maps = model.extract(images)
        (proposals,), _ = model.proposals(maps, [(96, 1300)])
        (found,) = model(images)
    assert proposals.dtype == found.boxes.dtype == torch.float32
    right = proposals[:, 2][(proposals[:, 2] > 600) & (proposals[:, 2] < 1300)]
    assert (right % 1 != 0).float().mean() > 0.9  # bfloat16 holds whole multiples of four there


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision(dtype: torch.dtype) -> None:
    model = small_detector().to(dtype)
    images, sizes, found, keys = batch()
    losses = model(images.to(dtype), sizes, found, keys)
    assert losses.keys() == {"proposal_score", "proposal_box", "class", "box", "mask"}
    sum(losses.values()).backward()
    with torch.no_grad():
        first, *_ = model.eval()(images.to(dtype), sizes)
    assert first.boxes.dtype == torch.float32


def test_the_stages_demand_more_and_more_overlap() -> None:
    stages = small_detector(head="cascade_mask_rcnn").heads.in_order()
    target = targets([[10, 10, 50, 50]], [2], (64, 64))
    # Overlaps of 0.55, 0.65 and 0.75 with the object: it covers the lower part of each box.
    proposals = torch.tensor([[10, 50 - 40 / overlap, 50, 50] for overlap in (0.55, 0.65, 0.75)])
    for stage, expected in zip(stages, (3, 2, 1), strict=True):
        samples = stage.choose(proposals, target, torch.tensor(0))
        positives = len(samples.matched)
        assert positives == expected + 1  # the object's own box too
        assert samples.labels.tolist() == [2] * positives + [0] * (4 - positives)
        assert samples.proposed.sum() == 3


def test_a_stage_moves_boxes_where_its_deltas_say() -> None:
    """Deltas are in units of the box, divided by the stage's weights: 0.1, 0.1, 0.2, 0.2 for the first one."""
    stage = small_detector(head="cascade_mask_rcnn").heads.in_order()[0]
    box = torch.tensor([[10.0, 20.0, 50.0, 40.0]])
    deltas = torch.zeros(1, CLASSES + 1, 4)
    deltas[0, 2] = torch.tensor([1.0, -2.0, 5 * torch.log(torch.tensor(2.0)), 0.0])  # of class 2
    assert torch.equal(stage.refine(box, deltas, torch.tensor([1])), box)
    # The centre (30, 30) moves by a tenth of 40 and by two tenths of −20; the width doubles.
    torch.testing.assert_close(stage.refine(box, deltas, torch.tensor([2])), torch.tensor([[-6.0, 16.0, 74.0, 36.0]]))
    assert [s.box_weights for s in CASCADE] == [(10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15)]


def test_scores_are_the_mean_of_the_stages() -> None:
    """With heads that see nothing but their bias: 0.9, 0.6 and 0.3 for class 1 give 0.6."""
    model = small_detector(head="cascade_mask_rcnn").eval()
    for stage, share in zip(model.heads.in_order(), (0.9, 0.6, 0.3), strict=True):
        predictor = stage.box_predictor
        torch.nn.init.zeros_(predictor.cls_score.weight)
        rest = (1 - share) / CLASSES
        predictor.cls_score.bias.data = torch.tensor([rest, share, rest, rest]).log()
    with torch.no_grad():
        (found,) = model(torch.randn(1, 3, 64, 64))
    torch.testing.assert_close(found.scores[found.labels == 1], torch.full_like(found.scores[found.labels == 1], 0.6))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="head='retina'; expected one of faster_rcnn, cascade_rcnn, mask_rcnn"):
        small_detector(head="retina")
    with pytest.raises(ValueError, match="num_classes=0; expected 1 or more"):
        create_detector("inline_pvt_tiny", num_classes=0)
    with pytest.raises(ValueError, match="channels=48; expected a multiple of 32"):
        create_detector("inline_pvt_tiny", num_classes=1, channels=48)
