"""Segmentation as a task of the training loop."""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.printing import write_csv
from inline_attention.tasks.dense.backbone import STRIDES
from inline_attention.tasks.dense.from_data import choose, multiple_of
from inline_attention.tasks.dense.task import DenseTask
from inline_attention.tasks.segmentation.config import SegmentConfig
from inline_attention.tasks.segmentation.data import SegmentBatch, SegmentData, open_segment_data
from inline_attention.tasks.segmentation.evaluation import SegmentResult, evaluate
from inline_attention.tasks.segmentation.losses import pixel_loss
from inline_attention.tasks.segmentation.metrics import Scores
from inline_attention.tasks.segmentation.model import AUXILIARY_STRIDE, Segmenter
from inline_attention.tasks.segmentation.pictures import draw_examples
from inline_attention.tasks.segmentation.sources import find_pairs, measure
from inline_attention.tasks.segmentation.weights import MODELS
from inline_attention.training.distributed import Ranks
from inline_attention.training.task import Evaluation, Headline, Writer

EXAMPLES, PER_CLASS = "examples.png", "per_class.csv"
_NUM_EXAMPLES = 8
_LARGEST_CROP = 512  # the published side
_MANY_EPOCHS, _ENOUGH_EPOCHS = 1000, 100  # ADE20K's 160,000 updates are 127 epochs

_logger = logging.getLogger(__name__)


class Segmentation(DenseTask):
    recipes = "tasks/segmentation/recipes"
    data_hint = "give --data FOLDER with images/train, masks/train, images/val, masks/val and classes.txt"
    headline = Headline("miou", "mIoU")
    summary_figures = ("miou", "macc", "pixel_accuracy")
    models = MODELS

    config: SegmentConfig
    data: SegmentData

    @staticmethod
    def defaults() -> SegmentConfig:
        return SegmentConfig()

    def choose_from_data(self, world_size: int) -> dict[str, Any]:
        config = self.config
        pairs = find_pairs(config.data, config.data.train_split)
        return choose(
            config,
            images=len(pairs),
            world_size=world_size,
            sizes=("data.crop", "data.short_side"),
            choose_sizes=lambda: sizes_for(measure(pairs)),
        )

    def open_data(self, ranks: Ranks) -> SegmentData:
        config = self.config
        self.data = open_segment_data(config.data, seed=config.seed, rank=ranks.rank, world_size=ranks.world_size)
        if config.model.head == "upernet" and self.data.train.batch_size * ranks.world_size == 1:
            raise ValueError("data.batch_size=1: UperNet's batch norm of image means needs 2 images or more")
        self.data.train.to(ranks.device)
        if ranks.is_first:
            self._warn_of_many_epochs()
        return self.data

    def _warn_of_many_epochs(self) -> None:
        """Published recipes set a number of updates, which is far too large for a few images."""
        steps, train = self.config.schedule.steps, self.data.train
        epochs = 0 if steps is None else steps * self.config.optim.accumulate / train.steps_per_epoch
        if epochs > _MANY_EPOCHS:
            _logger.warning(
                "schedule.steps=%d shows each of the %d training images %s times; give schedule.steps=%d for %d times, "
                "or use the recipe finetune, whose schedule follows from the data",
                steps,
                self.data.num_train_images,
                f"{epochs:,.0f}",
                _ENOUGH_EPOCHS * train.steps_per_epoch // self.config.optim.accumulate,
                _ENOUGH_EPOCHS,
            )

    def losses(self, forward: Callable[..., Any], batch: SegmentBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        sizes = batch.sizes
        logits = forward(batch.images) if sizes is None else forward(batch.images, sizes)
        parts = {"main": pixel_loss(logits.main, batch.masks, sizes=sizes)}
        if logits.auxiliary is not None:
            loss = pixel_loss(logits.auxiliary, batch.masks, sizes=sizes, stride=AUXILIARY_STRIDE)
            parts["auxiliary"] = self.config.model.auxiliary_weight * loss
        return parts

    def evaluate(self, model: nn.Module, *, device: torch.device, amp_dtype: torch.dtype | None) -> Evaluation:
        assert isinstance(model, Segmenter)
        config = self.config.data
        result = evaluate(
            model, self.data.val, config=config, device=device, amp_dtype=amp_dtype, examples=_NUM_EXAMPLES
        )
        scores = result.scores
        figures = {
            "miou": scores.miou,
            "macc": scores.macc,
            "pixel_accuracy": scores.pixel_accuracy,
            "images": result.images,
        }
        return Evaluation(figures, details=result)

    def result_files(self, evaluation: Evaluation) -> dict[str, Writer]:
        result: SegmentResult = evaluation.details
        names = self.data.class_names
        return {
            PER_CLASS: partial(write_per_class, result.scores, names),
            EXAMPLES: partial(draw_examples, result.examples, names),
        }


def sizes_for(images: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The crop, and the short side that images are resized to, for images of these sizes (height, width).

    A crop is as large as the median image and at most 512 × 512. Only images with more than 512 pixels on their
    short side are resized.
    """
    height, width = (statistics.median(sides) for sides in zip(*images, strict=True))
    scale = min(1.0, _LARGEST_CROP / min(height, width))
    crop = [min(_LARGEST_CROP, multiple_of(STRIDES[-1], side * scale)) for side in (height, width)]
    return {"data.crop": crop, "data.short_side": _LARGEST_CROP if scale < 1 else None}


def write_per_class(scores: Scores, class_names: list[str], path: Path) -> None:
    """One row for each class: IoU and accuracy in per cent, empty if it does not occur, and its pixels in the masks"""
    columns = (scores.iou.tolist(), scores.accuracy.tolist(), scores.pixels.tolist())
    rows = (
        (name, *("" if math.isnan(value) else f"{value:.3f}" for value in (iou, accuracy)), pixels)
        for name, iou, accuracy, pixels in zip(class_names, *columns, strict=True)
    )
    write_csv(path, ("class", "iou", "accuracy", "pixels"), rows)
