"""The training engine: `train(plan_run(recipe, task=…))`. The tasks are in `inline_attention.tasks`."""

from inline_attention.training.config import (
    BackboneConfig,
    CheckpointConfig,
    EmaConfig,
    LogConfig,
    LoopConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
)
from inline_attention.training.loop import NonFiniteLoss, Outcome, train
from inline_attention.training.run_folder import Plan, plan_run
from inline_attention.training.task import Evaluation, Headline, Task

__all__ = [
    "train",
    "plan_run",
    "Plan",
    "Outcome",
    "NonFiniteLoss",
    "Task",
    "Evaluation",
    "Headline",
    "LoopConfig",
    "BackboneConfig",
    "OptimConfig",
    "ScheduleConfig",
    "EmaConfig",
    "RunConfig",
    "CheckpointConfig",
    "LogConfig",
]
