"""The losses of a classifier against timm's, and against the definition of the class weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.loss
import torch
import torch.nn.functional as F
from PIL import Image

from inline_attention.data import DataConfig, open_data
from inline_attention.tasks.classification.config import ClassifierOptimConfig
from inline_attention.tasks.classification.losses import ClassifierLoss

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -0.4], [2.0, 0.0, 1.0], [-1.0, 1.0, 0.0]])
LABELS = torch.tensor([0, 2, 2, 1])
ONE_HOT = F.one_hot(LABELS, 3).float()


def loss(*, counts: list[int] | None = None, **settings: Any) -> ClassifierLoss:
    return ClassifierLoss(ClassifierOptimConfig(**settings), class_counts=counts)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_timms(smoothing: float) -> None:
    ours = loss(label_smoothing=smoothing)(LOGITS, ONE_HOT)
    assert torch.allclose(ours, timm.loss.LabelSmoothingCrossEntropy(smoothing)(LOGITS, LABELS))
    ours = loss(loss="bce", label_smoothing=smoothing)(LOGITS, ONE_HOT)
    assert torch.allclose(ours, timm.loss.BinaryCrossEntropy(smoothing)(LOGITS, LABELS))


def test_class_weights_make_classes_count_the_same() -> None:
    counts = [60, 30, 10]
    weighted = loss(counts=counts, class_weights=True, label_smoothing=0.0)(LOGITS, ONE_HOT)
    each = F.cross_entropy(LOGITS, LABELS, reduction="none")
    expected = sum(float(each[i]) * 100 / (3 * counts[LABELS[i]]) for i in range(4)) / 4
    assert float(weighted) == pytest.approx(expected)
    # Over data with these counts, every class has a third of the weight.
    assert [count * 100 / (3 * count) for count in counts] == pytest.approx([100 / 3] * 3)


def test_class_weights_of_binary_cross_entropy() -> None:
    counts = [60, 30, 10]
    weighted = loss(counts=counts, class_weights=True, loss="bce", label_smoothing=0.0)(LOGITS, ONE_HOT)
    terms = []
    for logits, target in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        for label, logit in enumerate(logits):
            p = 1 / (1 + np.exp(-logit))
            terms.append(-np.log(p) * (100 - counts[label]) / counts[label] if label == target else -np.log(1 - p))
    assert float(weighted) == pytest.approx(np.mean(terms))


def test_weights_need_counts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optim.class_weights=true: a stream does not say"):
        loss(class_weights=True)
    for name, count in (("a", 6), ("b", 2)):
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8)).save(tmp_path / split / name / f"{number}.png")
    assert open_data(DataConfig(path=str(tmp_path), img_size=8, batch_size=2, workers=0)).class_counts == [6, 2]


def test_several_labels() -> None:
    targets = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    chosen = ClassifierLoss(ClassifierOptimConfig(label_smoothing=0.0), class_counts=None, images=4)
    assert torch.allclose(chosen(LOGITS, targets), F.binary_cross_entropy_with_logits(LOGITS, targets))
    weighted = ClassifierLoss(
        ClassifierOptimConfig(label_smoothing=0.0, class_weights=True), class_counts=[1, 3, 1], images=4
    )
    weights = torch.tensor([3.0, 1 / 3, 3.0])  # images without the label to images with it
    expected = F.binary_cross_entropy_with_logits(LOGITS, targets, pos_weight=weights)
    assert torch.allclose(weighted(LOGITS, targets), expected)
    with pytest.raises(ValueError, match=r"optim.loss=cross_entropy: softmax gives an image one label.*use bce"):
        ClassifierLoss(ClassifierOptimConfig(loss="cross_entropy"), class_counts=None, images=4)
