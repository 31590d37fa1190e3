"""The settings of `inline linearize`."""

import re
from dataclasses import dataclass, field
from typing import Literal

from inline_attention.data import DataConfig
from inline_attention.linearize.convert import parse_keep
from inline_attention.linearize.modules import LinearForm
from inline_attention.training.config import BackboneConfig, LoopConfig, check_setting

RECIPES = "tasks/linearization/recipes"
AUTOMATIC = "auto"  # with the number of softmax layers that are chosen automatically: auto:2


@dataclass(frozen=True)
class StudentConfig(BackboneConfig):
    """The teacher (a model of this library or of timm, with its weights) and the attention that replaces softmax."""

    name: str = ""  # of the teacher; not needed if its weights file names it
    weights: str | None = "pretrained"  # of the teacher: "pretrained", or a file
    attention: str = "tangent"  # or "inline", "linear", "mala"
    anchors: int = 1  # of "tangent": the number of queries around which it expands softmax
    feature_map: str | None = None  # φ of all attentions but "tangent"; null: the published one
    local_residual: bool = True
    # Names or positions of attentions that stay softmax, or auto:K
    keep_softmax: list[str] = field(default_factory=list)
    kept: list[str] | None = None  # set by the command: the names of the kept attentions
    start: str | None = None  # set by the command: the file of the previous stage

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("model.weights", self.weights, self.weights is not None, '"pretrained" or a file of the teacher')
        LinearForm.parse(self.attention, self.feature_map, self.anchors)
        if self.chooses_layers:
            if len(self.keep_softmax) > 1:
                raise ValueError(f"model.keep_softmax={self.keep_softmax}: expected names, or auto:K alone")
            parse_keep(self.keep_softmax[0])

    @property
    def chooses_layers(self) -> bool:
        return any(name.startswith(AUTOMATIC) for name in self.keep_softmax)

    @property
    def names_and_positions(self) -> list[str | int]:
        return [int(name) if re.fullmatch(r"-?\d+", name) else name for name in self.keep_softmax]


@dataclass(frozen=True)
class MatchConfig:
    """Stage 1: every linear attention learns the output of the softmax it replaces, on the teacher's inputs."""

    steps: int = 240  # updates; 0 skips this stage
    lr: float = 5e-4  # per optim.rate_batch images, as optim.lr

    def __post_init__(self) -> None:
        check_setting("match.steps", self.steps, self.steps >= 0, "0 or more")
        check_setting("match.lr", self.lr, self.lr > 0, "a positive rate")


@dataclass(frozen=True)
class DistillConfig:
    """Stage 2: the whole student learns the teacher's output."""

    enabled: bool = True  # false skips this stage
    labels: float = 0.1  # share of the loss that labels have, if the teacher has a head and the data have labels
    temperature: float = 2.0  # of the softmax of teacher and student; not used without a head

    def __post_init__(self) -> None:
        check_setting("distill.labels", self.labels, 0 <= self.labels <= 1, "a share in [0, 1]")
        check_setting("distill.temperature", self.temperature, self.temperature > 0, "a positive number")


@dataclass(frozen=True, kw_only=True)
class LinearizationConfig(LoopConfig):
    """The configuration of both stages. `optim` and `schedule` are those of stage 2."""

    command: Literal["linearize"] = "linearize"
    recipe: str = "linearize"
    model: StudentConfig = field(default_factory=StudentConfig)
    # No path: the user must give one. Size and preparation are the teacher's.
    data: DataConfig = field(default_factory=lambda: DataConfig(path="", img_size=None))
    match: MatchConfig = field(default_factory=MatchConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
