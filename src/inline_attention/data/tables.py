"""Folders without splits: a table says which label and which split each image has.

The table is a CSV file with the columns `file` (relative to the folder), `label` and, optionally, `split`. A folder may
bring one as labels.csv. Without a column `split`, or for a folder of classes, the splits are made here: by class, and
as a function of the seed and the names of the files.
"""

import csv
import io
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
from timm.utils.misc import natural_key

from inline_attention.data.config import DataConfig
from inline_attention.data.seeding import derive_seed
from inline_attention.data.sources import (
    IMAGE_EXTENSIONS,
    FolderSource,
    PathSource,
    find_files,
    list_some,
    utf8_name,
)

LABELS = "labels.csv"  # the table that a folder may contain
SPLIT = "split.csv"  # the table that a run writes
WHOLE = "all"  # name of the split that holds every image of the table
_COLUMNS = ("file", "label", "split")
# Folders with these names are splits, not classes, even if the settings name other splits.
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageTable:
    """The images of a folder. The three lists have one entry per image."""

    files: Sequence[str]  # relative to the folder, with forward slashes
    labels: Sequence[str]
    splits: Sequence[str]  # empty strings: not divided yet
    origin: str  # where it comes from, for messages

    @property
    def is_divided(self) -> bool:
        return any(self.splits)

    def to_csv(self) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(zip(self.files, self.labels, self.splits, strict=True))
        return text.getvalue().encode("utf-8", "surrogateescape")


class TableSource(PathSource):
    """The images of one split of a table, or all of them (`WHOLE`). Classes are those of the whole table."""

    named = True

    def __init__(self, root: Path, table: ImageTable, split: str) -> None:
        if not table.is_divided and split != WHOLE:
            raise ValueError(
                f"{table.origin} has no splits: name the table of a run that made them (--split-file RUN/{SPLIT}, "
                f"data.split_file), or take all images (--split {WHOLE})"
            )
        rows = [row for row, own in enumerate(table.splits) if split in (own, WHOLE)]
        if not rows:
            there = ", ".join(sorted(set(table.splits) - {""}))
            raise ValueError(f"no images of split {split!r} in {table.origin}; there is {there}")
        self.class_names = sorted(set(table.labels), key=natural_key)
        position = {name: label for label, name in enumerate(self.class_names)}
        super().__init__(root, (table.files[row] for row in rows))
        self.labels = np.array([position[table.labels[row]] for row in rows])


def has_splits(config: DataConfig) -> bool:
    """True if the data have splits of their own, or are not a folder."""
    root = Path(config.path)
    if config.path == "digits" or not root.is_dir():
        return True
    names = {config.train_split, config.val_split, *_SPLIT_NAMES}
    return any((root / f"{name}{ending}").exists() for name in names for ending in ("", ".zip", ".tar"))


def with_split_of(run: Path | None, config: DataConfig) -> DataConfig:
    """`config` with the table that `run` wrote, if the data need a table and `config` names none."""
    if run is None or config.split_file is not None or not (run / SPLIT).is_file() or has_splits(config):
        return config
    return replace(config, split_file=str(run / SPLIT))


def open_table(config: DataConfig) -> ImageTable | None:
    """The table of a folder: `data.split_file`, its labels.csv, or its class folders. None: it has its own splits."""
    if not config.labels:
        return None
    root = Path(config.path)
    if config.split_file is not None and root.is_dir():
        table = read_table(Path(config.split_file), root)
        known = {root / file for file in table.files}
        others = [path for path in map(Path, find_files(root, IMAGE_EXTENSIONS)) if path not in known]
        if others:
            some = list_some([utf8_name(path.relative_to(root)) for path in others])
            _logger.warning("%d images are not in %s and are left out: %s", len(others), table.origin, some)
        return table
    if has_splits(config):
        return None
    if (root / LABELS).is_file():
        return read_table(root / LABELS, root)
    if sum(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(root)) < 2:
        raise ValueError(
            f"no classes in {config.path!r}: looked for the splits {config.train_split!r} and {config.val_split!r} "
            f"(folders, .zip or .tar), for {LABELS}, and for two or more folders, each with the images of a class"
        )
    folder = FolderSource(root)
    files = [Path(folder.path(index)).relative_to(root).as_posix() for index in range(len(folder))]
    labels = [folder.class_names[label] for label in folder.labels]
    return ImageTable(files, labels, [""] * len(files), origin=f"folder {config.path!r}")


def read_table(path: Path, root: Path) -> ImageTable:
    """Read a table of images below `root`. Raises ValueError with the number of the wrong line."""
    where = repr(str(path))
    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (OSError, csv.Error) as error:
        raise ValueError(f"table {where} cannot be read: {error}") from error
    header = tuple(name.strip().lower() for name in rows[0]) if rows else ()
    if header not in (_COLUMNS[:2], _COLUMNS):
        raise ValueError(
            f"{where} begins with {','.join(header)!r}; expected the columns file,label or file,label,split"
        )
    lines = [(number, row) for number, row in enumerate(rows[1:], start=2) if any(row)]
    seen: set[str] = set()
    for number, row in lines:
        if len(row) != len(header) or not all(cell.strip() for cell in row):
            raise ValueError(f"{where} line {number} is {','.join(row)!r}; expected {','.join(header)}")
        inside = PurePosixPath(row[0])
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"{where} line {number} names {row[0]!r}; expected a file below {str(root)!r}")
        if row[0] in seen:
            raise ValueError(f"{where} line {number} names {row[0]!r} a second time; list each image once")
        seen.add(row[0])
    missing = [file for _, (file, *_) in lines if not (root / file).is_file()]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(lines)} images in {where} are not in {str(root)!r}: {list_some(missing)}"
        )
    if not lines:
        raise ValueError(f"no images in {where}: the table is empty")
    cells = [row for _, row in lines]
    splits = [row[2] if len(row) == 3 else "" for row in cells]
    return ImageTable([row[0] for row in cells], [row[1] for row in cells], splits, origin=where)


def divide(table: ImageTable, *, config: DataConfig, seed: int) -> ImageTable:
    """Give `config.val_share` of each class, at least one image, to the validation split.

    The choice depends only on the seed and the file names. Adding images later therefore moves few of the others to
    another split.
    """
    classes: dict[str, list[int]] = {}
    for row, label in enumerate(table.labels):
        classes.setdefault(label, []).append(row)
    single = [label for label, rows in classes.items() if len(rows) == 1]
    if single:
        raise ValueError(
            f"{len(single)} class(es) with one image in {table.origin}: {list_some(single)}; a training and a "
            "validation split need two images of each class"
        )
    splits = [config.train_split] * len(table.files)
    for rows in classes.values():
        rows.sort(key=lambda row: derive_seed(f"split {utf8_name(table.files[row])}", seed))
        for row in rows[: max(1, round(config.val_share * len(rows)))]:
            splits[row] = config.val_split
    return replace(table, splits=splits)
