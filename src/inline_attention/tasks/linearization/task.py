"""Linearising as tasks of the training engine: match each layer to the softmax it replaces, then distil the whole.

The teacher is a model of this library or of timm. No checkpoint stores it. Its outputs are computed for every batch.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.data import Batch, Data, DataConfig, Mixup, open_data
from inline_attention.data.seeding import derive_seed
from inline_attention.data.tables import SPLIT, with_split_of
from inline_attention.linearize import Report, linearize
from inline_attention.linearize.convert import linearized_modules
from inline_attention.models.schema import CLASS_NAMES, MULTI_LABEL, PREPROCESSING
from inline_attention.models.weights import describe_model, load_weights
from inline_attention.optimize import optimize
from inline_attention.tasks.classification.classifier import (
    PREPARATION,
    Classifier,
    load_classifier,
    model_name,
    preprocessing,
)
from inline_attention.tasks.linearization.comparison import compare_outputs, relative_error
from inline_attention.tasks.linearization.config import RECIPES, LinearizationConfig, StudentConfig
from inline_attention.training.distributed import Ranks
from inline_attention.training.loop import choose_precision
from inline_attention.training.optim import freeze_layers
from inline_attention.training.task import Evaluation, Headline, Task

SAVE_STEPS = 100  # updates between two checkpoints of stage 1


def load_teacher(config: LinearizationConfig) -> Classifier:
    """The teacher, its class names and the preparation of its images. Raises ValueError if it has no weights."""
    wanted = config.model
    if not wanted.name and wanted.weights == "pretrained":
        raise ValueError("no teacher: name a model of this library or of timm, or give a file with --weights")
    drop_path = {} if wanted.drop_path is None else {"drop_path_rate": wanted.drop_path}
    try:
        return load_classifier(
            wanted.name or None,
            wanted.weights,
            img_size=None if config.data.img_size is None else config.data.size,
            arguments={**drop_path, **wanted.kwargs},
        )
    except TypeError as error:
        raise ValueError(f"model {wanted.name} cannot be built with {wanted.kwargs}: {error}") from error
    except (RuntimeError, ValueError) as error:  # timm raises a RuntimeError for a model without weights
        if wanted.weights != "pretrained":
            raise
        raise ValueError(f"{error}. Or give a file of the teacher with --weights") from error


def data_for(teacher: Classifier, config: LinearizationConfig) -> DataConfig:
    """The data of a run, with the teacher's image size and preparation."""
    return replace(config.data, **{name: getattr(teacher.data, name) for name in ("in_chans", *PREPARATION)})


@contextmanager
def mentioning_no_labels(config: LinearizationConfig) -> Iterator[None]:
    """Add --no-labels to an error about a folder with labels."""
    try:
        yield
    except ValueError as error:
        if config.data.labels and Path(config.data.path).is_dir():
            raise ValueError(f"{error}. Any images will do with --no-labels") from error
        raise


def make_student(teacher: Classifier, wanted: StudentConfig, *, seed: int) -> tuple[nn.Module, Report]:
    """A linearised copy of the teacher, and a report on its layers."""
    student = deepcopy(teacher.model)
    torch.manual_seed(derive_seed("weights", seed))  # for the local residual's first layer
    report = linearize(
        student,
        attention=wanted.attention,
        anchors=wanted.anchors,
        feature_map=wanted.feature_map,
        local_residual=wanted.local_residual,
        keep_softmax=wanted.names_and_positions if wanted.kept is None else wanted.kept,
        arguments={**teacher.arguments, **wanted.kwargs},
    )
    return student, report


def student_metadata(teacher: Classifier, config: LinearizationConfig) -> dict[str, str]:
    """The metadata of a student's file, apart from how to build the model."""
    num_classes: int = teacher.model.num_classes  # type: ignore[assignment]  # timm's contract
    names = teacher.class_names
    if names is None:  # the names that predictions use
        names = [str(label) for label in range(num_classes)]
    return {
        CLASS_NAMES: json.dumps(names),
        PREPROCESSING: preprocessing(teacher.data),
        MULTI_LABEL: json.dumps(teacher.multi_label),
        "recipe": config.recipe,
    }


class Linearization(Task):
    """The base of both stages: the data, the teacher, and the student made from it."""

    recipes = RECIPES
    default_recipe = "linearize"
    data_hint = "give --data FOLDER with train/CLASS/… and val/CLASS/…; with --no-labels, any folder of images"
    fixed_shapes = True

    config: LinearizationConfig
    data: Data

    @staticmethod
    def defaults() -> LinearizationConfig:
        return LinearizationConfig()

    @property
    def title(self) -> str:
        return f"linearised {model_name(self.teacher)}"

    @property
    def has_head(self) -> bool:
        return bool(self.teacher.num_classes)

    def open_data(self, ranks: Ranks) -> Data:
        config = self.config
        self.classifier = load_teacher(config)
        self.teacher: Any = self.classifier.model.to(ranks.device).eval().requires_grad_(False)
        self.amp_dtype = choose_precision(config.run.precision, ranks.device)
        with mentioning_no_labels(config):
            self.data = open_data(
                with_split_of(self.resumed_run, data_for(self.classifier, config)),
                class_names=self.classifier.class_names if config.data.labels else None,
                seed=config.seed,
                rank=ranks.rank,
                world_size=ranks.world_size,
            )
        self.data.val.check_one_label("linearising with labels (not --no-labels)")
        if config.data.labels and self.has_head and self.data.num_classes != self.teacher.num_classes:
            raise ValueError(
                f"{config.data.path} has {self.data.num_classes} classes, but the teacher has "
                f"{self.teacher.num_classes}, whose names are not known: give data with its classes, or --no-labels"
            )
        self.mixup = Mixup(config.data, num_classes=max(1, self.data.num_classes), seed=config.seed)
        return self.data.to(ranks.device)

    def start_files(self) -> dict[str, bytes]:
        return {} if self.data.table is None else {SPLIT: self.data.table.to_csv()}

    def build_model(self) -> nn.Module:
        wanted = self.config.model
        self.student, _ = make_student(self.classifier, wanted, seed=self.config.seed)
        if wanted.start is not None:
            load_weights(self.student, wanted.start)
        return self.student.requires_grad_(True)

    def describe(self) -> dict[str, str]:
        return {**describe_model(self.student), **student_metadata(self.classifier, self.config)}

    def evaluate(self, model: nn.Module, *, device: torch.device, amp_dtype: torch.dtype | None) -> Evaluation:
        labelled = self.config.data.labels
        result = compare_outputs(
            model, self.teacher, self.data.val, device=device, amp_dtype=amp_dtype, labelled=labelled
        )
        return Evaluation(result.figures())


class Matching(Linearization):
    """Stage 1. Each linear attention learns the output of the softmax that it replaces.

    In training, each attention returns the teacher's output. So every layer gets the inputs of the teacher's layer, and
    all of them learn at the same time. Everything else is frozen. In evaluation, the student uses its own outputs.
    """

    headline = Headline("cosine", "cosine to the teacher")
    summary_figures: tuple[str, ...] = ("cosine",)

    @staticmethod
    def loop_settings(config: LinearizationConfig) -> LinearizationConfig:
        """Stage 1 has its own length and rate. Its epochs may be short, so it evaluates once and saves by updates."""
        steps, saving = config.match.steps, config.checkpoint
        return replace(
            config,
            optim=replace(config.optim, lr=config.match.lr),
            schedule=replace(config.schedule, steps=steps, warmup_steps=0, cooldown_epochs=0),
            checkpoint=replace(saving, every_epochs=steps, every_steps=saving.every_steps or SAVE_STEPS),
            log=replace(config.log, eval_epochs=steps),
            # FSDP gathers weights for the backward pass at a block's output, but here the loss is inside the blocks.
            run=replace(config.run, strategy="ddp"),
        )

    def build_model(self) -> nn.Module:
        student = super().build_model().requires_grad_(False)
        for module in student.modules():
            if isinstance(module, timm.layers.DropPath):
                module.drop_prob = 0.0  # keep the teacher's inputs as they are
        self.errors: list[Tensor] = []
        for name, module in linearized_modules(student).items():
            module.requires_grad_(True)
            softmax = self.teacher.get_submodule(name)
            module.register_forward_hook(partial(self.compare_layer, softmax), with_kwargs=True)
        return student

    def compare_layer(
        self, softmax: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> Tensor:
        """A forward hook: record the error of a linear attention, and return the output of softmax instead."""
        if not module.training:
            return out
        with torch.no_grad():
            expected = softmax(*args, **kwargs)
        self.errors.append(relative_error(out, expected))
        return expected

    def losses(self, forward: Callable[..., Any], batch: Batch, *, epoch: int, step: int) -> dict[str, Tensor]:
        self.errors.clear()
        forward(batch.images)
        return {"layers": torch.stack(self.errors).mean()}


class Distillation(Linearization):
    """Stage 2 of a model without a head: the student learns the teacher's features of all tokens."""

    headline = Headline("cosine", "cosine to the teacher")
    summary_figures: tuple[str, ...] = ("cosine",)

    def build_model(self) -> nn.Module:
        wanted, student = self.config.model, super().build_model()
        if not self.has_head:  # timm's forward is forward_head(forward_features(x))
            self.teacher.forward_head = student.forward_head = _every_token  # type: ignore[assignment]
            self.unused_parameters = True  # such as those of a norm after pooling
        if wanted.checkpointing:
            student.set_grad_checkpointing(True)  # type: ignore[operator]  # timm's contract
        freeze_layers(student, wanted.freeze)
        if self.config.run.compile:
            optimize(self.teacher, mode="default")
        return student

    def taught(self, images: Tensor) -> Tensor:
        """The teacher's outputs, in float32."""
        with torch.no_grad(), torch.autocast(images.device.type, self.amp_dtype, enabled=self.amp_dtype is not None):
            return self.teacher(images).float()

    def losses(self, forward: Callable[..., Any], batch: Batch, *, epoch: int, step: int) -> dict[str, Tensor]:
        images, _ = self.mixup(batch.images, batch.targets, epoch=epoch, step=step)
        return {"features": relative_error(forward(images), self.taught(images))}


class LogitDistillation(Distillation):
    """Stage 2 of a classifier, without labels: the student learns the teacher's probabilities."""

    headline = Headline("agreement", "agreement with the teacher")
    summary_figures: tuple[str, ...] = ("agreement", "cosine")

    def losses(self, forward: Callable[..., Any], batch: Batch, *, epoch: int, step: int) -> dict[str, Tensor]:
        images, _ = self.mixup(batch.images, batch.targets, epoch=epoch, step=step)
        return {"teacher": self.divergence(forward(images), self.taught(images))}

    def divergence(self, logits: Tensor, taught: Tensor) -> Tensor:
        """KL divergence from the teacher's probabilities. The factor T² keeps gradients independent of T."""
        temperature = self.config.distill.temperature
        ours, theirs = (F.log_softmax(x.float() / temperature, dim=1) for x in (logits, taught))
        return temperature**2 * F.kl_div(ours, theirs, log_target=True, reduction="batchmean")


class LabelledDistillation(LogitDistillation):
    """Stage 2 of a classifier, with labels for a share of the loss, and ranked by accuracy."""

    headline = Headline("top1", "top-1")
    summary_figures: tuple[str, ...] = ("top1", "agreement", "cosine")

    def losses(self, forward: Callable[..., Any], batch: Batch, *, epoch: int, step: int) -> dict[str, Tensor]:
        images, targets = self.mixup(batch.images, batch.targets, epoch=epoch, step=step)
        logits, share = forward(images), self.config.distill.labels
        return {
            "teacher": (1 - share) * self.divergence(logits, self.taught(images)),
            "class": share * F.cross_entropy(logits.float(), targets),
        }


def _every_token(features: Tensor, pre_logits: bool = False) -> Tensor:
    """A `forward_head` that returns the features of all tokens."""
    return features
