"""Folders without splits: a table says which label and which split each image has.

The table is a CSV file with the columns `file` (relative to the folder), `label` and, optionally, `split`. A folder may
bring one as labels.csv. Without a column `split`, or for a folder of classes, the splits are made here: by class, and
as a function of the seed and the names of the files.

If the second column is called `labels`, an image may have several, separated by | or ;, or none.
"""

import csv
import io
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from inline_attention.data.config import DataConfig
from inline_attention.data.seeding import derive_seed
from inline_attention.data.sources import (
    IMAGE_EXTENSIONS,
    FolderSource,
    PathSource,
    class_order,
    find_files,
    is_folder,
    is_hidden,
    list_some,
    utf8_name,
)

LABELS = "labels.csv"  # the table that a folder may contain
SPLIT = "split.csv"  # the table that a run writes
WHOLE = "all"  # name of the split that holds every image of the table
SEPARATOR = "|"
_COLUMNS = ("file", "label", "split")
_SEVERAL = ("file", "labels", "split")
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
    multi_label: bool = False  # the labels of an image are joined by SEPARATOR; an empty string: it has none

    @property
    def is_divided(self) -> bool:
        return any(self.splits)

    def to_csv(self) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_SEVERAL if self.multi_label else _COLUMNS)
        writer.writerows(zip(self.files, self.labels, self.splits, strict=True))
        return text.getvalue().encode("utf-8", "surrogateescape")

    def label_sets(self) -> list[list[str]]:
        """The labels of each image"""
        if not self.multi_label:
            return [[label] for label in self.labels]
        return [label.split(SEPARATOR) if label else [] for label in self.labels]


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
            there = ", ".join(map(repr, sorted(set(table.splits) - {""})))
            raise ValueError(f"no images of split {split!r} in {table.origin}; there is {there}")
        label_sets = table.label_sets()
        self.class_names = sorted(set().union(*label_sets), key=class_order)
        position = {name: label for label, name in enumerate(self.class_names)}
        super().__init__(root, (table.files[row] for row in rows))
        if table.multi_label:
            self.labels = np.zeros((len(rows), len(position)), dtype=bool)
            for image, row in enumerate(rows):
                self.labels[image, [position[name] for name in label_sets[row]]] = True
        else:
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
    if sum(is_folder(entry) and not is_hidden(entry.name) for entry in os.scandir(root)) < 2:
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
        padded = ", " in text.partition("\n")[0]  # written with spaces after the commas, which belong to no name
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=padded))
    except (OSError, csv.Error) as error:
        described = error.strerror if isinstance(error, OSError) else f"{error}; check its quotes"
        raise ValueError(f"table {where} cannot be read ({described})") from error
    header = tuple(name.strip().lower() for name in rows[0]) if rows else ()
    if header not in (_COLUMNS[:2], _COLUMNS, _SEVERAL[:2], _SEVERAL):
        raise ValueError(
            f"{where} begins with {','.join(header)!r}; expected the columns file,label or file,label,split; "
            "if an image has several labels, file,labels or file,labels,split"
        )
    lines = [(number, row) for number, row in enumerate(rows[1:], start=2) if any(row)]
    for number, row in lines:
        filled = [bool(cell.strip()) for cell in row]
        if header[1] == "labels" and len(row) > 1:
            filled[1] = True  # an image without a label
        if len(row) != len(header) or not all(filled):
            raise ValueError(f"{where} line {number} is {','.join(row)!r}; expected {','.join(header)}")
        inside = PurePosixPath(row[0])
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"{where} line {number} names {row[0]!r}; expected a file below {str(root)!r}")
        row[0] = str(inside)  # ./a.png and a.png are one image
    table = (_several_labels if header[1] == "labels" else _one_label)(lines, where)
    missing = [file for file in table.files if not (root / file).is_file()]
    if missing:
        elsewhere = f" (for other data than the table's: --split {WHOLE} evaluates on all images)"
        raise ValueError(
            f"{len(missing)} of the {len(table.files)} images in {where} are not in {str(root)!r}: "
            f"{list_some(missing)}; add these files, or remove their lines{'' if path.parent == root else elsewhere}"
        )
    if not lines:
        raise ValueError(f"no images in {where}: the table is empty")
    return table


def _one_label(lines: list[tuple[int, list[str]]], where: str) -> ImageTable:
    hint = "if an image has several labels, call the column labels"
    seen: set[str] = set()
    for number, (file, *_) in lines:
        if file in seen:
            raise ValueError(f"{where} line {number} names {file!r} a second time; list each image once ({hint})")
        seen.add(file)
    known = {row[1] for _, row in lines}
    for number, (_, label, *_) in lines:
        if label != label.strip() and label.strip() in known:
            raise ValueError(f"{where} line {number} has the label {label!r}; another line has it without the spaces")
        parts = _split_labels(label)
        if len(parts) > 1 and known.issuperset(parts):
            raise ValueError(f"{where} line {number} has the label {label!r}, and its parts are labels too; {hint}")
    splits = [row[2] if len(row) == 3 else "" for _, row in lines]
    return ImageTable([row[0] for _, row in lines], [row[1] for _, row in lines], splits, origin=where)


def _several_labels(lines: list[tuple[int, list[str]]], where: str) -> ImageTable:
    """A file may have several lines, whose labels are united."""
    labels: dict[str, dict[str, None]] = {}  # by file; a dictionary keeps the order
    splits: dict[str, str] = {}
    for number, (file, names, *split) in lines:
        labels.setdefault(file, {}).update(dict.fromkeys(_split_labels(names)))
        if splits.setdefault(file, "".join(split)) != "".join(split):
            raise ValueError(f"{where} line {number} gives {file!r} a second split; an image belongs to one")
    known = set().union(*labels.values())
    if lines and not known:
        raise ValueError(f"no image in {where} has a label")
    for number, (_, names, *_) in lines:
        for name in _split_labels(names):
            for separator in (" ", ","):
                parts = [part.strip() for part in name.split(separator)]
                if len(parts) > 1 and known.issuperset(parts):
                    raise ValueError(
                        f"{where} line {number} has the label {name!r}, and its parts are labels too; separate labels "
                        f"by {SEPARATOR}: {SEPARATOR.join(parts)}"
                    )
    joined = [SEPARATOR.join(names) for names in labels.values()]
    return ImageTable(list(labels), joined, list(splits.values()), origin=where, multi_label=True)


def _split_labels(cell: str) -> list[str]:
    return [name for part in re.split("[|;]", cell) if (name := part.strip())]


def divide(table: ImageTable, *, config: DataConfig, seed: int) -> ImageTable:
    """Give `config.val_share` of each class, at least one image, to the validation split.

    The choice depends only on the seed and the file names. Adding images later therefore moves few of the others to
    another split. An image with several labels is placed by the rarest of them. A label with two images or more then
    has one in training and, unless another label prevents it, one in validation.
    """
    classes: dict[str, list[int]] = {}
    for row, labels in enumerate(table.label_sets()):
        for label in labels or [""]:
            classes.setdefault(label, []).append(row)
    single = [label for label, rows in classes.items() if len(rows) == 1]
    if single and not table.multi_label:
        raise ValueError(
            f"{len(single)} class(es) with one image in {table.origin}: {list_some(single)}; a training and a "
            "validation split need two images of each class"
        )
    splits: dict[int, str] = {}
    for rows in sorted(classes.values(), key=len):
        rows.sort(key=lambda row: derive_seed(f"split {utf8_name(table.files[row])}", seed))
        wanted = max(1, round(config.val_share * len(rows))) if len(rows) > 1 else 0
        wanted -= sum(splits.get(row) == config.val_split for row in rows)
        for place, row in enumerate([row for row in rows if row not in splits]):
            splits[row] = config.val_split if place < wanted else config.train_split
    for split in (config.val_split, config.train_split):  # training last: a label must have a training image
        for rows in classes.values():
            if len(rows) > 1 and all(splits[row] != split for row in rows):
                splits[rows[0]] = split
    return replace(table, splits=[splits[row] for row in range(len(table.files))])
