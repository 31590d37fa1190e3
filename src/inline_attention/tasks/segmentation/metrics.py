"""IoU and accuracy from a confusion matrix that is filled batch by batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.tasks.segmentation.sources import IGNORED
from inline_attention.training.distributed import current_ranks


class Confusion:
    """Counts of pixels (true class, predicted class), on the device."""

    def __init__(self, num_classes: int, *, device: torch.device | str = "cpu") -> None:
        self.num_classes = num_classes
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)

    def add(self, predicted: Tensor, mask: Tensor) -> None:
        """Add predicted and true classes, integers of one shape. Pixels that the mask ignores are not counted."""
        counted = mask != IGNORED
        cells = mask[counted].long() * self.num_classes + predicted[counted].long()
        self.counts += torch.bincount(cells, minlength=self.num_classes**2).view_as(self.counts)

    def over_ranks(self) -> Tensor:
        """The sum over all ranks, on the CPU; called on every rank."""
        return current_ranks().sum(self.counts.clone()).cpu()


@dataclass(frozen=True)
class Scores:
    """Scores in per cent.

    The IoU of a class that is neither in the masks nor predicted is NaN, and means leave it out. The same holds for the
    accuracy of a class that is not in the masks.
    """

    miou: float
    macc: float
    pixel_accuracy: float
    iou: Tensor  # (classes,) float64
    accuracy: Tensor  # (classes,) float64: share of the pixels of a class that are found
    pixels: Tensor  # (classes,) int64, in the masks

    @classmethod
    def of(cls, counts: Tensor) -> "Scores":
        """counts (classes, classes) int64: true, predicted"""
        if counts.sum() == 0:
            raise ValueError("nothing to evaluate: all pixels of the masks are ignored")
        right, true, predicted = (t.double() for t in (counts.diagonal(), counts.sum(1), counts.sum(0)))
        iou, accuracy = 100 * right / (true + predicted - right), 100 * right / true  # 0 / 0 is NaN
        return cls(
            miou=float(iou.nanmean()),
            macc=float(accuracy.nanmean()),
            pixel_accuracy=float(100 * right.sum() / true.sum()),
            iou=iou,
            accuracy=accuracy,
            pixels=counts.sum(1),
        )
