"""The page with models that run in milliseconds, served on a free port."""

import io
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small import SIZE, create_small

from inline_attention.data import DataConfig
from inline_attention.explore import App, ExploreServer, Subject, open_server

CPU = torch.device("cpu")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax_deit_tiny", {}),
    "linear": ("inline_deit_tiny", {"attention": "linear"}),
    "inline": ("inline_deit_tiny", {}),
}


@pytest.fixture(scope="session")
def subjects() -> list[Subject]:
    """A map of 4×4 tokens, three layers, two heads."""
    data = DataConfig(img_size=[SIZE, SIZE])
    return [
        Subject(kind, name, create_small(name, **kwargs), data, None if kind == "linear" else f"{kind}.safetensors")
        for kind, (name, kwargs) in MODELS.items()
    ]


@pytest.fixture
def server(subjects: list[Subject]) -> Iterator[ExploreServer]:
    yield from serve(subjects)


def serve(subjects: list[Subject]) -> Iterator[ExploreServer]:
    with closing(App(subjects, device=CPU)) as app, open_server(app, host="127.0.0.1", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def picture_file(width: int = 60, height: int = 40, *, seed: int = 0, **options: Any) -> bytes:
    """Noise in a file, PNG unless `format` says otherwise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, **{"format": "PNG", **options})
    return file.getvalue()


def huge_png(side: int) -> bytes:
    """A small file that says it has side × side pixels."""
    file = bytearray(picture_file(8, 8))
    file[16:24] = 2 * side.to_bytes(4, "big")
    file[29:33] = zlib.crc32(file[12:29]).to_bytes(4, "big")
    return bytes(file)
