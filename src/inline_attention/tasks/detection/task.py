"""Detection and instance segmentation as a task of the training loop."""

import json
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
from inline_attention.tasks.detection.annotations import AnnotatedImage
from inline_attention.tasks.detection.average_precision import ApResult
from inline_attention.tasks.detection.config import DetectionConfig
from inline_attention.tasks.detection.data import (
    DetectionBatch,
    DetectionData,
    open_detection_data,
    training_images,
)
from inline_attention.tasks.detection.evaluation import DetectionResult, evaluate
from inline_attention.tasks.detection.layouts import EXPECTED, read_split
from inline_attention.tasks.detection.model import has_masks
from inline_attention.tasks.detection.pictures import draw_examples
from inline_attention.tasks.detection.rpn import SMALLEST_ANCHOR
from inline_attention.tasks.detection.weights import MODELS
from inline_attention.training.distributed import Ranks
from inline_attention.training.task import Evaluation, Headline, Writer

PRECISION, PER_CLASS, EXAMPLES = "average_precision.json", "per_class.csv", "examples.png"
_LARGEST_SIDE = 800  # the published short side
MAIN_FIGURES = ("box_ap", "box_ap50", "mask_ap", "mask_ap50")


class Detection(DenseTask):
    recipes = "tasks/detection/recipes"
    data_hint = f"give --data FOLDER with {EXPECTED}"
    headline = Headline("box_ap", "box AP")
    models = MODELS

    config: DetectionConfig
    data: DetectionData

    @staticmethod
    def defaults() -> DetectionConfig:
        return DetectionConfig()

    def __init__(self, config: DetectionConfig) -> None:
        super().__init__(config)
        self.masks = has_masks(config.model.head)
        self.summary_figures = MAIN_FIGURES if self.masks else MAIN_FIGURES[:2]

    def choose_from_data(self, world_size: int) -> dict[str, Any]:
        config = self.config
        images = training_images(read_split(config.data, config.data.train_split, masks=False), config.data)
        return choose(
            config,
            images=len(images),
            world_size=world_size,
            sizes=("data.short_side", "data.train_short_sides"),
            choose_sizes=lambda: sizes_for(images),
        )

    def open_data(self, ranks: Ranks) -> DetectionData:
        config = self.config
        self.data = open_detection_data(
            config.data, masks=self.masks, seed=config.seed, rank=ranks.rank, world_size=ranks.world_size
        )
        return self.data.to(ranks.device)

    def losses(self, forward: Callable[..., Any], batch: DetectionBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """The host waits for the device here, since the number of boxes after suppression decides the shapes."""
        return forward(batch.images, batch.sizes, batch.targets, batch.keys)

    def evaluate(self, model: nn.Module, *, device: torch.device, amp_dtype: torch.dtype | None) -> Evaluation:
        result = evaluate(model, self.data.val, device=device, amp_dtype=amp_dtype)
        return Evaluation(self.figures(result.precision), details=result)

    def result_files(self, evaluation: Evaluation) -> dict[str, Writer]:
        result: DetectionResult = evaluation.details
        return {
            PRECISION: partial(write_figures, result.precision),
            PER_CLASS: partial(write_per_class, result.precision),
            EXAMPLES: partial(draw_examples, result.examples, self.data.class_names),
        }

    def figures(self, precision: ApResult) -> dict[str, float]:
        """Figures by names such as box_ap50. A figure without objects is left out, or 0 if it is a main one."""
        named = {
            f"{kind}_{name.lower()}": value
            for kind, values in precision.by_kind().items()
            for name, value in values.items()
        }
        main = dict.fromkeys(self.summary_figures, 0.0)
        return main | {name: value for name, value in named.items() if value is not None} | {"images": precision.images}


def sizes_for(images: Sequence[AnnotatedImage]) -> dict[str, Any]:
    """Short sides for evaluation and for training.

    The side is the median of the images. It is larger if needed for nine of ten objects to be as large as the smallest
    anchors, and at most the published one. In training, sides are drawn from 60% of it on, as in the 3× schedule.
    """
    objects = [instance.box for image in images for instance in image.objects]
    sides = sorted(math.sqrt((x1 - x0) * (y1 - y0)) for x0, y0, x1, y1 in objects)
    small = sides[len(sides) // 10] if sides else SMALLEST_ANCHOR
    short = statistics.median(min(image.size) for image in images) * max(1, SMALLEST_ANCHOR / small)
    side = min(_LARGEST_SIDE, multiple_of(STRIDES[-1], short))
    drawn = sorted({multiple_of(STRIDES[-1], side * share / 10) for share in range(6, 11)})
    return {"data.short_side": side, "data.train_short_sides": drawn}


def write_figures(precision: ApResult, path: Path) -> None:
    path.write_text(json.dumps({"images": precision.images, **precision.by_kind()}, indent=1) + "\n")


def write_per_class(precision: ApResult, path: Path) -> None:
    """One row for each class: AP of boxes and masks in per cent, empty if there is no object"""
    rows = (
        (name, *("" if value is None else f"{value:.3f}" for value in values.values()))
        for name, values in precision.per_class.items()
    )
    write_csv(path, ("class", *(f"{kind} AP" for kind in precision.by_kind())), rows)
