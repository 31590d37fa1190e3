"""The stages of linearising: one run folder each, and one weights file at the end.

DIR/
  match/                run folder of stage 1
  distill/              run folder of stage 2
  student.safetensors   the best weights of the last stage
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inline_attention.data import open_eval_data
from inline_attention.linearize import linearize
from inline_attention.models._download import atomic_path
from inline_attention.models.schema import ARCHITECTURE
from inline_attention.models.weights import describe_model, save_weights
from inline_attention.tasks.classification.classifier import Classifier, model_name
from inline_attention.tasks.linearization.config import LinearizationConfig
from inline_attention.tasks.linearization.task import (
    Distillation,
    LabelledDistillation,
    Linearization,
    LogitDistillation,
    Matching,
    data_for,
    load_teacher,
    make_student,
    mentioning_no_labels,
    student_metadata,
)
from inline_attention.training.distributed import join_ranks
from inline_attention.training.loop import train
from inline_attention.training.report import SUMMARY
from inline_attention.training.run_folder import CHECKPOINTS, CONFIG, Plan, plan_run

MATCH, DISTILL = "match", "distill"  # folders of the stages
STUDENT = "student.safetensors"
CALIBRATION_IMAGES = 256  # images on which auto:K chooses the layers to keep
# The recipe's rate was chosen on a teacher of 2.4 million parameters. For a larger one the log advises a lower rate.
LARGE_TEACHER = 10_000_000  # parameters
HIGH_RATE = 2e-3
# Settings of the student, which a run cannot change once it has begun.
FIXED = ("name", "weights", "kwargs", "attention", "anchors", "feature_map", "local_residual", "keep_softmax")


@dataclass(frozen=True)
class LinearizationPlan:
    """A run of both stages before it starts."""

    folder: Path
    config: LinearizationConfig
    changes: tuple[str, ...] = ()  # settings that differ from those of the resumed run
    # Filled in by `prepare`:
    stages: tuple[tuple[str, type[Linearization]], ...] = ()  # with the names of their folders
    has_head: bool = True

    def weights(self, stage: str) -> Path:
        return self.folder / stage / CHECKPOINTS / "best.safetensors"

    @property
    def student(self) -> Path:
        return self.folder / STUDENT


@dataclass(frozen=True)
class Result:
    """The end of a run."""

    plan: LinearizationPlan
    signal: int = 0  # the signal that stopped the run after saving; 0: the student is complete
    is_first_rank: bool = True


def plan_linearization(
    recipe: str | None = None,
    *,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    output: str | None = None,
    resume: str | None = None,
) -> LinearizationPlan:
    """Plan both stages. Writes nothing.

    Args:
        recipe: as in `plan_run`, and so are overrides, flags and output.
        resume: "auto" for the run in `output`, or the folder to continue. Complete stages are left as they are.
    """
    if resume == "auto" and output is None:
        raise ValueError("--resume auto continues the run in --output: give --output DIR too")
    place = output if resume in (None, "auto") else resume
    if resume == place and place is not None and Path(place).name in (MATCH, DISTILL):
        place = str(Path(place).parent)  # messages of a stage name the folder of the stage
    begun: list[Path] = []
    if place is not None:
        if (Path(place) / CONFIG).exists():
            raise ValueError(f"{place} holds a run of another command: expected a folder of `inline linearize`")
        begun = [path for name in (DISTILL, MATCH) if ((path := Path(place, name)) / CONFIG).exists()]
    if begun and resume is None:
        raise ValueError(f"{place} already holds a run: continue it with --resume auto, or give another --output")
    if not begun and resume not in (None, "auto"):
        raise ValueError(f"--resume {resume}: expected a folder of `inline linearize`, with {MATCH} or {DISTILL} in it")
    if resume not in (None, "auto") and output is not None and Path(output).resolve() != Path(str(place)).resolve():
        raise ValueError(f"--resume {resume} continues in that folder: leave out --output {output}")
    source = str(begun[0]) if begun else None
    plan = plan_run(recipe, task=Matching, overrides=overrides, flags=flags, output=place, resume=source)
    fixed = tuple(f"model.{name}{end}" for name in FIXED for end in ("=", "."))
    if changed := [change for change in plan.changes if change.startswith(fixed)]:
        raise ValueError(
            f"{place} was begun with another model: {', '.join(changed)}. Leave that out, or give another --output"
        )
    config: Any = plan.config
    if resume == "auto" and not begun and not config.model.name and config.model.weights == "pretrained":
        raise ValueError(f"--resume auto: {place} holds no run to continue; to begin one there, name a model")
    config = replace(config, model=replace(config.model, start=None))  # the config.yaml of stage 2 sets it
    return LinearizationPlan(plan.folder if place is None else Path(place), config, plan.changes)


def prepare(
    plan: LinearizationPlan, *, device: torch.device, log: Callable[[str], None] = lambda text: None
) -> LinearizationPlan:
    """Choose the stages, and the layers that stay softmax. Raises ValueError if the settings do not fit the teacher."""
    config = plan.config
    if not config.data.path:
        raise ValueError(f"no data: {Linearization.data_hint}")
    check_data(config)  # a teacher may take a long download
    teacher = load_teacher(config)
    if config.model.kept is None and config.model.chooses_layers:
        log(f"choosing the layers that stay softmax, on up to {CALIBRATION_IMAGES} images")
        config = replace(config, model=replace(config.model, kept=choose_layers(teacher, config, device=device)))
    student, report = make_student(teacher, config.model, seed=config.seed)
    if not report.linear():
        if config.match.steps or not config.distill.enabled:
            raise ValueError(
                f"model.keep_softmax={config.model.keep_softmax} keeps all attentions, which leaves none to convert: "
                "keep fewer, or train the teacher further as a control, with match.steps=0 and without --epochs 0"
            )
        log("all attentions stay softmax: this run is a control, which trains the teacher further")
    if ARCHITECTURE not in describe_model(student):
        name = model_name(teacher.model)
        raise ValueError(f"a weights file cannot describe how to build this {name}: see the warning above")
    log(str(report))
    size = sum(parameter.numel() for parameter in teacher.model.parameters())
    if size > LARGE_TEACHER and config.distill.enabled and config.optim.lr > HIGH_RATE:
        log(
            f"optim.lr={config.optim.lr:g} may be too high for a teacher of {size / 1e6:.0f} million parameters: the "
            "recipe's 8e-3 was chosen on one of 2.4 million. Try optim.lr=5e-4 match.steps=240"
        )
    has_head = bool(teacher.model.num_classes)
    stages: list[tuple[str, type[Linearization]]] = []
    if config.match.steps:
        stages.append((MATCH, Matching))
    if config.distill.enabled:
        of_classifier = LabelledDistillation if config.data.labels else LogitDistillation
        stages.append((DISTILL, of_classifier if has_head else Distillation))
    return replace(plan, config=config, stages=tuple(stages), has_head=has_head)


def check_data(config: LinearizationConfig) -> None:
    """Open both splits without reading an image. Size and preparation, which are the teacher's, do not matter."""
    data = replace(config.data, img_size=1, mean=None, std=None, in_memory=False, augment_on_device=False)
    with mentioning_no_labels(config):
        for split in (data.train_split, data.val_split):
            open_eval_data(data, split=split, seed=config.seed)


def choose_layers(teacher: Classifier, config: LinearizationConfig, *, device: torch.device) -> list[str]:
    """The attentions that model.keep_softmax=[auto:K] keeps, measured on training images."""
    wanted = config.model
    data = data_for(teacher, config)
    loader = open_eval_data(data, max_images=CALIBRATION_IMAGES, split=data.train_split, seed=config.seed)
    loader.to(device)
    report = linearize(
        deepcopy(teacher.model).to(device),
        attention=wanted.attention,
        anchors=wanted.anchors,
        feature_map=wanted.feature_map,
        local_residual=False,
        keep_softmax=wanted.keep_softmax[0],  # auto:K
        images=[batch.images for batch in loader],
    )
    return [layer.name for layer in report.layers if not layer.is_linear]


def run_linearization(plan: LinearizationPlan, *, log: Callable[[str], None] = lambda text: None) -> Result:
    """Run the stages that are not complete, and write the student's file. Under torchrun every rank calls this.

    log: gets lines of text, on rank 0.
    """
    with join_ranks(plan.config.device) as ranks:
        plan = ranks.decide(lambda: prepare(plan, device=ranks.device, log=log))
        config = plan.config
        for stage, task in plan.stages:
            folder = plan.folder / stage
            is_complete = ranks.decide((folder / SUMMARY).exists)
            if plan.changes or not is_complete:
                outcome = train(Plan(task, config, folder, source=folder, changes=plan.changes))
                if outcome.signal:
                    return Result(plan, outcome.signal, ranks.is_first)
            config = replace(config, model=replace(config.model, start=str(plan.weights(stage))))
        ranks.decide(lambda: write_student(plan))
        return Result(plan, is_first_rank=ranks.is_first)


def write_student(plan: LinearizationPlan) -> None:
    """Copy the weights of the last stage. Without any stage, write the converted weights of the teacher."""
    if plan.stages:
        with atomic_path(plan.student) as temporary:
            shutil.copyfile(plan.weights(plan.stages[-1][0]), temporary)
    else:
        teacher = load_teacher(plan.config)
        student, _ = make_student(teacher, plan.config.model, seed=plan.config.seed)
        plan.folder.mkdir(parents=True, exist_ok=True)
        save_weights(student, plan.student, metadata=student_metadata(teacher, plan.config))
