"""Detection and instance segmentation for the training loop: COCO data, Mask R-CNN or its cascade, judged by box AP."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inline_attention.data.seeding import derive_seed
from inline_attention.dense.detection.average_precision import ApResult
from inline_attention.dense.detection.data import (
    DetectionBatch,
    DetectionData,
    DetectionDataConfig,
    open_detection_data,
)
from inline_attention.dense.detection.evaluate import evaluate
from inline_attention.dense.detection.model import create_detector
from inline_attention.training.config import BackboneConfig, LoopConfig, OptimConfig, ScheduleConfig
from inline_attention.training.distributed import Ranks
from inline_attention.training.optim import freeze_layers
from inline_attention.training.task import Evaluation, Headline, Task, Writer, describe, weights_source

PRECISION, PER_CLASS = "average_precision.json", "per_class.csv"


@dataclass(frozen=True)
class DetectorConfig(BackboneConfig):
    name: str = "inline_pvt_tiny"
    head: Literal["mask_rcnn", "cascade_mask_rcnn"] = "mask_rcnn"
    drop_path: float | None = 0.1
    channels: int = 256  # of the pyramid and of the heads
    regions: int = 512  # of an image, that a head learns from; fewer take less memory


@dataclass(frozen=True, kw_only=True)
class DetectionConfig(LoopConfig):
    """Of `inline detect`. The defaults are the published 1× schedule: 12 epochs of 16 images an update."""

    model: DetectorConfig = field(default_factory=DetectorConfig)
    data: DetectionDataConfig = field(default_factory=DetectionDataConfig)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=1e-4, rate_batch=16, weight_decay=0.05, clip_norm=None)
    )
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(
            kind="step",
            epochs=12,
            drop_at=(8, 11),
            warmup_epochs=0,
            warmup_steps=500,
            warmup_lr=1e-7,  # ours: the published warm-up's first rate is not given
            min_lr=0.0,
        )
    )


class Detection(Task):
    recipes = "detect"
    default_recipe = None
    data_hint = (
        "give --data FOLDER with annotations/instances_SPLIT.json and the images in SPLIT/, for train2017 and val2017"
    )
    headline = Headline("box_ap", "box AP")
    summary_figures = ("box_ap", "box_ap50", "mask_ap", "mask_ap50")

    config: DetectionConfig
    data: DetectionData

    @staticmethod
    def defaults() -> DetectionConfig:
        return DetectionConfig()

    @property
    def title(self) -> str:
        return f"{self.config.model.head} on {self.config.model.name}"

    def open_data(self, ranks: Ranks) -> DetectionData:
        config = self.config
        self.data = open_detection_data(config.data, seed=config.seed, rank=ranks.rank, world_size=ranks.world_size)
        return self.data.to(ranks.device)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `create_detector`."""
        wanted = self.config.model
        return {
            "head": wanted.head,
            "num_classes": self.data.num_classes,
            "channels": wanted.channels,
            "kwargs": wanted.kwargs,
        }

    def build_model(self) -> nn.Module:
        wanted = self.config.model
        torch.manual_seed(derive_seed("weights", self.config.seed))
        weights = wanted.weights if wanted.weights in (None, "pretrained") else weights_source(wanted.weights)
        model = create_detector(
            wanted.name, weights=weights, drop_path=wanted.drop_path, regions=wanted.regions, **self.arguments
        )
        model.backbone.set_grad_checkpointing(wanted.checkpointing)
        freeze_layers(model, wanted.freeze)
        return model

    def describe(self) -> dict[str, str]:
        data = self.config.data
        return describe(
            self.config,
            arguments=self.arguments,
            class_names=self.data.class_names,
            preprocessing=json.dumps({"short_side": data.short_side, "max_side": data.max_side}),
        )

    def losses(self, forward: Callable[..., Any], batch: DetectionBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """The host does wait for the device here: how many boxes survive their suppression decides the shapes."""
        return forward(batch.images, batch.sizes, batch.targets, batch.keys)

    def evaluate(self, model: nn.Module, *, device: torch.device, amp_dtype: torch.dtype | None) -> Evaluation:
        result = evaluate(model, self.data.val, device=device, amp_dtype=amp_dtype)
        return Evaluation(figures(result.precision), details=result.precision)

    def leave_behind(self, evaluation: Evaluation) -> dict[str, Writer]:
        precision: ApResult = evaluation.details
        return {PRECISION: partial(write_figures, precision), PER_CLASS: partial(write_per_class, precision)}


def figures(precision: ApResult) -> dict[str, float]:
    """By names such as box_ap50; what has no objects to find is left out, the main figure is then 0."""
    named = {
        f"{kind}_{name.lower()}": value
        for kind, values in (("box", precision.box), ("mask", precision.mask))
        for name, value in values.items()
    }
    main = dict.fromkeys(Detection.summary_figures, 0.0)
    return main | {name: value for name, value in named.items() if value is not None} | {"images": precision.images}


def write_figures(precision: ApResult, path: Path) -> None:
    content = {"images": precision.images, "box": precision.box, "mask": precision.mask}
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_per_class(precision: ApResult, path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("class", "box AP", "mask AP"))
        for name, values in precision.per_class.items():
            writer.writerow((name, *("" if value is None else f"{value:.3f}" for value in values)))
