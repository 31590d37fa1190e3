"""The settings that all tasks share, with their types and defaults, and how recipes change them.

Each task has a subclass of `LoopConfig` with its own model and data. A recipe is a YAML file with the settings that
differ from the task's defaults.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

import timm
import timm.optim
import yaml

from inline_attention.data import LoaderConfig
from inline_attention.training import settings
from inline_attention.training.schedule import Schedule, ScheduleKind


def check_setting(setting: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{setting}={value}: expected {expected}")


# Optimizers of other packages (bitsandbytes, apex), and those that need second derivatives.
_OTHER_OPTIMIZERS = ["bnb*", "fused*", "adahessian"]


@dataclass(frozen=True)
class BackboneConfig:
    """A registered model, as a classifier or as a backbone."""

    name: str = "inline_deit_tiny"
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of create_model
    drop_path: float | None = None  # stochastic depth of the last block; null: the model's own default
    weights: str | None = None  # start from "pretrained", another model's published weights by name, or a file
    freeze: int = 0  # number of frozen layer groups: 1 is the stem, 2 the stem and the first stage (or block), …
    checkpointing: bool = False  # recompute activations in the backward pass: less memory, about a third more time

    def __post_init__(self) -> None:
        drop_path = self.drop_path
        check_setting("model.drop_path", drop_path, drop_path is None or 0 <= drop_path < 1, "a rate in [0, 1)")
        check_setting("model.freeze", self.freeze, self.freeze >= 0, "0 (nothing is frozen) or more")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer. Rates are per `rate_batch` images and grow linearly with the global batch."""

    name: str = "adamw"  # or another of timm's factory: sgd, lamb, lion, muon, adan, …
    lr: float = 5e-4
    rate_batch: int | None = 512  # null: rates are absolute and do not depend on the batch
    weight_decay: float = 0.05  # not for biases, norms and the parameters in the model's no_weight_decay()
    betas: tuple[float, ...] | None = None  # null: the optimizer's own; (0.9, 0.999) for adamw
    eps: float | None = None  # null: the optimizer's own; 1e-8 for adamw
    momentum: float = 0.9  # of optimizers that have one, such as sgd and muon
    layer_decay: float | None = None  # the rate of a layer group is this times that of the next group
    head_rate: float = 1.0  # factor of the rate of the classifier, which is new in fine-tuning
    clip_norm: float | None = 5.0
    accumulate: int = 1  # batches per update; part of the global batch

    def __post_init__(self) -> None:
        clip, decay = self.clip_norm, self.layer_decay
        known = [str(name) for name in timm.optim.list_optimizers(exclude_filters=_OTHER_OPTIMIZERS)]
        if self.name not in known:
            close = difflib.get_close_matches(self.name.lower(), known, n=1)
            meant = f"; did you mean {close[0]}?" if close else "."
            raise ValueError(f"optim.name={self.name} is not known{meant} Known: {', '.join(known)}")
        info = timm.optim.get_optimizer_info(self.name)
        count = info.num_betas if info.has_betas and self.betas is not None else 0
        betas = list(self.betas or ())
        in_range = len(betas) == count and all(0 <= beta < 1 for beta in betas)
        expected = f"{count} numbers in [0, 1), or null" if info.has_betas else f"null: {self.name} has none"
        check_setting("optim.betas", betas, in_range, expected)
        check_setting("optim.lr", self.lr, self.lr > 0, "a positive rate")
        check_setting(
            "optim.rate_batch", self.rate_batch, self.rate_batch is None or self.rate_batch >= 1, "1 or more, or null"
        )
        check_setting("optim.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        check_setting("optim.eps", self.eps, self.eps is None or self.eps > 0, "a positive number, or null")
        check_setting("optim.momentum", self.momentum, 0 <= self.momentum < 1, "a factor in [0, 1)")
        check_setting("optim.layer_decay", decay, decay is None or 0 < decay <= 1, "a factor in (0, 1], or null")
        check_setting("optim.head_rate", self.head_rate, self.head_rate > 0, "a positive factor")
        check_setting("optim.clip_norm", clip, clip is None or clip > 0, "a positive norm, or null for no clipping")
        check_setting("optim.accumulate", self.accumulate, self.accumulate >= 1, "1 or more")


@dataclass(frozen=True)
class ScheduleConfig:
    """Length and learning rates. A length in steps (updates) replaces the length in epochs."""

    kind: ScheduleKind = "cosine"
    epochs: int = 300
    steps: int | None = None
    warmup_epochs: float = 20
    warmup_steps: int | None = None
    warmup_lr: float = 5e-7
    min_lr: float = 5e-6
    cooldown_epochs: int = 0  # epochs at min_lr, after `epochs`
    power: float = 1.0  # poly schedule
    drop_epochs: float = 30  # step schedule: epochs between two drops
    drop_at: tuple[float, ...] = ()  # step schedule: drop at these epochs instead (at these updates if `steps` is set)
    drop_factor: float = 0.1  # step and plateau schedules: the rate after a drop, relative to the one before
    patience: int = 5  # plateau schedule: evaluations without a better result before a drop
    falling_share: float = 0.2  # wsd schedule: share of the run, at its end, in which the rate falls
    early_stop: int | None = None  # end the run after this many evaluations without a better result

    def __post_init__(self) -> None:
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            check_setting(f"schedule.{name}", value, value is None or value >= 1, "1 or more")
        for name in ("warmup_epochs", "warmup_steps", "warmup_lr", "min_lr", "cooldown_epochs", "power"):
            value = getattr(self, name)
            check_setting(f"schedule.{name}", value, value is None or value >= 0, "0 or more")
        if self.steps is None and self.warmup_steps is None and self.warmup_epochs > self.epochs:
            raise ValueError(
                f"schedule.warmup_epochs={self.warmup_epochs:g} exceeds schedule.epochs={self.epochs}; "
                "shorten the warm-up, or train longer"
            )
        check_setting("schedule.drop_epochs", self.drop_epochs, self.drop_epochs > 0, "a positive number")
        check_setting(
            "schedule.drop_at", list(self.drop_at), [*self.drop_at] == sorted(self.drop_at), "ascending numbers"
        )
        check_setting("schedule.drop_factor", self.drop_factor, 0 < self.drop_factor <= 1, "a factor in (0, 1]")
        check_setting("schedule.patience", self.patience, self.patience >= 1, "1 or more")
        check_setting("schedule.falling_share", self.falling_share, 0 <= self.falling_share <= 1, "a share in [0, 1]")
        stop = self.early_stop
        check_setting("schedule.early_stop", stop, stop is None or stop >= 1, "1 or more, or null")

    def decay_steps(self, steps_per_epoch: int) -> int:
        """Updates before the cool-down."""
        return self.epochs * steps_per_epoch if self.steps is None else self.steps

    def warm_up_steps(self, steps_per_epoch: int) -> int:
        length = self.decay_steps(steps_per_epoch)
        steps = int(self.warmup_epochs * steps_per_epoch) if self.warmup_steps is None else self.warmup_steps
        if steps > length:
            raise ValueError(
                f"the warm-up has {steps} updates and the run {length}; lower schedule.warmup_steps or "
                "schedule.warmup_epochs"
            )
        return steps

    def drop_steps(self, steps_per_epoch: int) -> tuple[int, ...]:
        unit = steps_per_epoch if self.steps is None else 1
        return tuple(int(drop * unit) for drop in self.drop_at)


@dataclass(frozen=True)
class EmaConfig:
    """A moving average of the weights, evaluated in addition. `decay` is per `batch` images, as published."""

    decay: float | None = None
    batch: int | None = 4096  # null: decay is per update
    warmup: bool = False  # a lower decay in the first updates, for short runs: 1 − (updates + 1)^(−2/3), as in timm

    def __post_init__(self) -> None:
        check_setting("ema.decay", self.decay, self.decay is None or 0 <= self.decay < 1, "a factor in [0, 1), or null")
        check_setting("ema.batch", self.batch, self.batch is None or self.batch >= 1, "1 or more, or null")
        check_setting("ema.warmup", self.warmup, not self.warmup or self.decay is not None, "false without ema.decay")

    def decay_per_step(self, global_batch: int) -> float | None:
        if self.decay is None or self.batch is None:
            return self.decay
        return self.decay ** (global_batch / self.batch)


@dataclass(frozen=True)
class RunConfig:
    """How updates are computed."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 on a GPU that has it, else fp32
    compile: bool = (
        False  # compile the model at the first step (`inline_attention.optimize`), on one GPU with CUDA graphs
    )
    channels_last: bool = False  # memory layout of images and convolutions: faster for models with many convolutions
    strategy: Literal["ddp", "fsdp"] = "ddp"  # with more than one rank
    on_nan: Literal["stop", "skip"] = "stop"  # an update with a non-finite gradient is never applied


@dataclass(frozen=True)
class CheckpointConfig:
    """How often checkpoints are written, and how many are kept."""

    every_epochs: int = 1
    every_steps: int | None = None  # also inside an epoch
    keep: int = 2  # checkpoints kept; the best weights are kept in addition

    def __post_init__(self) -> None:
        for name in ("every_epochs", "every_steps", "keep"):
            value = getattr(self, name)
            check_setting(f"checkpoint.{name}", value, value is None or value >= 1, "1 or more")


@dataclass(frozen=True)
class LogConfig:
    """How often a run logs and evaluates, and where its figures go."""

    every_steps: int = 50  # updates between two log lines
    eval_epochs: int = 1  # epochs between two evaluations; the last epoch is always evaluated
    tensorboard: bool = True
    wandb: str | None = None  # project name

    def __post_init__(self) -> None:
        for name in ("every_steps", "eval_epochs"):
            value = getattr(self, name)
            check_setting(f"log.{name}", value, value >= 1, "1 or more")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The settings of the loop. The configuration of a task derives from it, with its own model, data and defaults."""

    command: str = ""  # of `inline`, whose run this is; each task has one value
    recipe: str = ""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    from_data: tuple[str, ...] = ()  # settings to choose from the data, by name; one that you set is kept
    deterministic: bool = False  # only deterministic algorithms; some are slower
    model: BackboneConfig
    data: LoaderConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_setting("seed", self.seed, 0 <= self.seed < 2**63, "a number from 0 to 2^63 - 1")
        if self.run.strategy == "fsdp" and self.optim.name != "adamw":
            raise ValueError(f"run.strategy=fsdp shards adamw only, not optim.name={self.optim.name}: use ddp")
        if self.run.strategy == "fsdp" and self.run.channels_last:
            raise ValueError("run.channels_last=true: run.strategy=fsdp cannot shard this layout: use ddp")

    def global_batch(self, world_size: int) -> int:
        """Images per update."""
        return self.data.batch_size * self.optim.accumulate * world_size

    def build_schedule(self, *, steps_per_epoch: int, world_size: int) -> Schedule:
        """The schedule in updates. Rates are scaled to the global batch unless they are absolute."""
        plan, rate_batch = self.schedule, self.optim.rate_batch
        if plan.min_lr > self.optim.lr:
            raise ValueError(
                f"schedule.min_lr={plan.min_lr:g} exceeds optim.lr={self.optim.lr:g}, so the rate would rise; lower "
                "schedule.min_lr"
            )
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
            falling_steps=round(plan.falling_share * plan.decay_steps(steps_per_epoch)),
        )


Config = TypeVar("Config", bound=LoopConfig)


_PACKAGE = files("inline_attention")


def recipe_names(folder: str) -> list[str]:
    """The recipes in a folder of the package: `Task.recipes`."""
    return sorted(file.name.removesuffix(".yaml") for file in (_PACKAGE / folder).iterdir() if file.is_file())


def describe_recipe(name: str, folder: str) -> str:
    """The first line of a recipe, a comment about the model and its data."""
    with (_PACKAGE / folder / f"{name}.yaml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def load_recipe(
    recipe: str,
    *,
    defaults: Config,
    folder: str,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of a recipe: its name in `folder`, or a YAML file of the user's.

    Later sources override earlier ones: `defaults`, the recipe, `flags` (nested), `overrides` (`key=value`).
    """
    if recipe.endswith((".yaml", ".yml")):
        if not Path(recipe).is_file():
            raise ValueError(
                f"recipe file {recipe} does not exist; give the path of a YAML file or the name of a recipe"
            )
        text, name = Path(recipe).read_text(encoding="utf-8", errors="replace"), Path(recipe).stem
    else:
        names = recipe_names(folder)
        if recipe not in names:
            close = difflib.get_close_matches(recipe, names, n=1)
            meant = f"; did you mean {close[0]}?" if close else "."
            if "finetune" in names and timm.is_model(recipe):
                meant = f"; `finetune model.name={recipe}` trains this model."
            raise ValueError(
                f"unknown recipe {recipe!r}{meant} Recipes: {', '.join(names)}; or a .yaml file of your own"
            )
        text, name = (_PACKAGE / folder / f"{recipe}.yaml").read_text(), recipe
    values = read_yaml(text, recipe)
    check_command(values, defaults, recipe)
    config = settings.update(dataclasses.replace(defaults, recipe=name), values)
    return change(config, overrides=overrides, flags=flags)


def change(config: Config, *, overrides: Iterable[str] = (), flags: Mapping[str, Any] | None = None) -> Config:
    """`config` changed by `flags` (nested), then by `key=value` overrides. Raises ValueError for an invalid value.

    A setting that is changed here is no longer chosen from the data.
    """
    layers = (flags or {}, settings.parse_overrides(overrides))
    changed = settings.update(settings.update(config, layers[0]), layers[1])
    given = {name for values in layers for name in settings.dotted(values)}
    changed = dataclasses.replace(changed, from_data=tuple(n for n in changed.from_data if n not in given))
    changed.data.validate()
    return changed


def check_command(values: Mapping[str, Any], config: LoopConfig, name: str) -> None:
    """ValueError if the settings in a file say that they are of another command than those of `config`."""
    command = values.get("command", config.command)  # older runs do not say it
    if command != config.command:
        raise ValueError(f"{name} is of `inline {command}`, not of `inline {config.command}`: use it with that command")


def read_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        values = settings.parse_yaml(text) or {}
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name}: expected `section: {{key: value}}`, got {type(values).__name__}")
    return values
