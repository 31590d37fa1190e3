"""A small segmentation data set drawn at run time: rectangles, discs and triangles on noise, with their masks."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("background", "rectangle", "disc", "triangle")
IGNORED = 255


def draw(seed: int, *, size: tuple[int, int] = (48, 64)) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (H, W, 3) and classes (H, W); the outline of every shape is IGNORED, as where annotators disagree."""
    noise = np.random.default_rng(seed)
    height, width = size
    image = Image.fromarray(noise.integers(0, 90, (height, width, 3), dtype=np.uint8))
    mask = Image.new("L", (width, height), 0)
    for _ in range(3):
        kind = int(noise.integers(1, 4))
        radius = int(noise.integers(6, 12))
        x, y = int(noise.integers(radius, width - radius)), int(noise.integers(radius, height - radius))
        colour = tuple(int(200 * (kind == channel + 1) + noise.integers(0, 55)) for channel in range(3))
        for canvas, fill, outline in ((image, colour, colour), (mask, kind, IGNORED)):
            pen = ImageDraw.Draw(canvas)
            box = (x - radius, y - radius, x + radius, y + radius)
            if kind == 1:
                pen.rectangle(box, fill=fill, outline=outline)
            elif kind == 2:
                pen.ellipse(box, fill=fill, outline=outline)
            else:
                corners = [(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)]
                pen.polygon(corners, fill=fill, outline=outline)
    return np.asarray(image), np.asarray(mask)


def write(root: Path, *, train: int = 16, val: int = 5, size: tuple[int, int] = (48, 64)) -> Path:
    """images/SPLIT, masks/SPLIT and classes.txt below `root`."""
    for first, split, count in ((0, "train", train), (1000, "val", val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for number in range(first, first + count):
            pixels, mask = draw(number, size=size)
            Image.fromarray(pixels).save(root / "images" / split / f"{number}.png")
            Image.fromarray(mask).save(root / "masks" / split / f"{number}.png")
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


@functools.cache
def folder() -> str:
    """The set of `write`, kept until the tests end."""
    root = tempfile.mkdtemp(prefix="shapes-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return str(write(Path(root)))
