"""What the models of segmentation and detection can both be told."""

from dataclasses import dataclass

from inline_attention.training.config import BackboneConfig


@dataclass(frozen=True)
class HeadedConfig(BackboneConfig):
    """A backbone under heads. `weights` may be a classifier's, for the backbone alone, or those of the same task."""

    reset_head: bool = False  # of a task's weights, load the backbone alone: for other classes or another head
