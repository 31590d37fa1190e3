"""Linearising a pretrained model by distillation: the tasks of `inline linearize`, its stages and its recipe."""

from inline_attention.tasks.linearization.comparison import Nearness, compare_outputs
from inline_attention.tasks.linearization.config import LinearizationConfig
from inline_attention.tasks.linearization.stages import LinearizationPlan, Result, plan_linearization, run_linearization
from inline_attention.tasks.linearization.task import Distillation, LabelledDistillation, LogitDistillation, Matching

__all__ = [
    "Distillation",
    "LabelledDistillation",
    "LinearizationConfig",
    "LinearizationPlan",
    "LogitDistillation",
    "Matching",
    "Nearness",
    "Result",
    "compare_outputs",
    "plan_linearization",
    "run_linearization",
]
