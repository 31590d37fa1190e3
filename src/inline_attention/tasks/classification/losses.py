"""The loss of a classifier. Targets may be mixed by mixup and cutmix."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.tasks.classification.config import ClassifierOptimConfig


class ClassifierLoss(nn.Module):
    """Cross-entropy, or binary cross-entropy of each class against the rest, with smoothed labels.

    With `class_weights`, cross-entropy weights an image of class c by images/(classes · images of c). Binary
    cross-entropy weights the positives of c by (other images)/(images of c).

    Args:
        class_counts: training images of each class, for `class_weights`.
        images: number of training images if they may have several labels. None: each has one.
    """

    def __init__(
        self, config: ClassifierOptimConfig, *, class_counts: Sequence[int] | None, images: int | None = None
    ) -> None:
        super().__init__()
        if images is not None and config.loss == "cross_entropy":
            raise ValueError(
                "optim.loss=cross_entropy: softmax gives an image one label, and these data have several; "
                "use bce (optim.loss=bce)"
            )
        self._smoothing = config.label_smoothing
        self._binary = config.loss == "bce" or images is not None
        weights = None
        if config.class_weights:
            if class_counts is None:
                raise ValueError(
                    "optim.class_weights=true: a stream does not say how many images a class has; set it to false"
                )
            counts = torch.tensor(class_counts, dtype=torch.float32).clamp(min=1)
            total = counts.sum() if images is None else images
            weights = (total - counts) / counts if self._binary else total / (len(counts) * counts)
        self.weights: Tensor | None
        self.register_buffer("weights", weights)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits (B, classes), targets (B, classes) in 0 … 1, which add up to one for cross-entropy → ()"""
        smoothing = self._smoothing
        if not self._binary:
            return F.cross_entropy(logits, targets, weight=self.weights, label_smoothing=smoothing)
        smoothed = targets * (1 - smoothing) + smoothing / targets.shape[1]
        return F.binary_cross_entropy_with_logits(logits, smoothed, pos_weight=self.weights)
