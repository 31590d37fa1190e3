"""Classification as a task of the training engine. Top-1 ranks its weights, or mAP if images have several labels."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from inline_attention.data import Batch, Data, Mixup, open_data, typical_side
from inline_attention.data.seeding import derive_seed
from inline_attention.data.tables import SPLIT, with_split_of
from inline_attention.models.registry import create_model
from inline_attention.models.schema import MULTI_LABEL
from inline_attention.models.shipped import SHIPPED
from inline_attention.models.weights import load_weights
from inline_attention.tasks.classification.classifier import is_sized, preprocessing
from inline_attention.tasks.classification.config import RECIPES, TrainConfig
from inline_attention.tasks.classification.evaluation import evaluate
from inline_attention.tasks.classification.losses import ClassifierLoss
from inline_attention.tasks.classification.multi_label import evaluate_multi_label
from inline_attention.training.distributed import Ranks
from inline_attention.training.optim import freeze_layers
from inline_attention.training.task import Evaluation, Headline, Task, Writer, describe, weights_source

SIZE = "data.img_size"
PHOTO_SIDE = 96  # measured in docs/results/finetuning.md
CONFUSION = "confusion.png"
MAX_DRAWN_CLASSES = 50  # a larger matrix has cells too small to read


class Classification(Task):
    recipes = RECIPES
    default_recipe = "quickstart"
    data_hint = "give --data FOLDER with train/CLASS/… and val/CLASS/…, or CLASS/… (or --data digits, the embedded set)"
    headline = Headline("top1", "top-1")
    summary_figures: tuple[str, ...] = ("top1", "top5")
    fixed_shapes = True

    config: TrainConfig
    data: Data

    @staticmethod
    def defaults() -> TrainConfig:
        return TrainConfig()

    def __init__(self, config: TrainConfig) -> None:
        data = config.data
        if data.img_size is None:
            data = replace(data, img_size=own_size(config.model.name))
        super().__init__(replace(config, data=data))

    def choose_from_data(self, world_size: int) -> dict[str, Any]:
        for name in self.config.from_data:
            if name != SIZE:
                raise ValueError(f"from_data={name}: cannot be chosen from the data; expected {SIZE}")
        return {SIZE: self._size_for_data()} if self.config.from_data else {}

    def _size_for_data(self) -> int | list[int]:
        """The model's own size, or PHOTO_SIDE if the model's is smaller and the images are large enough."""
        own = own_size(self.config.model.name)
        if not isinstance(own, int) or own >= PHOTO_SIDE:
            return own
        side = typical_side(self.config.data)
        return own if side is None or side < PHOTO_SIDE else PHOTO_SIDE

    def open_data(self, ranks: Ranks) -> Data:
        config = self.config
        if not config.data.labels:
            raise ValueError("data.labels=false: a classifier learns from labels; `inline linearize` needs none")
        data = with_split_of(self.resumed_run, config.data)
        self.data = open_data(data, seed=config.seed, rank=ranks.rank, world_size=ranks.world_size)
        self.mixup = Mixup(config.data, num_classes=self.data.num_classes, seed=config.seed)
        if self.data.num_classes == 1 and not self.data.multi_label:
            name = self.data.class_names[0]
            raise ValueError(f"{data.path!r} has one class, {name!r}: a classifier needs two or more")
        images = None
        if self.data.multi_label:
            self.headline, self.summary_figures = Headline("map", "mAP"), ("map", "f1_micro", "f1_macro")
            images = self.data.train_images
        elif self.data.num_classes <= 5:
            self.summary_figures = ("top1",)
        self.loss = ClassifierLoss(config.optim, class_counts=self.data.class_counts, images=images).to(ranks.device)
        return self.data.to(ranks.device)

    def start_files(self) -> dict[str, bytes]:
        return {} if self.data.table is None else {SPLIT: self.data.table.to_csv()}

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `create_model`."""
        wanted = self.config.model
        return {
            "num_classes": self.data.num_classes,
            "in_chans": self.data.in_chans,
            **({"img_size": self.config.data.img_size} if is_sized(wanted.name) else {}),
            **({} if wanted.drop_path is None else {"drop_path_rate": wanted.drop_path}),
            **wanted.kwargs,
        }

    def fetch_weights(self) -> None:
        try:
            super().fetch_weights()
        except ConnectionError as error:
            raise ConnectionError(f"{error}, or from weights in the package (model.name={SHIPPED[-1]})") from error

    def build_model(self) -> nn.Module:
        wanted = self.config.model
        torch.manual_seed(derive_seed("weights", self.config.seed))
        model: Any  # timm's contract
        try:
            model = create_model(wanted.name, pretrained=wanted.weights == "pretrained", **self.arguments)
        except TypeError as error:  # an argument of the wrong type
            raise ValueError(f"model {wanted.name} cannot be built with {self.arguments}: {error}") from error
        if wanted.weights not in (None, "pretrained"):
            load_weights(model, weights_source(wanted.weights), reset_head=wanted.reset_head)
        if wanted.checkpointing:
            model.set_grad_checkpointing(True)
        freeze_layers(model, wanted.freeze)
        return model

    def describe(self) -> dict[str, str]:
        return describe(
            self.config,
            arguments=self.arguments,
            class_names=list(self.data.class_names),
            preprocessing=preprocessing(self.config.data),
            **{MULTI_LABEL: json.dumps(self.data.multi_label)},
        )

    def losses(self, forward: Callable[..., Any], batch: Batch, *, epoch: int, step: int) -> dict[str, Tensor]:
        images, targets = self.mixup(batch.images, batch.targets, epoch=epoch, step=step)
        logits = forward(images)
        return {"class": self.loss(logits.float(), targets)}

    def evaluate(self, model: nn.Module, *, device: torch.device, amp_dtype: torch.dtype | None) -> Evaluation:
        measure = evaluate_multi_label if self.data.multi_label else evaluate
        result = measure(model, self.data.val, device=device, amp_dtype=amp_dtype)
        figures = {key: getattr(result, key) for key in ("loss", *self.summary_figures, "images")}
        return Evaluation(figures, details=getattr(result, "confusion", None))

    def result_files(self, evaluation: Evaluation) -> dict[str, Writer]:
        confusion: Tensor | None = evaluation.details
        if confusion is None or len(confusion) > MAX_DRAWN_CLASSES:
            return {}
        return {CONFUSION: partial(_draw_confusion, confusion, list(self.data.class_names))}


def own_size(name: str) -> int | list[int]:
    """The input size of a registered model: its side, or [height, width]."""
    described = timm.models.get_pretrained_cfg(name)
    if described is None:  # building the model will report the unknown name
        return 224
    height, width = described.input_size[1:]
    return height if height == width else [height, width]


def _draw_confusion(confusion: Tensor, class_names: list[str], path: Path) -> None:
    from inline_attention.tasks.classification import plots

    plots.draw_confusion(confusion, class_names, path)
