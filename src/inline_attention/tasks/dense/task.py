"""The base of segmentation and detection as tasks: building and describing a model."""

from typing import Any, ClassVar

import torch
from torch import nn

from inline_attention.data.seeding import derive_seed
from inline_attention.tasks.dense.weights import TaskModels
from inline_attention.training.optim import freeze_layers
from inline_attention.training.task import Task, TaskData, describe


class DenseTask(Task):
    """Trains a backbone under heads on images of different sizes."""

    default_recipe = None
    fixed_shapes = False

    models: ClassVar[TaskModels[Any, Any, Any]]
    data: TaskData

    @property
    def title(self) -> str:
        return self.models.title(self.config.model)

    def build_model(self) -> nn.Module:
        wanted = self.config.model
        torch.manual_seed(derive_seed("weights", self.config.seed))
        try:
            model = self.models.build(wanted, num_classes=len(self.data.class_names))
        except TypeError as error:  # an argument of the wrong type
            arguments = self.models.arguments_of(wanted)
            raise ValueError(f"model {wanted.name} cannot be built with {arguments}: {error}") from error
        if wanted.checkpointing:
            model.backbone.set_grad_checkpointing(True)
        freeze_layers(model, wanted.freeze)
        return model

    def describe(self) -> dict[str, str]:
        return describe(
            self.config,
            arguments=self.models.arguments_of(self.config.model),
            class_names=self.data.class_names,
            task=self.models.task,
            preprocessing=self.models.preparation_of(self.config.data),
        )
