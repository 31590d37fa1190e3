"""What the tests of the explore page share: a server, files to upload, a browser."""

import io
import shutil
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from PIL import Image

from inline_attention.explore import App, ExploreServer, Subject, open_server

CPU = torch.device("cpu")
KINDS = ("softmax", "linear", "inline")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The sandbox does not start for root, and without the rest a browser calls home.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
PATIENCE = 60_000  # milliseconds, for machines that are busy: nothing waits for them to pass
DESKTOP, PHONE = dict(width=1280, height=900), dict(width=390, height=844)


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
