"""Trained models of the grid as weights that come with the package."""

import os
from pathlib import Path

from inline_attention.models.pack import pack_weights
from inline_attention.study.grid import DATASETS
from inline_attention.study.measures import weights_file
from inline_attention.study.report import remake
from inline_attention.study.results import Results

# The first seed of each, whatever the others reached: nothing is chosen by the validation images.
PACKED_ROWS = {"softmax_deit_study": "softmax", "linear_deit_study": "linear", "inline_deit_study": "inline"}


def pack_models(results: Results, *, folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Writes the files, into the package unless a folder is given; ValueError where a run or weights are missing."""
    setting = results.main_setting
    if setting is None:
        raise ValueError("no setting has finished runs of InLine and of linear attention: there is nothing to pack")
    found = {name: results.find(setting, row) for name, row in PACKED_ROWS.items()}
    files = []
    for name, result in found.items():
        if result is None:
            raise ValueError(f"{setting}: there is no finished run of {PACKED_ROWS[name]} for {name}")
        if not weights_file(result.folder).exists():
            raise ValueError(f"{weights_file(result.folder)} is missing: {name} is made from it")
        data = f"{DATASETS[setting.dataset].title}; top-1 after the last epoch, of {result.images:,} validation images"
        weights, seed = weights_file(result.folder), result.run.seed
        files.append(
            pack_weights(
                weights, name=name, data=data, seed=seed, recipe=remake(result), top1=result.top1, folder=folder
            )
        )
    return files
