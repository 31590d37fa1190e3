"""Prediction on image files: what segmentation and detection share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from inline_attention.tasks.dense.weights import DataT

FEW_IMAGES = 16  # for fewer, starting worker processes takes longer than it saves


def for_files(config: DataT, paths: Sequence[Path]) -> DataT:
    """The settings for these files. Any of them may be unreadable. A few files are read without worker processes."""
    workers = 0 if config.workers is None and len(paths) < FEW_IMAGES else config.workers
    return replace(config, max_broken=len(paths), workers=workers)


def open_output(output: Path, paths: Sequence[Path], *, endings: Sequence[str]) -> list[Path]:
    """Make the folder of the results. Returns the path of each image's results, without their endings.

    A result has the name of its image, with a number if several images share it. ValueError if a result would replace
    one of the images.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{output} is not a folder; give another one for the results (--output)") from error
    images = Counter(path.stem for path in paths)
    names = []
    taken = {name for name, times in images.items() if times == 1}
    for index, path in enumerate(paths):
        name = path.stem
        if images[name] > 1:
            name = next(numbered for n in count(index) if (numbered := f"{path.stem}-{n}") not in taken)
            taken.add(name)
        names.append(name)
    written = {(output / (name + ending)).resolve() for name in names for ending in endings}
    if replaced := [path for path in paths if path.resolve() in written]:
        raise ValueError(f"{replaced[0]} would be replaced by a result; give another folder (--output)")
    return [output / name for name in names]
