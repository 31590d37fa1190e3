"""A small trained model in a file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inline_attention import create_model
from inline_attention.data import DataConfig
from inline_attention.models.weights import save_weights
from inline_attention.tasks.classification.classifier import preprocessing

SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """inline_deit_tiny made small: 8 pixels, greyscale, the classes "0" to "9"."""
    torch.manual_seed(0)
    model = create_model("inline_deit_tiny", img_size=8, in_chans=1, num_classes=10, **SMALL)
    prepared = preprocessing(DataConfig(in_chans=1, mean=[0.3], std=[0.4], eval_transform="resize"))
    metadata = {"class_names": json.dumps([str(digit) for digit in range(10)]), "preprocessing": prepared}
    return save_weights(model, tmp_path / "digits.safetensors", metadata=metadata)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with four images, one of them unreadable, and a file that is not an image."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "more/c.PNG"):
        Image.fromarray(rng.integers(0, 256, (9, 12), dtype=np.uint8)).save(folder / name)
    (folder / "bad.png").write_bytes(b"")
    (folder / "readme.txt").write_text("no image")
    return folder
