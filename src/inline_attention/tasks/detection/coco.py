"""Reads and checks data in COCO's format: `annotations/instances_SPLIT.json` and a folder of images."""

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inline_attention.data.decode import MAX_PIXELS
from inline_attention.tasks.dense.config import is_inside
from inline_attention.tasks.detection.annotations import (
    AnnotatedData,
    AnnotatedImage,
    Box,
    Instance,
    Segmentation,
    box_inside,
    excerpt,
    warn_of_empty,
)
from inline_attention.tasks.detection.boxes import Size

# Limits far above any real annotation. pycocotools allocates whatever a file asks for.
MAX_MASK_BYTES = 2**32  # of all decoded masks of an image
MAX_OUTLINE = 1_000_000  # length of the polygons of one object, in pixels
_FIELDS: dict[str, type] = {"image_id": int, "category_id": int, "bbox": list}  # of every annotation
_MAX_ID = 2**63  # limit of int64
_LARGEST = 1e12  # magnitude of a coordinate or an area; excludes NaN and infinity

Rle = dict[str, Any]  # pycocotools' compressed run lengths: size [height, width], counts as bytes


def read_coco(root: str | Path, split: str, *, masks: bool = True) -> AnnotatedData:
    """Read `root`/annotations/instances_`split`.json and check it. A ValueError names what is wrong.

    The number of objects with an empty box or mask is logged. COCO itself has some.

    Args:
        root: folder with annotations/ and the images in SPLIT/.
        split: "train" and "val" also find COCO's own files of train2017 and val2017.
        masks: read masks, which every object must then have. False: read only boxes.
    """
    root = Path(root)
    source, folder = _files(root, split)
    content = _parse(source)
    names = _categories(content, source)
    labels = {category: label for label, category in enumerate(names, start=1)}
    images = _images(content, source, folder)
    _add_instances(images, content, labels, source, masks=masks)
    data = AnnotatedData(source, list(names.values()), list(names), list(images.values()))
    warn_of_empty(data, split)
    return data


def _files(root: Path, split: str) -> tuple[Path, Path]:
    """(annotations, folder of images) of a split"""
    names = (split, f"{split}2017") if split in ("train", "val") else (split,)
    tried = [(root / "annotations" / f"instances_{name}.json", root / name) for name in names]
    source, folder = next((files for files in tried if files[0].is_file()), tried[0])
    if not source.is_file():
        raise ValueError(
            f"{' and '.join(str(file) for file, _ in tried)} {'do' if len(tried) > 1 else 'does'} not exist; "
            "expected annotations/instances_SPLIT.json and the images in SPLIT/ (data.train_split and data.val_split; "
            "inline detect eval: --split)"
        )
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; expected the images of {source} there")
    return source, folder


def _parse(source: Path) -> dict[str, Any]:
    try:
        content = json.loads(source.read_bytes())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}; is the file complete?"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not text: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{source} nests lists too deeply; expected COCO's instances format") from error
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{source} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{source} holds a {type(content).__name__}; expected an object with images and categories")
    for key in ("images", "categories"):
        if not isinstance(content.get(key), list) or not content[key]:
            raise ValueError(f"{source}: no list of {key}; expected COCO's instances format")
    return content


def _categories(content: Mapping[str, Any], source: Path) -> dict[int, str]:
    """Names by id, ascending"""
    names: dict[int, str] = {}
    for entry in _entries(content, "categories", {"id": int, "name": str}, source):
        if entry["id"] in names or entry["name"] in names.values():
            raise ValueError(
                f"{source}: two categories have the id {entry['id']} or the name {entry['name']!r}; expected each once"
            )
        names[entry["id"]] = entry["name"]
    return dict(sorted(names.items()))


def _images(content: Mapping[str, Any], source: Path, folder: Path) -> dict[int, AnnotatedImage]:
    images: dict[int, AnnotatedImage] = {}
    files: dict[Path, set[str]] = {}  # by folder: on network disks, a check of every single file takes minutes
    missing = []
    for entry in _entries(content, "images", {"id": int, "file_name": str, "height": int, "width": int}, source):
        name = entry["file_name"]
        if not is_inside(name):
            raise ValueError(
                f"{source}: image {entry['id']}: file_name is {name!r}; expected a path inside the folder of images"
            )
        path = folder / name
        if path.parent not in files:
            files[path.parent] = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
        if path.name not in files[path.parent]:
            missing.append(path)
        if entry["id"] in images:
            raise ValueError(f"{source}: two images have the id {entry['id']}")
        size = (entry["height"], entry["width"])
        if min(size) < 1 or math.prod(size) > MAX_PIXELS:
            raise ValueError(
                f"{source}: image {entry['id']} is {size[0]} high and {size[1]} wide; expected at most {MAX_PIXELS:,} "
                "pixels, and at least 1"
            )
        images[entry["id"]] = AnnotatedImage(entry["id"], path, size)
    if missing:
        raise ValueError(
            f"{source} names {len(missing)} of {len(images)} images that do not exist, such as {missing[0]}; add them, "
            "or remove them from the file"
        )
    return images


def _add_instances(
    images: dict[int, AnnotatedImage],
    content: Mapping[str, Any],
    labels: Mapping[int, int],
    source: Path,
    *,
    masks: bool,
) -> None:
    """Add the instances to their images."""
    if masks:
        _check_all_have_masks(content, source)
    for entry in _entries(content, "annotations", _FIELDS, source):
        where = f"{source}: annotation {entry.get('id', '')} of image {entry['image_id']}"
        if entry["image_id"] not in images:
            raise ValueError(f"{where}: there is no image of that id")
        if entry["category_id"] not in labels:
            known = ", ".join(map(str, list(labels)[:10])) + (", …" if len(labels) > 10 else "")
            raise ValueError(f"{where}: category id {entry['category_id']} is not in the file's list ({known})")
        image = images[entry["image_id"]]
        area, crowd = entry.get("area"), entry.get("iscrowd", 0)
        if area is not None and not _is_number(area):
            raise ValueError(f"{where}: area is {excerpt(area)}; expected a number")
        if crowd not in (0, 1):
            raise ValueError(f"{where}: iscrowd is {excerpt(crowd)}; expected 0 or 1")
        listed = _box(entry["bbox"], where)
        box = box_inside(*listed, image.size)
        segmentation = _segmentation(entry["segmentation"], image, where) if masks else None
        if masks and (len(image.instances) + 1) * math.prod(image.size) > MAX_MASK_BYTES:
            raise ValueError(
                f"{where}: the image has so many objects that their masks take more than {MAX_MASK_BYTES >> 30} GiB"
            )
        label, beyond = labels[entry["category_id"]], None if listed == box else listed
        empty = box is None or segmentation == []
        image.add(Instance(label, box or listed, segmentation, area, bool(crowd), beyond, empty), where)


def _check_all_have_masks(content: Mapping[str, Any], source: Path) -> None:
    """ValueError if an annotation has only a box, from which a mask head cannot learn."""
    entries = list(_entries(content, "annotations", _FIELDS, source))
    without = [entry for entry in entries if not entry.get("segmentation")]
    if without:
        first = f"annotation {without[0].get('id', '')} of image {without[0]['image_id']}"
        raise ValueError(
            f"{source}: {len(without)} of {len(entries)} annotations have no segmentation, such as {first}; mask heads "
            "need polygons or run lengths for every object. To learn boxes alone, train with model.head=faster_rcnn or "
            "cascade_rcnn"
        )


def _entries(
    content: Mapping[str, Any], key: str, fields: Mapping[str, type], source: Path
) -> Iterator[dict[str, Any]]:
    """The objects listed under `key`, checked to have these fields with values of these types"""
    entries = content.get(key, [])
    if not isinstance(entries, list):
        raise ValueError(f"{source}: {key} is {excerpt(entries)}; expected a list of objects")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"{source}: {key}[{number}] is {excerpt(entry)}; expected an object")
        for name, kind in fields.items():
            if name not in entry:
                raise ValueError(f"{source}: {key}[{number}] has no {name}")
            if not isinstance(entry[name], kind) or isinstance(entry[name], bool):
                expected = {int: "a whole number", str: "text", list: "a list"}[kind]
                raise ValueError(f"{source}: {name} of {key}[{number}] is {excerpt(entry[name])}; expected {expected}")
            if kind is int and not -_MAX_ID <= entry[name] < _MAX_ID:
                raise ValueError(f"{source}: {name} of {key}[{number}] is too large: {excerpt(entry[name])}")
        yield entry


def _box(bbox: list[Any], where: str) -> Box:
    """x, y, width, height → x0, y0, x1, y1"""
    if len(bbox) != 4 or not all(_is_number(value) for value in bbox):
        raise ValueError(f"{where}: bbox is {excerpt(bbox)}; expected four numbers, x, y, width and height")
    x, y, width, height = bbox
    return x, y, x + width, y + height


def _segmentation(value: Any, image: AnnotatedImage, where: str) -> Segmentation:
    """The checked mask of an annotation. An empty list: it encloses nothing."""
    if isinstance(value, dict):
        if value.get("size") != list(image.size):
            raise ValueError(
                f"{where}: its mask is for {excerpt(value.get('size'))} (height, width), "
                f"but the image {image.path.name} is listed with {list(image.size)}"
            )
        counts = value.get("counts")
        runs = _uncompressed(counts) if isinstance(counts, str) else counts
        if not isinstance(runs, list) or not all(isinstance(count, int) and count >= 0 for count in runs):
            raise ValueError(
                f"{where}: its run lengths are {excerpt(counts)}; expected a list of numbers from 0 on, or such a "
                "list compressed to a string"
            )
        if sum(runs) != math.prod(image.size):
            raise ValueError(f"{where}: its run lengths add up to {sum(runs)} pixels, not {math.prod(image.size)}")
        return {"size": list(image.size), "counts": counts} if any(runs[1::2]) else []
    if not isinstance(value, list):
        raise ValueError(f"{where}: segmentation is {excerpt(value)}; expected polygons or run lengths")
    for polygon in value:
        if not isinstance(polygon, list) or len(polygon) % 2 or not all(_is_number(number) for number in polygon):
            raise ValueError(f"{where}: a polygon is {excerpt(polygon)}; expected x0, y0, x1, y1, …")
    polygons = [np.array(polygon, np.float32) for polygon in value if len(polygon) >= 6]
    _check_polygons(polygons, image.size, where)
    return polygons


def _check_polygons(polygons: Sequence[np.ndarray], size: Size, where: str) -> None:
    """ValueError if an outline is far outside its image or too long. pycocotools stores every point along it."""
    outline = 0.0
    for polygon in polygons:
        points = polygon.reshape(-1, 2).astype(np.float64)
        for name, values, side in (("x", points[:, 0], size[1]), ("y", points[:, 1], size[0])):
            if values.min() < -side or values.max() > 2 * side:
                furthest = values.min() if values.min() < -side else values.max()
                raise ValueError(
                    f"{where}: a polygon reaches {name} = {furthest:g}, far outside of its image, which is "
                    f"{size[1]} wide and {size[0]} high"
                )
        outline += np.abs(points - np.roll(points, 1, axis=0)).max(1).sum()
    if outline > MAX_OUTLINE:
        raise ValueError(f"{where}: its polygons are {outline:,.0f} pixels long; expected at most {MAX_OUTLINE:,}")


def _uncompressed(counts: str) -> list[int] | None:
    """Decode run lengths that pycocotools compressed to a string. None if the string is invalid.

    Each number is split into groups of five bits, lowest first, and each group is a character from "0" on. Bit 5 marks
    that another group follows. Bit 4 of the last group is the sign. From the fourth number on, each is stored as its
    difference to the number two places before it.
    """
    groups = np.frombuffer(counts.encode(errors="replace"), np.uint8).astype(np.int64) - ord("0")
    if not len(groups) or groups.min() < 0 or groups.max() > 63 or groups[-1] & 32:
        return None
    ends = np.flatnonzero(groups & 32 == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 7:  # 35 bits are more than any image needs
        return None
    places = np.arange(len(groups)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((groups & 31) << 5 * places, starts)
    numbers -= np.where(groups[ends] & 16, 1 << 5 * lengths, 0)
    for first in (1, 2):
        numbers[first::2] = numbers[first::2].cumsum()
    return numbers.tolist()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def to_rle(segmentation: Segmentation, size: Size) -> Rle:
    """Polygons or run lengths of either kind → pycocotools' compressed run lengths"""
    mask_utils = load_pycocotools("mask")
    height, width = size
    if not segmentation:
        return mask_utils.encode(np.zeros((height, width), np.uint8, order="F"))
    if isinstance(segmentation, list):
        return mask_utils.merge(mask_utils.frPyObjects([polygon.tolist() for polygon in segmentation], height, width))
    if isinstance(segmentation["counts"], list):
        return mask_utils.frPyObjects(segmentation, height, width)
    return {"size": [height, width], "counts": segmentation["counts"].encode()}


def mask_of(instance: Instance, size: Size) -> Rle:
    """The mask of an instance. It must have been read with masks."""
    assert instance.segmentation is not None
    return to_rle(instance.segmentation, size)


def decode_masks(image: AnnotatedImage, instances: Sequence[Instance]) -> np.ndarray:
    """(instances, height, width) uint8"""
    height, width = image.size
    if not instances:
        return np.zeros((0, height, width), np.uint8)
    runs = [mask_of(instance, image.size) for instance in instances]
    return np.ascontiguousarray(load_pycocotools("mask").decode(runs).transpose(2, 0, 1))


def load_pycocotools(module: str) -> Any:
    """Import `pycocotools.module`, which comes with the extra [dense]."""
    try:
        return importlib.import_module(f"pycocotools.{module}")
    except ImportError as error:
        raise ImportError(
            "masks and average precision need pycocotools: pip install 'inline-attention[dense]'"
        ) from error
