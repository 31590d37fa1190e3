"""What the examples share: small data sets from the two photographs of the package, and a row of pictures.

Training images come from the left part of a photograph, validation images from the right one. They share no pixel.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from inline_attention.data.samples import sample_photographs

PHOTOS = dict(zip(("temple", "flower"), sample_photographs(), strict=True))
COUNTS = {"train": 24, "val": 12}
SPLIT = 0.6  # of the width


def crops(photo: str, split: str, *, size: int = 96) -> list[Image.Image]:
    """Square crops of one photograph, by the name of its class"""
    image = Image.open(PHOTOS[photo])
    border = int(SPLIT * image.width)
    left, right = (0, border) if split == "train" else (border, image.width)
    rng = np.random.default_rng(len(split))
    corners = [(rng.integers(left, right - size), rng.integers(0, image.height - size)) for _ in range(COUNTS[split])]
    return [image.crop((x, y, x + size, y + size)) for x, y in corners]


def write_classes(folder: Path) -> Path:
    """folder/{train,val}/{temple,flower}/00.jpg …"""
    for split in COUNTS:
        for photo in PHOTOS:
            (folder / split / photo).mkdir(parents=True, exist_ok=True)
            for i, image in enumerate(crops(photo, split)):
                image.save(folder / split / photo / f"{i:02}.jpg")
    return folder


def write_masks(folder: Path) -> Path:
    """folder/{images,masks}/{train,val}/00.*, and classes.txt: where the photograph of the flower is red"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("background\nflower\n")
    for split in COUNTS:
        for kind in ("images", "masks"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(crops("flower", split)):
            red, green, _ = np.asarray(image).astype(int).transpose(2, 0, 1)
            image.save(folder / "images" / split / f"{i:02}.jpg", quality=95)
            Image.fromarray((red > green + 20).astype(np.uint8)).save(folder / "masks" / split / f"{i:02}.png")
    return folder


def write_boxes(folder: Path) -> Path:
    """YOLO's layout: folder/{images,labels}/{train,val}/00.*, and data.yaml: pieces of the temple with a flower each"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [flower]\n")
    rng = np.random.default_rng(0)
    for split, count in COUNTS.items():
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for i in range(2 * count):
            picture, (left, top, right, bottom) = pasted(rng)
            box = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
            shares = " ".join(f"{value / picture.width:.4f}" for value in box)  # of a square picture
            picture.save(folder / "images" / split / f"{i:02}.jpg", quality=95)
            (folder / "labels" / split / f"{i:02}.txt").write_text(f"0 {shares}\n")
    return folder


def pasted(rng: np.random.Generator, *, size: int = 128) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """A piece of the temple with the flower pasted on, and the flower's box (left, top, right, bottom)"""
    temple, flower = Image.open(PHOTOS["temple"]), Image.open(PHOTOS["flower"])
    x, y = (int(rng.integers(0, side - size)) for side in temple.size)
    width, height = (int(side) for side in rng.integers(32, 80, 2))
    left, top = int(rng.integers(0, size - width)), int(rng.integers(0, size - height))
    picture = temple.crop((x, y, x + size, y + size))
    picture.paste(flower.crop((220, 120, 420, 320)).resize((width, height)), (left, top))
    return picture, (left, top, left + width, top + height)


def draw_row(path: str | Path, pictures: Sequence[Image.Image | np.ndarray], captions: Sequence[str]) -> None:
    """One file with the pictures side by side, each under its caption"""
    figure, axes = plt.subplots(1, len(pictures), figsize=(8, 1.9), layout="constrained", squeeze=False)
    for axis, picture, caption in zip(axes[0], pictures, captions, strict=True):
        axis.imshow(picture, cmap="gray")
        axis.set_title(caption, fontsize=9)
        axis.set_axis_off()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(path)
