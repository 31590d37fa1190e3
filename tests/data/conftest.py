"""Small image folders made on the spot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_folder(train={"cat": 4, "dog": 4}, val={…}): an ImageNet layout of PNG images with random pixels."""

    def make(root: str = "images", **splits: dict[str, int]) -> Path:
        rng = np.random.default_rng(0)
        for split, classes in splits.items():
            for name, count in classes.items():
                folder = tmp_path / root / split / name
                folder.mkdir(parents=True)
                for number in range(count):
                    height, width = rng.integers(9, 16, size=2)
                    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number:03}.png")
        return tmp_path / root

    return make
