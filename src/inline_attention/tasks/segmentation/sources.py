"""Pairs of image and mask files, found and matched when a split is opened."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inline_attention.data.decode import (
    UnreadableImage,
    image_size,
    load_upright,
    open_file,
    open_image,
    read_image,
    reason,
)
from inline_attention.data.sources import IMAGE_EXTENSIONS, find_files, list_some, natural_key
from inline_attention.tasks.segmentation.config import Layout, SegmentDataConfig

_logger = logging.getLogger(__name__)

IGNORED = 255  # of ignored pixels in the masks of every source; files may use another number. Classes are 0 to 254
_CLASSES, _ADE20K_CLASSES = "classes.txt", "objectInfo150.txt"  # lists of class names

# Cityscapes evaluates 19 of its label numbers. Pixels of the others are not counted.
_CITYSCAPES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip


class Pair(NamedTuple):
    image: Path
    mask: Path | None


class MaskSource:
    """Random access to the decoded images and masks of one split, or to images without masks."""

    def __init__(self, pairs: Sequence[Pair], *, class_names: list[str], labels: np.ndarray) -> None:
        """labels (65536,) int16: the class of each number in the files, IGNORED, or −1 for a wrong number."""
        self.pairs, self.class_names = pairs, class_names
        self._labels = labels
        self._kept: list[tuple[np.ndarray, np.ndarray | None] | UnreadableImage] | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    def path(self, index: int) -> str:
        return str(self.pairs[index].image)

    def keep_in_memory(self) -> None:
        """Decode all files once and keep them."""

        def decode(index: int) -> tuple[np.ndarray, np.ndarray | None] | UnreadableImage:
            try:
                return self.read(index)
            except UnreadableImage as error:
                return error

        self._kept = [decode(index) for index in range(len(self))]

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Pixels (H, W, 3) uint8 and classes (H, W) uint8, or None without a mask.

        UnreadableImage if a file cannot be decoded, ValueError if the mask does not fit its image.
        """
        if self._kept is not None:
            kept = self._kept[index]
            if isinstance(kept, UnreadableImage):
                raise UnreadableImage(str(kept))
            return kept
        image_path, mask_path = self.pairs[index]
        pixels = np.asarray(read_image(image_path))
        if mask_path is None:
            return pixels, None
        mask = self._labels[read_mask(mask_path)]
        if mask.shape != pixels.shape[:2]:
            raise ValueError(
                f"mask {mask_path} has {mask.shape[1]}×{mask.shape[0]} pixels, its image {image_path} "
                f"{pixels.shape[1]}×{pixels.shape[0]}; expected the same size"
            )
        if mask.min(initial=0) < 0:
            numbers = np.unique(read_mask(mask_path)[mask < 0])
            classes = np.flatnonzero((self._labels >= 0) & (self._labels != IGNORED))
            raise ValueError(
                f"mask {mask_path} holds the class number {', '.join(map(str, numbers[:5]))}"
                f"{', …' if len(numbers) > 5 else ''}; the {len(self.class_names)} classes have the numbers "
                f"{classes[0]} to {classes[-1]} (data.classes, data.ignore_index)"
            )
        return pixels, mask.astype(np.uint8)


def read_mask(path: Path) -> np.ndarray:
    """Class numbers (H, W) uint16. In a palette image, the indices are the numbers and the colours do not matter."""
    try:
        with open_file(path) as file:
            image = open_image(file)
            load_upright(image)
            numbers, mode = np.asarray(image), image.mode
    except Exception as error:  # Pillow's decoders raise nearly every built-in exception on damaged files
        raise UnreadableImage(f"its mask {path}: {reason(error)}") from error
    if mode not in ("L", "P", "1", "I;16", "I;16B", "I;16L", "I"):
        raise ValueError(
            f"mask {path} has colours (mode {mode}); expected one channel of class numbers, of 8 or 16 bits"
        )
    if numbers.max() > 0xFFFF or numbers.min() < 0:
        raise ValueError(f"mask {path} holds the numbers {numbers.min()} to {numbers.max()}; expected 0 to 65535")
    return numbers.astype(np.uint16)


def open_split(config: SegmentDataConfig, split: str) -> MaskSource:
    """Open a split, in memory if `config` says so. A few pairs are read to report wrong data before training starts."""
    config = with_layout(config)
    class_names, labels = _classes(config, Path(config.path))
    source = MaskSource(find_pairs(config, split), class_names=class_names, labels=labels)
    found: set[int] = set()
    for index in _spread(len(source), num=8):
        with suppress(UnreadableImage):  # the loader will count it
            found.update(np.unique(source.read(index)[1]).tolist())  # type: ignore[arg-type]  # all have masks
    if IGNORED in found and len(found) == 2:  # as in masks of 0 and 255 for a class and the background
        _logger.warning(
            "%s [%s]: the masks hold only the class %r and ignored pixels. If the ignored number %d stands for a "
            "class, replace it by the position of the class in the list of names, counted from 0",
            *(config.path, split, class_names[min(found)], config.ignore_index),
        )
    if config.in_memory:
        source.keep_in_memory()
    return source


def measure(pairs: Sequence[Pair], *, num: int = 100) -> list[tuple[int, int]]:
    """(height, width) of some of the images, evenly spread over the list. ValueError if none can be read."""
    sizes = []
    for index in _spread(len(pairs), num=num):
        with suppress(UnreadableImage):
            sizes.append(image_size(pairs[index].image))
    if not sizes:
        raise ValueError(f"none of the {len(pairs)} images can be read, such as {pairs[0].image}")
    return sizes


def _spread(count: int, *, num: int) -> list[int]:
    """Up to `num` positions in a list, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, count - 1, num=num, dtype=int)).tolist()


# The folders of images and masks, by which a layout is recognised.
_LAYOUTS: dict[Layout, tuple[str, str]] = {
    "folders": ("images", "masks"),
    "ade20k": ("images", "annotations"),
    "cityscapes": ("leftImg8bit", "gtFine"),
}


def with_layout(config: SegmentDataConfig) -> SegmentDataConfig:
    """`config` with the recognised layout in place of "auto". ValueError if the data have none, or several."""
    root = Path(config.path)
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise ValueError(f"data path {config.path!r} {what}; expected a folder of images and masks")
    if config.layout != "auto":
        return config
    found = [name for name, folders in _LAYOUTS.items() if all((root / folder).is_dir() for folder in folders)]
    if len(found) == 1:
        return replace(config, layout=found[0])
    looked_for = ", ".join(f"{images}/ and {masks}/ ({name})" for name, (images, masks) in _LAYOUTS.items())
    if found:
        raise ValueError(
            f"{config.path} has the folders of several layouts, {' and '.join(found)}; choose one with data.layout "
            "(inline segment eval: --layout)"
        )
    there = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
    raise ValueError(f"{config.path}: looked for {looked_for}; there is {list_some(there, most=10)}")


def find_pairs(config: SegmentDataConfig, split: str) -> list[Pair]:
    """The images of a split with their masks. ValueError if one of them has none."""
    layout, root = with_layout(config).layout, Path(config.path)
    if layout == "cityscapes":
        return _match(root / "leftImg8bit" / split, root / "gtFine" / split, "_leftImg8bit", _cityscapes_ending(root))
    if layout == "ade20k":
        split = {"train": "training", "val": "validation"}.get(split, split)
        return _match(root / "images" / split, root / "annotations" / split)
    return _match(root / "images" / split, root / "masks" / split)


def _match(images: Path, masks: Path, image_ending: str = "", mask_ending: str = "") -> list[Pair]:
    """Match images and masks by their paths below both folders, without the endings."""
    for folder in (images, masks):
        if not folder.is_dir():
            raise ValueError(f"no folder {folder}; expected images in {images} and their masks in {masks}")
    mask_of = _by_name(masks, (".png", ".tif", ".tiff"), mask_ending)
    image_of = _by_name(images, IMAGE_EXTENSIONS, image_ending)
    if not image_of:
        raise ValueError(f"no images in {images}")
    without = [str(path) for name, path in image_of.items() if name not in mask_of]
    if without:
        raise ValueError(f"{len(without)} image(s) without a mask in {masks}: {list_some(without, most=3)}")
    return [Pair(path, mask_of[name]) for name, path in image_of.items()]


def _by_name(folder: Path, extensions: Iterable[str], ending: str) -> dict[str, Path]:
    """Files by their path below the folder without the ending, in natural order."""
    endings = tuple((ending + extension).lower() for extension in extensions)
    names: dict[str, Path] = {}
    for path in map(Path, find_files(folder, endings)):
        name = str(path.relative_to(folder).with_suffix("")).removesuffix(ending)
        if name in names:
            raise ValueError(
                f"{names[name]} and {path} differ only in their ending; expected one file for each name, by which "
                "images and masks are matched"
            )
        names[name] = path
    return dict(sorted(names.items(), key=lambda item: natural_key(item[0])))


def _cityscapes_ending(root: Path) -> str:
    """The ending of the masks: of those with training numbers if there are any, else of those with original numbers."""
    made = next(root.glob("gtFine/*/*/*_gtFine_labelTrainIds.png"), None)
    return "_gtFine_labelIds" if made is None else "_gtFine_labelTrainIds"


def _classes(config: SegmentDataConfig, root: Path) -> tuple[list[str], np.ndarray]:
    """The class names, and the class of each number that a file can hold."""
    labels = np.full(0x10000, -1, dtype=np.int16)
    if config.layout == "cityscapes" and config.classes is None:
        names, numbers = list(_CITYSCAPES.values()), list(range(len(_CITYSCAPES)))
        if _cityscapes_ending(root) == "_gtFine_labelIds":
            labels[:256], numbers = IGNORED, list(_CITYSCAPES)
    else:
        names = config.classes if isinstance(config.classes, list) else _listed_names(config, root)
        if config.layout == "folders" and config.ignore_index == len(names) - 1:
            names = names[:-1]  # lists often include the ignored class
        first = 1 if config.layout == "ade20k" else 0  # ADE20K's 0 is "other" and is ignored
        labels[:first], numbers = IGNORED, list(range(first, first + len(names)))
    if not 2 <= len(names) <= IGNORED:
        raise ValueError(
            f"{len(names)} classes in data.classes or {_CLASSES}; expected 2 to {IGNORED}, with the background"
        )
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice and config.layout == "folders":
        raise ValueError(f"the class {twice[0]!r} is listed twice (data.classes or {_CLASSES}); expected it once")
    labels[numbers] = range(len(names))
    ignored = labels[config.ignore_index]
    if 0 <= ignored < len(names):
        raise ValueError(
            f"data.ignore_index={config.ignore_index} is the number of the class {names[ignored]!r}; "
            f"expected a number from {numbers[-1] + 1} on, or the last one listed"
        )
    labels[config.ignore_index] = IGNORED
    return names, labels


def lists_classes(config: SegmentDataConfig) -> bool:
    """Whether the data set has a list of its classes"""
    config, root = with_layout(config), Path(config.path)
    return (
        config.layout == "cityscapes"
        or (root / _CLASSES).is_file()
        or (config.layout == "ade20k" and (root / _ADE20K_CLASSES).is_file())
    )


def _listed_names(config: SegmentDataConfig, root: Path) -> list[str]:
    objects = root / _ADE20K_CLASSES
    if config.classes is None and config.layout == "ade20k" and objects.is_file():
        return [row.split("\t")[-1].split(",")[0].strip() for row in _lines(objects)[1:]]
    file = root / _CLASSES if config.classes is None else Path(str(config.classes))
    if not file.is_file():
        raise ValueError(
            f"no class names: expected {file}, one name per line, or data.classes=FILE, or data.classes=[name, name]"
        )
    return _lines(file)


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}; expected one class name per line") from error
