"""Detection and instance segmentation as a task of the training loop."""

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.data.seeding import derive_seed
from inline_attention.dense.detection.average_precision import ApResult
from inline_attention.dense.detection.config import DetectionConfig
from inline_attention.dense.detection.data import DetectionBatch, DetectionData, open_detection_data
from inline_attention.dense.detection.evaluate import evaluate
from inline_attention.dense.detection.weights import TASK, arguments_of, build, preparation, title
from inline_attention.training.distributed import Ranks
from inline_attention.training.optim import freeze_layers
from inline_attention.training.task import Evaluation, Headline, Task, Writer, describe

PRECISION, PER_CLASS = "average_precision.json", "per_class.csv"


class Detection(Task):
    recipes = "recipes/detect"
    default_recipe = None
    data_hint = (
        "give --data FOLDER with annotations/instances_SPLIT.json and the images in SPLIT/, for train2017 and val2017"
    )
    headline = Headline("box_ap", "box AP")
    summary_figures = ("box_ap", "box_ap50", "mask_ap", "mask_ap50")
    fixed_shapes = False  # images keep their aspect, and how many regions there are is the model's finding

    config: DetectionConfig
    data: DetectionData

    @staticmethod
    def defaults() -> DetectionConfig:
        return DetectionConfig()

    @property
    def title(self) -> str:
        return title(self.config.model)

    def open_data(self, ranks: Ranks) -> DetectionData:
        config = self.config
        self.data = open_detection_data(config.data, seed=config.seed, rank=ranks.rank, world_size=ranks.world_size)
        return self.data.to(ranks.device)

    def build_model(self) -> nn.Module:
        wanted = self.config.model
        torch.manual_seed(derive_seed("weights", self.config.seed))
        model = build(wanted, num_classes=self.data.num_classes)
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

    def losses(self, forward: Callable[..., Any], batch: DetectionBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """The host does wait for the device here: how many boxes survive their suppression decides the shapes."""
        return forward(batch.images, batch.sizes, batch.targets, batch.keys)

    def evaluate(self, model: nn.Module, *, device: torch.device, amp_dtype: torch.dtype | None) -> Evaluation:
        result = evaluate(model, self.data.val, device=device, amp_dtype=amp_dtype)
        return Evaluation(figures(result.precision), details=result.precision)

    def result_files(self, evaluation: Evaluation) -> dict[str, Writer]:
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
