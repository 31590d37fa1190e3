"""Everything a training run can be told, with its type and its default, and the recipes inside the package.

`LoopConfig` is what every task shares, `TrainConfig` classification's. Its defaults are those of the published DeiT and
Swin runs; a recipe holds what differs.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from inline_attention.data import DataConfig, LoaderConfig
from inline_attention.training import settings
from inline_attention.training.schedule import Schedule, ScheduleKind


def _check(setting: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{setting}={value}: expected {expected}")


@dataclass(frozen=True)
class BackboneConfig:
    """A registered model, whatever is put behind it."""

    name: str = "inline_deit_tiny"
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of create_model
    drop_path: float | None = None  # stochastic depth of the last block; None: the model's own default
    weights: str | None = None  # start from "pretrained", another model's published weights by name, or a file
    freeze: int = 0  # layer groups that stay as they are: 1 is the stem, 2 the first stage (or block) too, …
    checkpointing: bool = False  # recompute activations in the backward pass: less memory, about a third more time

    def __post_init__(self) -> None:
        drop_path = self.drop_path
        _check("model.drop_path", drop_path, drop_path is None or 0 <= drop_path < 1, "a rate in [0, 1)")
        _check("model.freeze", self.freeze, self.freeze >= 0, "0 (nothing is frozen) or more")


@dataclass(frozen=True)
class ModelConfig(BackboneConfig):
    """A registered model as a classifier."""

    reset_head: bool = False  # keep the head random, for other classes than those of `weights`

    def __post_init__(self) -> None:
        super().__post_init__()
        elsewhere = {"num_classes": "the data's classes are counted", "in_chans": "set data.in_chans",
                     "img_size": "set data.img_size", "drop_path_rate": "set model.drop_path"}  # fmt: skip
        for name in elsewhere.keys() & self.kwargs.keys():
            raise ValueError(f"model.kwargs.{name}={self.kwargs[name]}: {elsewhere[name]} instead")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW. Rates are per `rate_batch` images and grow linearly with the global batch."""

    lr: float = 5e-4
    rate_batch: int | None = 512  # None: rates are what they say, whatever the batch
    weight_decay: float = 0.05  # not on biases, norms and what the model's no_weight_decay() names
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    layer_decay: float | None = None  # the rate of each layer group is this times the next one's
    clip_norm: float | None = 5.0
    accumulate: int = 1  # batches per update; part of the global batch

    def __post_init__(self) -> None:
        clip, decay = self.clip_norm, self.layer_decay
        _check("optim.lr", self.lr, self.lr > 0, "a positive rate")
        _check(
            "optim.rate_batch", self.rate_batch, self.rate_batch is None or self.rate_batch >= 1, "1 or more, or null"
        )
        _check("optim.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _check("optim.betas", list(self.betas), all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        _check("optim.eps", self.eps, self.eps > 0, "a positive number")
        _check("optim.layer_decay", decay, decay is None or 0 < decay <= 1, "a factor in (0, 1], or null")
        _check("optim.clip_norm", clip, clip is None or clip > 0, "a positive norm, or null for no clipping")
        _check("optim.accumulate", self.accumulate, self.accumulate >= 1, "1 or more")


@dataclass(frozen=True)
class ClassifierOptimConfig(OptimConfig):
    """AdamW, and the loss of a classifier."""

    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("optim.label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 1, "a share in [0, 1)")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, and with which rates. A length in steps (updates) takes the place of the one in epochs."""

    kind: ScheduleKind = "cosine"
    epochs: int = 300
    steps: int | None = None
    warmup_epochs: float = 20
    warmup_steps: int | None = None
    warmup_lr: float = 5e-7
    min_lr: float = 5e-6
    cooldown_epochs: int = 0  # at min_lr, after `epochs`
    power: float = 1.0  # poly schedule alone
    drop_epochs: float = 30  # step schedule alone
    drop_at: tuple[float, ...] = ()  # step schedule: drops here (in the unit of the length) instead
    drop_factor: float = 0.1

    def __post_init__(self) -> None:
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            _check(f"schedule.{name}", value, value is None or value >= 1, "1 or more")
        for name in ("warmup_epochs", "warmup_steps", "warmup_lr", "min_lr", "cooldown_epochs", "power"):
            value = getattr(self, name)
            _check(f"schedule.{name}", value, value is None or value >= 0, "0 or more")
        if self.steps is None and self.warmup_steps is None and self.warmup_epochs > self.epochs:
            raise ValueError(
                f"schedule.warmup_epochs={self.warmup_epochs}: expected 0 to schedule.epochs={self.epochs}; "
                "give a shorter warm-up with fewer epochs"
            )
        _check("schedule.drop_epochs", self.drop_epochs, self.drop_epochs > 0, "a positive number")
        _check("schedule.drop_at", list(self.drop_at), [*self.drop_at] == sorted(self.drop_at), "ascending numbers")
        _check("schedule.drop_factor", self.drop_factor, 0 < self.drop_factor <= 1, "a factor in (0, 1]")

    def decay_steps(self, steps_per_epoch: int) -> int:
        """Updates before the cool-down."""
        return self.epochs * steps_per_epoch if self.steps is None else self.steps

    def warm_up_steps(self, steps_per_epoch: int) -> int:
        length = self.decay_steps(steps_per_epoch)
        steps = int(self.warmup_epochs * steps_per_epoch) if self.warmup_steps is None else self.warmup_steps
        if steps > length:
            raise ValueError(
                f"a warm-up of {steps} updates in a run of {length}: give a shorter schedule.warmup_steps (or "
                "schedule.warmup_epochs)"
            )
        return steps

    def drop_steps(self, steps_per_epoch: int) -> tuple[int, ...]:
        unit = steps_per_epoch if self.steps is None else 1
        return tuple(int(drop * unit) for drop in self.drop_at)


@dataclass(frozen=True)
class EmaConfig:
    """A moving average of the weights, evaluated beside them. `decay` is per `batch` images, as published."""

    decay: float | None = None
    batch: int | None = 4096  # null: decay is per update, whatever the batch

    def __post_init__(self) -> None:
        _check("ema.decay", self.decay, self.decay is None or 0 <= self.decay < 1, "a factor in [0, 1), or null")
        _check("ema.batch", self.batch, self.batch is None or self.batch >= 1, "1 or more, or null")

    def decay_per_step(self, global_batch: int) -> float | None:
        if self.decay is None or self.batch is None:
            return self.decay
        return self.decay ** (global_batch / self.batch)


@dataclass(frozen=True)
class RunConfig:
    """How the steps are computed."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 on a GPU that has it, else fp32
    compile: bool = False  # `inline_attention.optimize`: at the first step; with CUDA graphs on one GPU
    strategy: Literal["ddp", "fsdp"] = "ddp"  # with more than one rank
    on_nan: Literal["stop", "skip"] = "stop"  # an update with a non-finite gradient is never applied


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of a run is saved, and how much of it is kept."""

    every_epochs: int = 1
    every_steps: int | None = None  # also inside an epoch
    keep: int = 2  # whole checkpoints kept; the best weights are kept besides

    def __post_init__(self) -> None:
        for name in ("every_epochs", "every_steps", "keep"):
            value = getattr(self, name)
            _check(f"checkpoint.{name}", value, value is None or value >= 1, "1 or more")


@dataclass(frozen=True)
class LogConfig:
    """When a run is measured, and where its figures go."""

    every_steps: int = 50  # the device is read this often
    eval_epochs: int = 1  # evaluate this often; the last epoch always
    tensorboard: bool = True
    wandb: str | None = None  # project name

    def __post_init__(self) -> None:
        for name in ("every_steps", "eval_epochs"):
            value = getattr(self, name)
            _check(f"log.{name}", value, value >= 1, "1 or more")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What the loop reads. A task's own configuration says what its model and data are, and has its own defaults."""

    recipe: str = ""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    deterministic: bool = False  # deterministic algorithms alone; some are slower
    model: BackboneConfig
    data: LoaderConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _check("seed", self.seed, 0 <= self.seed < 2**63, "a number from 0 to 2^63 - 1")

    def global_batch(self, world_size: int) -> int:
        """Images per update."""
        return self.data.batch_size * self.optim.accumulate * world_size

    def build_schedule(self, *, steps_per_epoch: int, world_size: int) -> Schedule:
        """The rates of this run: steps are updates, rates scaled to the global batch unless they are absolute."""
        plan, rate_batch = self.schedule, self.optim.rate_batch
        scale = 1.0 if rate_batch is None else self.global_batch(world_size) / rate_batch
        return Schedule(
            kind=plan.kind,
            peak=self.optim.lr * scale,
            warmup_rate=plan.warmup_lr * scale,
            minimum=plan.min_lr * scale,
            warmup_steps=plan.warm_up_steps(steps_per_epoch),
            decay_steps=plan.decay_steps(steps_per_epoch),
            cooldown_steps=plan.cooldown_epochs * steps_per_epoch,
            drop_every=max(1, int(plan.drop_epochs * steps_per_epoch)),
            drop_factor=plan.drop_factor,
            drop_at=plan.drop_steps(steps_per_epoch),
            power=plan.power,
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Of `inline train`: classification."""

    recipe: str = "quickstart"
    model: ModelConfig = field(default_factory=ModelConfig)
    # A path must be given; the size is the model's own.
    data: DataConfig = field(default_factory=lambda: DataConfig(path="", img_size=None))
    optim: ClassifierOptimConfig = field(default_factory=ClassifierOptimConfig)


Config = TypeVar("Config", bound=LoopConfig)


_RECIPES = files("inline_attention") / "recipes"


def recipe_names(folder: str = "") -> list[str]:
    """The recipes of a task, which has a folder of its own unless it is classification."""
    return sorted(file.name.removesuffix(".yaml") for file in (_RECIPES / folder).iterdir() if file.is_file())


def describe_recipe(name: str, folder: str = "") -> str:
    """What the first line of a recipe, a comment, says about it."""
    with (_RECIPES / folder / f"{name}.yaml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def load_config(recipe: str, *, overrides: Iterable[str] = (), flags: Mapping[str, Any] | None = None) -> TrainConfig:
    """Of classification: a recipe's name (or a YAML file of the user's), then `flags` (nested), then `key=value`."""
    return load_recipe(recipe, defaults=TrainConfig(), overrides=overrides, flags=flags)


def load_recipe(
    recipe: str,
    *,
    defaults: Config,
    folder: str = "",
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """`load_config` for any task: its defaults, and the folder of its recipes."""
    if recipe.endswith((".yaml", ".yml")):
        if not Path(recipe).is_file():
            raise ValueError(f"recipe file {recipe} does not exist; --list-recipes names those of the package")
        text, name = Path(recipe).read_text(encoding="utf-8", errors="replace"), Path(recipe).stem
    else:
        names = recipe_names(folder)
        if recipe not in names:
            close = difflib.get_close_matches(recipe, names, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"unknown recipe {recipe!r}{meant} Recipes: {', '.join(names)}; or a .yaml file of your own"
            )
        text, name = (_RECIPES / folder / f"{recipe}.yaml").read_text(), recipe
    config = settings.update(dataclasses.replace(defaults, recipe=name), read_yaml(text, recipe))
    return change(config, overrides=overrides, flags=flags)


def change(config: Config, *, overrides: Iterable[str] = (), flags: Mapping[str, Any] | None = None) -> Config:
    """`config` with `flags` (nested), then `key=value` overrides; ValueError for what cannot work."""
    changed = settings.update(settings.update(config, flags or {}), settings.parse_overrides(overrides))
    changed.data.validate()
    return changed


def read_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        values = settings.parse_yaml(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name}: expected `section: {{key: value}}`, got {type(values).__name__}")
    return values
