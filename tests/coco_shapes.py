"""A small detection set drawn at run time: discs, squares and triangles on noise, in COCO's or YOLO's format."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

NAMES = ("disc", "square", "triangle")
CATEGORY_IDS = (3, 7, 11)  # with gaps, as COCO's own


def outline(kind: int, x: float, y: float, radius: float) -> list[float]:
    """A polygon x0, y0, x1, y1, … around (x, y)"""
    corners, turn = ((24, 0.0), (4, np.pi / 4), (3, -np.pi / 2))[kind]
    angles = turn + 2 * np.pi * np.arange(corners) / corners
    return np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], axis=1).ravel().tolist()


def draw_shapes(
    root: Path, *, split: str, images: int, seed: int = 0, sizes: tuple[tuple[int, int], ...] = ((64, 96), (96, 64))
) -> dict[str, Any]:
    """Write the split's images and annotations under `root`; what the JSON file holds. Sizes are (height, width)."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    content = _draw(root / split, images=images, seed=seed, sizes=sizes)
    write_annotations(root, split, content)
    return content


def draw_yolo(root: Path, *, splits: dict[str, int], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Write a YOLO folder with this number of images in each split; COCO's annotations of the splits."""
    described = [f"names: [{', '.join(NAMES)}]"]
    contents = {}
    for number, (split, images) in enumerate(splits.items()):
        content = contents[split] = _draw(root / "images" / split, images=images, seed=seed + number)
        labels = root / "labels" / split
        labels.mkdir(parents=True)
        for image in content["images"]:
            lines = []
            for entry in content["annotations"]:
                if entry["image_id"] == image["id"]:
                    x, y, w, h = entry["bbox"]
                    cx, cy = (x + w / 2) / image["width"], (y + h / 2) / image["height"]
                    number_of_class = CATEGORY_IDS.index(entry["category_id"])
                    lines.append(f"{number_of_class} {cx!r} {cy!r} {w / image['width']!r} {h / image['height']!r}\n")
            (labels / Path(image["file_name"]).with_suffix(".txt")).write_text("".join(lines))
        described.append(f"{split}: images/{split}")
    (root / "data.yaml").write_text("\n".join(described) + "\n")
    return contents


def _draw(
    folder: Path, *, images: int, seed: int, sizes: tuple[tuple[int, int], ...] = ((64, 96), (96, 64))
) -> dict[str, Any]:
    """Write images to a folder; their annotations as COCO has them."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "categories": [{"id": i, "name": name} for i, name in zip(CATEGORY_IDS, NAMES, strict=True)],
        "images": [],
        "annotations": [],
    }
    for number in range(images):
        height, width = sizes[number % len(sizes)]
        picture = Image.fromarray(draw.integers(0, 60, (height, width, 3), dtype=np.uint8))
        pen = ImageDraw.Draw(picture)
        for _ in range(int(draw.integers(1, 4))):
            kind, radius = int(draw.integers(3)), float(draw.uniform(8, 16))
            x, y = (float(draw.uniform(radius, side - radius)) for side in (width, height))
            points = outline(kind, x, y, radius)
            colour = [255, 60, 60, 255, 60][2 - kind : 5 - kind]
            pen.polygon(points, fill=tuple(colour))
            xs, ys = points[::2], points[1::2]
            box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": number,
                    "category_id": CATEGORY_IDS[kind],
                    "bbox": box,
                    "area": box[2] * box[3],
                    "segmentation": [points],
                    "iscrowd": 0,
                }
            )
        name = f"{number:04d}.png"
        picture.save(folder / name)
        content["images"].append({"id": number, "file_name": name, "height": height, "width": width})
    return content


def write_annotations(root: Path, split: str, content: Any) -> Path:
    path = root / "annotations" / f"instances_{split}.json"
    path.write_text(json.dumps(content, indent=1))
    return path
