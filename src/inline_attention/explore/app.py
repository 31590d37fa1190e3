"""The requests that the page can send, and their answers. Text from a request never becomes a path."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from http import HTTPStatus
from importlib import resources
from typing import Any

import torch

from inline_attention.analysis import measure_injectivity
from inline_attention.data.samples import sample_photographs
from inline_attention.environment import describe_environment

from . import cost
from .gate import Gate
from .maps import Maps
from .messages import Request, RequestError, Response
from .pictures import MAX_BYTES, BadPicture, Picture, PictureStore, decode_picture
from .subjects import Subject

CONTENT_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript"}
PHOTOS = {"china": "Temple, danielbuechele, CC BY 2.0", "flower": "Flower, vultilion, CC BY 2.0"}  # the samples
PICTURES = "/pictures/"  # and a picture's name
MAX_HEADS = 1024

Handler = Callable[[Request], Response]


def sample_photos() -> dict[str, Picture]:
    return {path.stem: Picture.of(decode_picture(path.read_bytes())) for path in sample_photographs()}


def plane() -> dict[str, Any]:
    """The first figure of the page: points of both panels, A and b of the second, and the tolerance of equality."""
    figure = measure_injectivity()
    relu, affine = (dict(queries=panel.queries.tolist(), keys=panel.keys.tolist()) for panel in figure.panels)
    parameters = figure.parameters
    return dict(
        relu=relu,
        relu_affine=affine,
        affine=dict(A=parameters["affine_weight"], b=parameters["affine_bias"]),
        tolerance=figure.tolerance,
    )


def page_files() -> dict[str, Response]:
    """Address → content of the file, read once."""
    folder = resources.files("inline_attention.explore") / "page"
    files = {}
    for file in folder.iterdir():
        content_type = CONTENT_TYPES[file.name.rpartition(".")[2]]
        address = "/" if file.name == "index.html" else f"/{file.name}"
        files[address] = Response(file.read_bytes(), content_type)
    return files


class App:
    """The state that visitors share: models, pictures, and the queue of computations. All of it is bounded."""

    def __init__(self, subjects: Sequence[Subject], *, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {str(device)!r} cannot be timed; expected cpu or cuda")
        self._subjects = subjects
        self._machine = describe_environment()["cpu" if device.type == "cpu" else f"gpu {device.index or 0}"]
        self._files = page_files()
        self._pictures = PictureStore(sample_photos())
        self._gate = Gate(waiting=16)
        self._uploads = Gate(running=4, waiting=16)  # how many files are in memory at once
        self._maps = Maps(subjects, device=device)
        self._setup_response = Response.json(self._describe_setup())
        self._stopwatch = cost.Stopwatch(device, self._gate)
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/api/setup"): lambda request: self._setup_response,
            ("POST", "/api/pictures"): self._add_picture,
            ("POST", "/api/map"): self._map,
            ("POST", "/api/prediction"): self._predict,
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

    def close(self) -> None:
        """End all computations, permanently."""
        self._gate.close()

    def _describe_setup(self) -> dict[str, Any]:
        models = [
            dict(kind=subject.kind, title=subject.title, name=subject.name, weights=subject.weights, layers=layers)
            for subject, layers in zip(self._subjects, self._maps.layer_counts, strict=True)
        ]
        return dict(
            plane=plane(),
            max_bytes=MAX_BYTES,
            photos=[dict(picture=name, title=title) for name, title in PHOTOS.items()],
            models=models,
        )

    def _picture(self, name: str) -> Picture:
        picture = self._pictures.get(name)
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

    def _map(self, request: Request) -> Response:
        body = request.json()
        name = str(body.get("picture"))
        picture = self._picture(name)
        model = _integer(body, "model", len(self._subjects))
        layer = _integer(body, "layer", self._maps.layer_counts[model])
        head = None if body.get("head") is None else _integer(body, "head", MAX_HEADS)
        x, y = (_fraction(body, key) for key in ("x", "y"))
        with self._gate.turn():
            found = self._maps.attention_map(name, picture.image, model=model, layer=layer, head=head, x=x, y=y)
        return Response.json(dataclasses.asdict(found))

    def _predict(self, request: Request) -> Response:
        body = request.json()
        name = str(body.get("picture"))
        picture = self._picture(name)
        model = _integer(body, "model", len(self._subjects))
        with self._gate.turn():
            guesses = self._maps.prediction(name, picture.image, model=model)
        return Response.json(dict(guesses=[guess._asdict() for guess in guesses]))

    def _cost(self, request: Request) -> Response:
        with self._gate.turn():
            counts = cost.counts()
        return Response.json(dict(sizes=cost.SIZES, counts=counts, machine=self._machine))

    def _measure(self, request: Request) -> Response:
        events = self._stopwatch.measure(cost.SIZES)
        first = next(events)  # raises Busy before the status of the response is sent
        return Response.json_lines(itertools.chain([first], events))


def _integer(body: dict[str, Any], key: str, count: int) -> int:
    value = body.get(key)
    if type(value) is not int or not 0 <= value < count:  # a bool is an int too
        raise RequestError(HTTPStatus.BAD_REQUEST, f"{key} is {value!r:.40}; expected a whole number below {count}")
    return value


def _fraction(body: dict[str, Any], key: str) -> float:
    value = body.get(key)
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"{key} is {value!r:.40}; expected a number from 0 to 1")
    return value
