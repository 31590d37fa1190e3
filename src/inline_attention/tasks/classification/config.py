"""The settings of `inline train`. The defaults are those of the published DeiT and Swin runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inline_attention.data import DataConfig
from inline_attention.training.config import BackboneConfig, LoopConfig, OptimConfig, check_setting, load_recipe

RECIPES = "tasks/classification/recipes"


@dataclass(frozen=True)
class ModelConfig(BackboneConfig):
    """A registered model as a classifier."""

    reset_head: bool = False  # start with a random head, if your classes are not those of `weights`

    def __post_init__(self) -> None:
        super().__post_init__()
        elsewhere = {"num_classes": "the data's classes are counted", "in_chans": "set data.in_chans",
                     "img_size": "set data.img_size", "drop_path_rate": "set model.drop_path"}  # fmt: skip
        for name in elsewhere.keys() & self.kwargs.keys():
            raise ValueError(f"model.kwargs.{name}={self.kwargs[name]}: {elsewhere[name]} instead")


@dataclass(frozen=True)
class ClassifierOptimConfig(OptimConfig):
    """The optimizer, and the loss of a classifier."""

    label_smoothing: float = 0.1
    # bce: binary cross-entropy of each class. null: bce if images have several labels, else cross_entropy
    loss: Literal["cross_entropy", "bce"] | None = None
    class_weights: bool = False  # classes have the same weight in the loss, whatever their numbers of images

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("optim.label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 1, "a share in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The configuration of a classification run."""

    command: Literal["train"] = "train"
    recipe: str = "quickstart"
    model: ModelConfig = field(default_factory=ModelConfig)
    # No path: the user must give one. No size: the model's own.
    data: DataConfig = field(default_factory=lambda: DataConfig(path="", img_size=None))
    optim: ClassifierOptimConfig = field(default_factory=ClassifierOptimConfig)


def load_config(recipe: str, *, overrides: Iterable[str] = (), flags: Mapping[str, Any] | None = None) -> TrainConfig:
    """The configuration of a recipe (a name or a YAML file), changed by nested `flags`, then by `key=value`."""
    return load_recipe(recipe, defaults=TrainConfig(), folder=RECIPES, overrides=overrides, flags=flags)
