"""The settings that the models of segmentation and detection share."""

from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

from inline_attention.training.config import BackboneConfig


@dataclass(frozen=True)
class HeadedConfig(BackboneConfig):
    """A backbone under heads. `weights` may be those of a classifier, for the backbone alone, or of the same task."""

    reset_head: bool = False  # load only the backbone of `weights`, for other classes or another head
    head: str = ""  # one of the task's heads


def is_inside(name: str) -> bool:
    """Whether a relative path stays inside the folder that it is joined to, on any operating system"""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return all(path.parts and not path.anchor and ".." not in path.parts for path in paths)
