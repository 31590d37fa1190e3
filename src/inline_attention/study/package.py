"""Trained models of the grid as weights that come with the package."""

import os
from pathlib import Path

from inline_attention.models.pack import pack_weights
from inline_attention.study.grid import DATASETS
from inline_attention.study.measures import weights_file
from inline_attention.study.report import remake
from inline_attention.study.results import Results, Setting

PACKED_ROWS = {"softmax_deit_study": "softmax", "linear_deit_study": "linear", "inline_deit_study": "inline"}


def packed_setting(results: Results) -> Setting:
    """The longest training of all three rows on the main setting's data and tokens, whatever was reached in it.

    ValueError where there is none.
    """
    main = results.main_setting
    if main is None:
        raise ValueError("no setting has finished runs of InLine and of linear attention: there is nothing to pack")
    alike = [s for s in results.settings if s[:2] == main[:2]]
    whole = [s for s in alike if set(PACKED_ROWS.values()) <= results.rows(s).keys()]
    if not whole:
        title, rows = DATASETS[main.dataset].title, ", ".join(PACKED_ROWS.values())
        raise ValueError(f"{title}, {main.tokens} tokens: no length has finished runs of all of {rows}; train the rest")
    return max(whole, key=lambda s: s.epochs)


def pack_models(results: Results, *, folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Writes the files, into the package unless a folder is given; ValueError where a run or weights are missing."""
    setting = packed_setting(results)
    files = []
    for name, row in PACKED_ROWS.items():
        # The first seed, whatever the others reached: nothing is chosen by the validation images.
        result = results.find(setting, row)
        assert result is not None
        weights = weights_file(result.folder)
        if not weights.exists():
            raise ValueError(f"{weights} is missing: {name} is made from it")
        data = f"{DATASETS[setting.dataset].title}; top-1 after the last epoch, of {result.images:,} validation images"
        seed, recipe, top1 = result.run.seed, remake(result), result.top1
        files.append(pack_weights(weights, name=name, data=data, seed=seed, recipe=recipe, top1=top1, folder=folder))
    return files
