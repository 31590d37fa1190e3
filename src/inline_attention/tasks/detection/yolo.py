"""Reads and checks data in YOLO's format: data.yaml, images, and a text file of boxes for each image.

    data.yaml            names: [cat, dog] or {0: cat, 1: dog}; train: images/train; val: images/val
    images/train/1.jpg
    labels/train/1.txt   a line for each object: class cx cy w h, as shares of the image's width and height

A split may also be train/images with train/labels. An image without a text file has no objects.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from inline_attention.data.config import MAX_CLASSES
from inline_attention.data.decode import UnreadableImage, open_file
from inline_attention.data.sources import IMAGE_EXTENSIONS, find_files
from inline_attention.tasks.dense.config import is_inside
from inline_attention.tasks.detection.annotations import (
    AnnotatedData,
    AnnotatedImage,
    Box,
    Instance,
    box_inside,
    excerpt,
    header_size,
    warn_of_empty,
)
from inline_attention.tasks.detection.boxes import Size
from inline_attention.training.settings import parse_yaml

DESCRIPTION = "data.yaml"
MAX_BYTES = 2**24  # of a text file, far above any real one
_SLACK = 0.01  # rounding may move a coordinate this far out of the image


def find_description(path: Path) -> Path | None:
    """`path` if it is a YAML file, else the data.yaml of a folder, or its only YAML file. None if there is none."""
    if path.suffix in (".yaml", ".yml"):
        return path if path.is_file() else None
    if (path / DESCRIPTION).is_file():
        return path / DESCRIPTION
    found = [*path.glob("*.yaml"), *path.glob("*.yml")]
    return found[0] if len(found) == 1 else None


def read_yolo(path: str | Path, split: str) -> AnnotatedData:
    """Read one split and check it. A ValueError names what is wrong.

    The number of objects with an empty box is logged.

    Args:
        path: folder with data.yaml, or the file itself. The paths in data.yaml must be inside its folder.
        split: an entry of data.yaml: "train", "val" (or "valid"), "test".
    """
    source = find_description(Path(path))
    if source is None:
        raise ValueError(f"no {DESCRIPTION} in {path}; expected its entries names, train and val")
    content = _parse(source)
    names = _class_names(content, source)
    data = AnnotatedData(source, names, list(range(len(names))), [])
    labelled = 0
    for folder in _image_folders(content, source, split):
        for image in map(Path, find_files(folder, IMAGE_EXTENSIONS)):
            annotated = AnnotatedImage(len(data.images), image, header_size(image))
            labels = _label_file(image, source.parent)
            if labels.exists():
                _add_instances(annotated, labels, names)
                labelled += 1
            data.images.append(annotated)
    if not data.images:
        raise ValueError(f"{source}: no images in the split {split!r}")
    if not labelled:
        first = data.images[0].path
        raise ValueError(
            f"{source}: none of the {len(data.images)} images of the split {split!r} has a file of labels; for {first} "
            f"it would be {_label_file(first, source.parent)}"
        )
    warn_of_empty(data, split)
    return data


def _read_text(path: Path) -> str:
    try:
        with open_file(path) as file:
            content = file.read(MAX_BYTES + 1)
    except (UnreadableImage, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES >> 20} MiB, which is the limit of a text file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error


def _parse(source: Path) -> dict[str, Any]:
    """The entries. Every scalar is text, so that a class called `no` does not become False."""
    text = _read_text(source)
    try:
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{source} nests lists too deeply; expected the entries names, train and val") from error
    if not isinstance(content, dict):
        raise ValueError(f"{source} holds {excerpt(content)}; expected the entries names, train and val")
    return content


def _class_names(content: dict[str, Any], source: Path) -> list[str]:
    names = content.get("names")
    if isinstance(names, dict):
        if set(names) != {str(number) for number in range(len(names))}:
            raise ValueError(f"{source}: names has the keys {excerpt(list(names))}; expected 0, 1, 2, …")
        names = [names[str(number)] for number in range(len(names))]
    if not isinstance(names, list) or not names or len(names) > MAX_CLASSES:
        raise ValueError(f"{source}: names is {excerpt(names)}; expected a list of class names")
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{source}: names has {excerpt(name)}; expected text")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{source}: names has {excerpt(twice[0])} twice; expected each class once")
    if content.get("nc", str(len(names))) != str(len(names)):
        raise ValueError(f"{source}: nc is {excerpt(content['nc'])}, but names has {len(names)} classes")
    return [str(name) for name in names]


def _image_folders(content: dict[str, Any], source: Path, split: str) -> list[Path]:
    """The folders of a split's images, all of them below the folder of data.yaml"""
    key = "valid" if split == "val" and "val" not in content else split
    value = content.get(key)
    entries: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) for entry in entries) or not entries:
        splits = [name for name in ("train", "val", "valid", "test") if content.get(name)]
        raise ValueError(
            f"{source}: {key} is {excerpt(value)}; expected the folder of the split's images. "
            f"It names {', '.join(splits) or 'no split'} (data.train_split and data.val_split; inline detect eval: "
            "--split)"
        )
    # `path` is often a folder on the author's machine. It counts only if it exists below data.yaml.
    root, below = source.parent, content.get("path")
    if isinstance(below, str) and is_inside(below) and (root / below).is_dir():
        root = root / below
    folders = []
    for entry in entries:
        name = entry.removeprefix("../")  # exporters write ../train/images for the folder beside data.yaml
        if not is_inside(name):
            raise ValueError(f"{source}: {key} is {entry!r}; expected a path inside {root}")
        if not (root / name).is_dir():
            raise ValueError(f"{source}: {key} is {entry!r}, but there is no folder {root / name}")
        folders.append(root / name)
    return folders


def _label_file(image: Path, root: Path) -> Path:
    """The path of an image's labels: the last folder called images below the root becomes labels, the ending .txt."""
    parts = list(image.relative_to(root).with_suffix(".txt").parts)
    places = [place for place, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return root.joinpath(*parts)


def _add_instances(image: AnnotatedImage, labels: Path, names: list[str]) -> None:
    """Add the objects of a text file to their image."""
    for number, line in enumerate(_read_text(labels).splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        where = f"{labels}, line {number}"
        if len(words) != 5:
            raise ValueError(f"{where} is {excerpt(line)}; expected class cx cy w h, five numbers")
        label, listed = _number(words[0]), _box(words[1:], image.size, where)
        if not (0 <= label < len(names) and label.is_integer()):
            raise ValueError(f"{where}: class is {excerpt(words[0])}; expected a number from 0 to {len(names) - 1}")
        box = box_inside(*listed, image.size)
        instance = Instance(int(label) + 1, box or listed, segmentation=None, area=None, crowd=False, empty=box is None)
        image.add(instance, where)


def _box(words: list[str], size: Size, where: str) -> Box:
    """cx, cy, w, h as shares of the image → x0, y0, x1, y1 in pixels"""
    values = [_number(word) for word in words]
    for name, word, value in zip(("cx", "cy", "w", "h"), words, values, strict=True):
        if not -_SLACK <= value <= 1 + _SLACK:  # also false for NaN
            raise ValueError(
                f"{where}: {name} is {excerpt(word)}; expected a share of the image's width or height, from 0 to 1"
            )
    (cx, cy, w, h), (height, width) = values, size
    return (cx - w / 2) * width, (cy - h / 2) * height, (cx + w / 2) * width, (cy + h / 2) * height


def _number(text: str) -> float:
    """The number that a text holds; NaN if it holds none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
