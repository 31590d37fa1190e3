"""Requests and responses."""

import io
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from typing import Any

MAX_JSON_BYTES, JSON_SECONDS = 4096, 5.0
HEADER_SECONDS = 5.0
BODY_SECONDS = 60.0


class RequestError(Exception):
    """A request that is refused. The text is shown to the user."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class TimedSocket(io.RawIOBase):
    """Reads a socket until a deadline.

    The timeout of a socket starts again with every byte. A visitor who sends a byte now and then could keep a
    connection open forever.
    """

    def __init__(self, connection: socket.socket, *, seconds: float) -> None:
        self._connection = connection
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        """Set the deadline of all reading from now on."""
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        before = self._connection.gettimeout()
        self._connection.settimeout(left if before is None else min(left, before))
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(before)  # the timeout of sending


class Request:
    """A request whose body has not been read yet. Its handler knows how large the body may be."""

    def __init__(
        self, method: str, path: str, headers: Message, stream: io.BufferedIOBase, source: TimedSocket
    ) -> None:
        self.method, self.path = method, path
        self._headers, self._stream, self._source = headers, stream, source
        self.has_unread_body = "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"

    def read(self, limit: int, *, seconds: float = BODY_SECONDS) -> bytes:
        """Read the body within `seconds`. A body of more than `limit` bytes is refused before it is read."""
        if "Transfer-Encoding" in self._headers:
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length")
        text = self._headers.get("Content-Length", "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 16):
            raise RequestError(HTTPStatus.BAD_REQUEST, f"Content-Length is {text[:40]!r}; expected a number")
        if int(text) > limit:
            raise RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{_size(int(text))} are too many; expected at most {_size(limit)}"
            )
        self._source.allow(seconds)
        try:
            body = self._stream.read(int(text))
        except TimeoutError as error:
            message = f"the body did not arrive in time; expected all of it within {seconds:.0f} seconds"
            raise RequestError(HTTPStatus.REQUEST_TIMEOUT, message) from error
        if missing := int(text) - len(body):
            raise RequestError(HTTPStatus.BAD_REQUEST, f"the last {missing} bytes of the body did not arrive")
        self.has_unread_body = False
        return body

    def json(self) -> dict[str, Any]:
        """The body, which must be a JSON object."""
        # Browsers let other sites post text or forms to this address, but not JSON.
        if self._headers.get_content_type() != "application/json":
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected a body of type application/json")
        try:
            content = json.loads(self.read(MAX_JSON_BYTES, seconds=JSON_SECONDS))
        except (ValueError, RecursionError) as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
        return content


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"


@dataclass(frozen=True)
class Response:
    """A response. Its body is one value, or parts that are sent as they are made."""

    body: bytes | Iterator[bytes]
    content_type: str
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(
        cls, content: Any, *, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> "Response":
        return cls(_to_json(content), "application/json", status, headers or {})

    @classmethod
    def json_lines(cls, contents: Iterator[Any]) -> "Response":
        return cls((_to_json(content) + b"\n" for content in contents), "application/x-ndjson")


def _to_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
