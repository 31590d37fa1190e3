"""What the page may ask for, and the answers. No request's text ever becomes a path."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from http import HTTPStatus
from importlib import resources
from typing import Any

import torch

from inline_attention._version import __version__
from inline_attention.environment import describe_environment

from . import cost
from .gate import Gate
from .http import Request, RequestError, Response
from .pictures import FORMATS, MAX_BYTES, MAX_PIXELS, BadPicture, Picture, PictureStore, decode_picture
from .subjects import Subject

CONTENT_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript"}
PHOTOS = {"china": "Temple, danielbuechele, CC BY 2.0", "flower": "Flower, vultilion, CC BY 2.0"}
PICTURES = "/pictures/"  # and a picture's name

Handler = Callable[[Request], Response]


def sample_photos() -> dict[str, Picture]:
    folder = resources.files("inline_attention.explore") / "photos"
    return {name: Picture.of(decode_picture((folder / f"{name}.jpg").read_bytes())) for name in PHOTOS}


def page_files() -> dict[str, Response]:
    """Address → file, all of them read once."""
    folder = resources.files("inline_attention.explore") / "page"
    files = {}
    for file in folder.iterdir():
        content_type = CONTENT_TYPES[file.name.rpartition(".")[2]]
        address = "/" if file.name == "index.html" else f"/{file.name}"
        files[address] = Response(file.read_bytes(), content_type)
    return files


class App:
    """The state that visitors share, all of it bounded: models, pictures, and the gate before computations."""

    def __init__(self, subjects: Sequence[Subject], *, device: torch.device) -> None:
        self._subjects, self._device = subjects, device
        self._files = page_files()
        self._pictures = PictureStore(sample_photos())
        self._gate = Gate(waiting=16)
        self._uploads = Gate(running=4, waiting=16)  # how many files are in memory at once
        self._stopwatch = cost.Stopwatch(device, self._gate)
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/api/setup"): self._setup,
            ("POST", "/api/pictures"): self._add_picture,
            ("GET", "/api/cost"): self._cost,
            ("POST", "/api/measure"): self._measure,
        }

    def answer(self, request: Request) -> Response:
        if request.method == "GET" and request.path in self._files:
            return self._files[request.path]
        if request.method == "GET" and request.path.startswith(PICTURES):
            return Response(self._picture(request.path.removeprefix(PICTURES)).png, "image/png")
        handler = self._handlers.get((request.method, request.path))
        if handler is None:
            if any(path == request.path for _, path in self._handlers):
                raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} does not take {request.method}")
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is no {request.path[:200]} here")
        return handler(request)

    def _setup(self, request: Request) -> Response:
        return Response.json(
            dict(
                version=__version__,
                limits=dict(bytes=MAX_BYTES, pixels=MAX_PIXELS, formats=FORMATS),
                photos=[dict(picture=name, title=title) for name, title in PHOTOS.items()],
                models=[self._describe(subject) for subject in self._subjects],
            )
        )

    def _describe(self, subject: Subject) -> dict[str, Any]:
        return dict(kind=subject.kind, name=subject.name, weights=subject.weights)

    def _picture(self, name: object) -> Picture:
        picture = self._pictures.get(name) if isinstance(name, str) else None
        if picture is None:
            raise RequestError(HTTPStatus.NOT_FOUND, "the picture is no longer here; load it again")
        return picture

    def _add_picture(self, request: Request) -> Response:
        with self._uploads.turn():
            data = request.read(MAX_BYTES)
            with self._gate.turn():
                try:
                    picture = Picture.of(decode_picture(data))
                except BadPicture as error:
                    raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        return Response.json(dict(picture=self._pictures.add(picture)), status=HTTPStatus.CREATED)

    def _cost(self, request: Request) -> Response:
        with self._gate.turn():
            counts = cost.counts()
        environment = describe_environment()
        machine = environment["cpu" if self._device.type == "cpu" else "gpu 0"]
        return Response.json(dict(sizes=cost.SIZES, counts=counts, machine=machine))

    def _measure(self, request: Request) -> Response:
        events = self._stopwatch.measure()
        first = next(events)  # raises Busy while the status can still say so
        return Response.json_lines(itertools.chain([first], events))
