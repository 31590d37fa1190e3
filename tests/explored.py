"""What the tests of the explore page share: a server, files to upload, a browser."""

import http.client
import io
import json
import shutil
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from PIL import Image
from small import SIZE, create_small

from inline_attention.data import DataConfig
from inline_attention.explore import App, ExploreServer, Subject, open_server

CPU = torch.device("cpu")
KINDS = ("softmax", "linear", "inline")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The sandbox does not start for root. The other flags keep the browser from contacting its maker.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
PATIENCE = 60_000  # milliseconds, for machines that are busy: nothing waits for them to pass
DESKTOP, PHONE = dict(width=1280, height=900), dict(width=390, height=844)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax_deit_tiny", {}),
    "linear": ("inline_deit_tiny", {"attention": "linear"}),
    "inline": ("inline_deit_tiny", {}),
}


def small_subjects() -> list[Subject]:
    """Models with a map of 4×4 tokens, three layers and two heads. They run in milliseconds."""
    data = DataConfig(img_size=[SIZE, SIZE])
    files = {kind: None if kind == "linear" else f"{kind}_deit_study.safetensors" for kind in MODELS}
    return [
        Subject(kind, name, create_small(name, **kwargs), data, files[kind]) for kind, (name, kwargs) in MODELS.items()
    ]


def serve(subjects: list[Subject]) -> Iterator[ExploreServer]:
    """A server on a free port of this machine, for a fixture; `contextmanager(serve)` makes a `with` of it."""
    with closing(App(subjects, device=CPU)) as app, open_server(app, host="127.0.0.1", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: ExploreServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any, http.client.HTTPResponse]:
    """Status, content (JSON decoded), response. Names of headers are written with underscores."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=300)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if isinstance(body, dict):
        body = json.dumps(body)
        sent.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, body=body, headers=sent)
        response = connection.getresponse()
        content: Any = response.read()
    finally:
        connection.close()
    if response.headers.get_content_type() == "application/json":
        content = json.loads(content)
    return response.status, content, response


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
