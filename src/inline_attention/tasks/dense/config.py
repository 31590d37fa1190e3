"""The settings that segmentation and detection share."""

from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

from inline_attention.data import LoaderConfig
from inline_attention.training.config import BackboneConfig


@dataclass(frozen=True)
class HeadedConfig(BackboneConfig):
    """A backbone under heads.

    `weights` are those of a classifier, for its backbone, or of a model of the same task. With `reset_head`, a detector
    may also start from a segmenter, and the reverse.
    """

    reset_head: bool = False  # from `weights`, load only the backbone: for other classes or another head
    head: str = ""  # one of the task's heads


@dataclass
class DenseDataConfig(LoaderConfig):
    """Images of different sizes, in one folder for each split."""

    def validate(self) -> None:
        super().validate()
        for name in ("train_split", "val_split"):
            self.check(name, is_inside(getattr(self, name)), "the name of a folder inside data.path")


def is_inside(name: str) -> bool:
    """Whether a relative path stays inside the folder that it is joined to, on any operating system"""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return all(path.parts and not path.anchor and ".." not in path.parts for path in paths)
