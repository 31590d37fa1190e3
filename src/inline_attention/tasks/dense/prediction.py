"""Prediction on image files: what segmentation and detection share."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inline_attention.tasks.dense.weights import DataT

FEW_IMAGES = 16  # for fewer, starting worker processes takes longer than it saves


def for_files(config: DataT, paths: Sequence[Path]) -> DataT:
    """The settings for these files. Any of them may be unreadable. A few files are read without worker processes."""
    workers = 0 if config.workers is None and len(paths) < FEW_IMAGES else config.workers
    return replace(config, max_broken=len(paths), workers=workers)


def output_name(paths: Sequence[Path], index: int) -> str:
    """The name of a result without its suffix: that of the image, with a number if several images share it."""
    name = paths[index].stem
    return name if sum(path.stem == name for path in paths) == 1 else f"{name}-{index}"
