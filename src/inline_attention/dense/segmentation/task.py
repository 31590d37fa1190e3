"""Segmentation as a task of the training loop."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.data.seeding import derive_seed
from inline_attention.dense.backbone import STRIDES
from inline_attention.dense.segmentation.config import SegmentConfig
from inline_attention.dense.segmentation.data import SegmentBatch, SegmentData, open_segment_data
from inline_attention.dense.segmentation.evaluate import SegmentResult, evaluate
from inline_attention.dense.segmentation.heads import to_pixels
from inline_attention.dense.segmentation.metrics import Scores
from inline_attention.dense.segmentation.model import AUXILIARY_STRIDE, Segmenter
from inline_attention.dense.segmentation.pictures import draw_examples
from inline_attention.dense.segmentation.sources import IGNORED
from inline_attention.dense.segmentation.weights import TASK, arguments_of, build, preparation, title
from inline_attention.training.distributed import Ranks
from inline_attention.training.optim import freeze_layers
from inline_attention.training.task import Evaluation, Headline, Task, Writer, describe

EXAMPLES, PER_CLASS = "examples.png", "per_class.csv"
_NUM_EXAMPLES = 8


class Segmentation(Task):
    recipes = "recipes/segment"
    default_recipe = None
    data_hint = "give --data FOLDER with images/train, masks/train, images/val, masks/val and classes.txt"
    headline = Headline("miou", "mIoU")
    summary_figures = ("miou", "macc", "pixel_accuracy")
    fixed_shapes = False  # crops have one size, but whole images to evaluate have many

    config: SegmentConfig
    data: SegmentData

    @staticmethod
    def defaults() -> SegmentConfig:
        return SegmentConfig()

    @property
    def title(self) -> str:
        return title(self.config.model)

    def open_data(self, ranks: Ranks) -> SegmentData:
        config = self.config
        self.data = open_segment_data(config.data, seed=config.seed, rank=ranks.rank, world_size=ranks.world_size)
        if config.model.head == "upernet" and self.data.train.batch_size * ranks.world_size == 1:
            raise ValueError("data.batch_size=1: UperNet's batch norm over a mean of the image needs 2 images or more")
        self.data.train.to(ranks.device)
        return self.data

    def build_model(self) -> nn.Module:
        wanted = self.config.model
        torch.manual_seed(derive_seed("weights", self.config.seed))
        model = build(wanted, num_classes=len(self.data.class_names))
        if wanted.checkpointing:
            model.backbone.set_grad_checkpointing(True)
        freeze_layers(model, wanted.freeze)
        return model

    def describe(self) -> dict[str, str]:
        return describe(
            self.config,
            arguments=arguments_of(self.config.model),
            class_names=self.data.class_names,
            task=TASK,
            preprocessing=preparation(self.config.data),
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


def pixel_loss(logits: Tensor, masks: Tensor, *, sizes: Tensor | None = None, stride: int = STRIDES[0]) -> Tensor:
    """Cross entropy () of logits (B, classes, h, w) at a stride, enlarged to masks (B, H, W).

    Divided by the number of all pixels, the ignored ones too, as published: the divisor is then the same on every rank.
    sizes (B, 2): of images that are padded; their masks must be IGNORED there.
    """
    enlarged = to_pixels(logits, masks.shape[1:], sizes=sizes, stride=stride)
    return F.cross_entropy(enlarged, masks, ignore_index=IGNORED, reduction="sum") / masks.numel()


def write_per_class(scores: Scores, class_names: list[str], path: Path) -> None:
    """A row a class: IoU and accuracy in per cent (empty where the class does not occur), pixels in the masks."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("class", "iou", "accuracy", "pixels"))
        columns = (scores.iou.tolist(), scores.accuracy.tolist(), scores.pixels.tolist())
        for name, iou, accuracy, pixels in zip(class_names, *columns, strict=True):
            writer.writerow((name, *("" if value != value else f"{value:.3f}" for value in (iou, accuracy)), pixels))
