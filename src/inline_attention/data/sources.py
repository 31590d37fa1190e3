"""Sources give random access to encoded images and their labels, before decoding.

A source knows its class names. It checks the data when it is opened, so that errors are raised before a run starts.
Archives are in `archives`. Streams (WebDataset, TensorFlow datasets) have no random access; see `streams`.
"""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from inline_attention.data.config import MAX_CLASSES, DataConfig
from inline_attention.data.decode import open_file

IMAGE_EXTENSIONS = (*IMG_EXTENSIONS, ".gif")

_logger = logging.getLogger(__name__)


Label = int | np.ndarray  # a class, or (classes,) bool: which of them an image has


class Source(Protocol):
    """Random access to images. `named` is False if the class names are only the labels' numbers."""

    class_names: list[str]
    named: bool
    labels: np.ndarray  # (images,) int64, or (images, classes) bool if an image may have several labels

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[BinaryIO | Image.Image, Label]:
        """The encoded (or already decoded) image and its label."""

    def path(self, index: int) -> str:
        """The name of the image in messages."""


def natural_key(name: str) -> list[str | int]:
    """The key of timm's natural order: 2 before 10. timm's own function fails for a name such as "10²"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower())]


def is_hidden(name: str) -> bool:
    """True for names that begin with a dot, and for the folder that macOS adds to archives"""
    return name.startswith(".") or name == "__MACOSX"


def class_order(name: str) -> tuple[list[int | str], str]:
    """Sorts names naturally, as timm does. That leaves open whether 1 or 01, a or A comes first."""
    return natural_key(name), name


def is_folder(entry: os.DirEntry[str]) -> bool:
    """False for a link to itself, for which `entry.is_dir` raises an error."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def find_files(folder: str | Path, extensions: Iterable[str]) -> list[str]:
    """The files with these extensions at any depth below a folder, sorted by folder and name. Hidden ones are left out.

    Links are followed. A link to a folder that was searched already is logged and skipped, because a link to a parent
    folder would make the search endless.
    """
    endings = tuple(extensions)
    visited: set[tuple[int, int]] = set()
    found: list[tuple[str, list[str]]] = []
    waiting = [os.fspath(folder)]
    while waiting:
        current = waiting.pop()
        status = os.stat(current)
        if (status.st_dev, status.st_ino) in visited:
            _logger.warning("skipping %s: it links to a folder that was searched already", utf8_name(current))
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(current) as entries:
            ordered = sorted((e for e in entries if not is_hidden(e.name)), key=lambda entry: entry.name)
        files = [entry.name for entry in ordered if entry.name.lower().endswith(endings) and not is_folder(entry)]
        found.append((current, files))
        waiting.extend(entry.path for entry in reversed(ordered) if is_folder(entry))
    return [os.path.join(parent, name) for parent, names in sorted(found) for name in names]


def find_images(names: Iterable[str | Path]) -> list[Path]:
    """The named files, and the images below the named folders, in order."""
    paths: list[Path] = []
    for given in names:
        name = Path(given)
        if name.is_dir():
            below = sorted(map(Path, find_files(name, IMAGE_EXTENSIONS)))
            if not below:
                raise ValueError(f"no images in folder {str(name)!r}; known: {', '.join(IMAGE_EXTENSIONS)}")
            paths.extend(below)
        elif name.is_file():
            paths.append(name)
        elif "://" in str(given):
            raise ValueError(f"{given} is an address; expected a file or a folder: download the image first")
        else:
            raise ValueError(f"image {str(name)!r} does not exist or is not a regular file")
    return paths


def utf8_name(path: str | Path) -> str:
    """A file name that can be encoded as UTF-8: other bytes are written as escapes."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode()


class PackedStrings(Sequence[str]):
    """Many strings in two arrays, which stay shared among worker processes.

    A list would be copied into every worker, because reference counts change the memory of its objects.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [os.fsencode(string) for string in strings]
        self._ends = np.cumsum([0, *map(len, encoded)])
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # slices are not needed
        return os.fsdecode(self._bytes[self._ends[index] : self._ends[index + 1]].tobytes())


class PathSource:
    """Image files, by their paths below a folder. A subclass knows their labels."""

    class_names: list[str]
    labels: np.ndarray

    def __init__(self, root: str | Path, paths: Iterable[str]) -> None:
        self._root = root
        self._paths = PackedStrings(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> tuple[BinaryIO, Label]:
        return open_file(self.path(index)), label_at(self.labels, index)

    def path(self, index: int) -> str:
        return os.path.join(self._root, self._paths[index])


class FolderSource(PathSource):
    """ImageNet layout: one folder per class, with images at any depth. Classes are in timm's natural order."""

    named = True

    def __init__(self, folder: Path) -> None:
        names = sorted(
            (entry.name for entry in os.scandir(folder) if is_folder(entry) and not is_hidden(entry.name)),
            key=class_order,
        )
        self.class_names = [utf8_name(name) for name in names]
        if not names:
            raise ValueError(f"no images in {str(folder)!r}: expected one folder per class with images in it")
        # Sample numbers follow the plain order of the names. Every random draw depends on them.
        labels = sorted(range(len(names)), key=names.__getitem__)
        found = [find_files(folder / names[label], IMAGE_EXTENSIONS) for label in labels]
        self.labels = np.repeat(labels, [len(paths) for paths in found])
        if len(self.labels) == 0:
            raise ValueError(f"no images in the class folders of {str(folder)!r}; known: {', '.join(IMAGE_EXTENSIONS)}")
        check_every_class_has_images(self.labels, self.class_names, where=f"folder {str(folder)!r}")
        start = len(os.path.join(folder, ""))
        super().__init__(folder, (path[start:] for paths in found for path in paths))


class FilesSource(PathSource):
    """A list of image files without labels."""

    named = False

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__("", map(str, paths))
        self.class_names = []
        self.labels = np.zeros(len(self), dtype=np.int64)


class HuggingFaceSource:
    """A Hugging Face data set, by its name on the hub or as a local folder, through timm's reader."""

    def __init__(self, name: str, split: str, *, config: DataConfig) -> None:
        if find_spec("datasets") is None:
            raise ImportError(f"data path 'hfds/{name}' needs the package `datasets`: pip install datasets")
        # timm's create_reader would turn the name, which may be a path, to lower case.
        from timm.data.readers.reader_hfds import ReaderHfds

        image_key, label_key = config.input_key or "image", config.target_key or "label"
        try:
            self._reader = ReaderHfds(name, split=split, input_key=image_key, target_key=label_key)
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"split {split!r} of 'hfds/{name}' cannot be read ({error}); the image column is {image_key!r} "
                f"(data.input_key), the label column {label_key!r} (data.target_key)"
            ) from error
        if len(self._reader) == 0:
            raise ValueError(f"no images in split {split!r} of 'hfds/{name}'")
        first = self._reader.dataset[0]
        for key, option in ((image_key, "input_key"), (label_key, "target_key")):
            if first.get(key) is None:  # timm's reader adds an empty column if there is no such image column
                columns = ", ".join(column for column, value in first.items() if value is not None)
                raise ValueError(f"no column {key!r} in 'hfds/{name}' (data.{option}); there is {columns}")
        names = getattr(self._reader.dataset.features[label_key], "names", None)  # timm reads those of "label" only
        values = list(self._reader.dataset[label_key])
        if wrong := [value for value in values if not isinstance(value, int)]:
            raise ValueError(
                f"column {label_key!r} of 'hfds/{name}' (data.target_key) has {wrong[0]!r}; expected a class number in "
                "each row"
            )
        self.labels = labels = np.array(values)
        self.named = names is not None
        if not self.named and labels.max() >= MAX_CLASSES:
            raise ValueError(f"label {labels.max()} in 'hfds/{name}' is out of range; expected 0 to {MAX_CLASSES - 1}")
        self.class_names = names or [str(i) for i in range(config.num_classes or int(labels.max()) + 1)]
        count = len(self.class_names)
        if labels.min() < 0 or labels.max() >= count:
            raise ValueError(
                f"labels of split {split!r} of 'hfds/{name}' run from {labels.min()} to {labels.max()}; "
                f"expected 0 to {count - 1} (a split without public labels cannot be used)"
            )
        self._name = f"hfds/{name}[{split}]"

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, index: int) -> tuple[BinaryIO, int]:
        file, label = self._reader[index]
        return file, int(label)

    def path(self, index: int) -> str:
        return f"{self._name}:{index}"


class DigitsSource:
    """scikit-learn's 1,797 handwritten digits, 8×8 greyscale. A quarter of them is the split "val".

    The split is stratified by class and the same for every seed.
    """

    named = True

    def __init__(self, split: str) -> None:
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ImportError as error:
            raise ImportError(
                "the embedded data set needs scikit-learn: pip install 'inline-attention[train]'"
            ) from error
        if split not in ("train", "val"):
            raise ValueError(f"no split {split!r} in 'digits'; there is train, val")
        digits = load_digits()
        pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
        parts = train_test_split(np.arange(len(pixels)), test_size=0.25, stratify=digits.target, random_state=0)
        self._rows = parts[0] if split == "train" else parts[1]
        self._pixels, self.labels = pixels[self._rows], digits.target[self._rows]
        self.class_names = [str(name) for name in digits.target_names]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self._pixels[index]), int(self.labels[index])

    def path(self, index: int) -> str:
        return f"digits:{self._rows[index]}"


class SpreadSource:
    """Some images of another source, evenly spaced."""

    def __init__(self, source: Source, count: int) -> None:
        self.class_names, self.named = source.class_names, source.named
        self._source = source
        self._indices = np.arange(count) * len(source) // count
        self.labels = source.labels[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> tuple[BinaryIO | Image.Image, Label]:
        return self._source.read(int(self._indices[index]))

    def path(self, index: int) -> str:
        return self._source.path(int(self._indices[index]))


class RelabelledSource:
    """A source whose labels are mapped to a model's classes. The model may have more classes than the data."""

    named = True

    def __init__(self, source: Source, class_names: list[str]) -> None:
        self._source = source
        self._label_map = label_map(source.class_names, named=source.named, model_classes=class_names)
        if source.labels.ndim == 1:
            self.labels = self._label_map[source.labels]
        else:
            self.labels = np.zeros((len(source), len(class_names)), dtype=bool)
            self.labels[:, self._label_map] = source.labels
        self.class_names = class_names

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> tuple[BinaryIO | Image.Image, Label]:
        return self._source.read(index)[0], label_at(self.labels, index)

    def path(self, index: int) -> str:
        return self._source.path(index)


def label_map(data_classes: list[str], *, named: bool, model_classes: list[str]) -> np.ndarray:
    """(number of data classes,) int64: the model's label for each class of the data, matched by name."""
    if not named:
        if len(data_classes) > len(model_classes):
            raise ValueError(f"the data have {len(data_classes)} classes, but the model has {len(model_classes)}")
        return np.arange(len(data_classes))
    positions = {name: label for label, name in enumerate(model_classes)}
    if data_classes == [str(label) for label in range(len(model_classes))] and not positions.keys() & set(data_classes):
        return np.arange(len(model_classes))  # folders named by label, such as those of ImageNet-V2
    unknown = [name for name in data_classes if name not in positions]
    if unknown:
        raise ValueError(
            f"{len(unknown)} of the {len(data_classes)} classes of the data are not among the model's "
            f"{len(model_classes)}: {list_some(unknown)}; the model knows {list_some(model_classes)}"
        )
    return np.array([positions[name] for name in data_classes])


def label_at(labels: np.ndarray, index: int) -> Label:
    return int(labels[index]) if labels.ndim == 1 else labels[index]


def count_images(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """(classes,) int64: how many images have each label"""
    return np.bincount(labels, minlength=num_classes) if labels.ndim == 1 else labels.sum(axis=0)


def check_every_class_has_images(labels: np.ndarray, class_names: list[str], *, where: str) -> None:
    counts = count_images(labels, len(class_names))
    empty = [class_names[label] for label in np.flatnonzero(counts == 0)]
    if empty:
        raise ValueError(f"{len(empty)} class(es) without images in {where}: {list_some(empty)}; remove or fill them")


def list_some(names: Sequence[str], *, most: int = 5) -> str:
    """The first names, for a message."""
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
