"""mIoU and mAcc against torchmetrics, an independent implementation."""

import math

import pytest
import torch
from on_use import OnUse

from inline_attention.tasks.segmentation.metrics import Confusion, Scores

torchmetrics = OnUse("torchmetrics.functional.classification")


@pytest.mark.parametrize("seed", range(3))
def test_random_predictions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    classes = 7
    masks = torch.randint(classes, (5, 24, 31), generator=generator)
    guesses = torch.randint(classes, masks.shape, generator=generator)
    predicted = torch.where(torch.rand(masks.shape, generator=generator) < 0.6, masks, guesses)
    ignored = torch.rand(masks.shape, generator=generator) < 0.1
    masks[ignored] = 255
    confusion = Confusion(classes)
    for one, other in zip(predicted, masks, strict=True):
        confusion.add(one.to(torch.uint8), other.to(torch.uint8))
    scores = Scores.of(confusion.over_ranks())
    options = dict(num_classes=classes, ignore_index=255)
    iou = torchmetrics.multiclass_jaccard_index(predicted, masks, average=None, **options)
    recall = torchmetrics.multiclass_recall(predicted, masks, average=None, **options)
    accuracy = torchmetrics.multiclass_accuracy(predicted, masks, average="micro", **options)
    assert torch.allclose(scores.iou.float(), 100 * iou, rtol=1e-5)
    assert torch.allclose(scores.accuracy.float(), 100 * recall, rtol=1e-5)
    assert scores.miou == pytest.approx(100 * float(iou.mean()), rel=1e-5)
    assert scores.macc == pytest.approx(100 * float(recall.mean()), rel=1e-5)
    assert scores.pixel_accuracy == pytest.approx(100 * float(accuracy), rel=1e-5)
    assert scores.pixels.sum() == (~ignored).sum()


def test_classes_that_do_not_occur() -> None:
    """By hand: class 0 has 2 of 4 pixels right, class 1 is predicted only, class 2 occurs nowhere."""
    confusion = Confusion(3)
    confusion.add(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 0]))
    scores = Scores.of(confusion.over_ranks())
    assert scores.iou.tolist()[:2] == [50.0, 0.0]
    assert math.isnan(scores.iou[2])
    assert scores.miou == 25.0
    assert scores.macc == 50.0
    with pytest.raises(ValueError, match="nothing to evaluate"):
        Scores.of(torch.zeros(3, 3, dtype=torch.int64))
