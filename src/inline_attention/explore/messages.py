"""What a request is, and what it is answered with."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from io import BufferedIOBase
from typing import Any

MAX_JSON_BYTES = 4096
BODY_SECONDS = 60.0  # a body that takes longer is given up


class RequestError(Exception):
    """A request that is not answered as wished; the text is for the user."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Request:
    """A request whose body is still to be read, by who knows how large it may be."""

    def __init__(self, method: str, path: str, headers: Message, stream: BufferedIOBase) -> None:
        self.method, self.path = method, path
        self._headers, self._stream = headers, stream
        self.has_unread_body = "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"

    def read(self, limit: int) -> bytes:
        """The body. Nothing of it is read where it is larger than `limit` bytes."""
        if "Transfer-Encoding" in self._headers:
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length")
        text = self._headers.get("Content-Length", "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 16):
            raise RequestError(HTTPStatus.BAD_REQUEST, f"Content-Length is {text[:40]!r}; expected a number")
        if int(text) > limit:
            raise RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{_size(int(text))} are too many; expected at most {_size(limit)}"
            )
        deadline = time.monotonic() + BODY_SECONDS
        parts, missing = [], int(text)
        while missing:
            part = self._stream.read1(min(missing, 2**16))
            if not part:
                raise RequestError(HTTPStatus.BAD_REQUEST, f"the last {missing} bytes of the body did not come")
            if time.monotonic() > deadline:
                raise RequestError(HTTPStatus.REQUEST_TIMEOUT, f"the body took more than {BODY_SECONDS:.0f} seconds")
            parts.append(part)
            missing -= len(part)
        self.has_unread_body = False
        return b"".join(parts)

    def json(self) -> dict[str, Any]:
        """The body, which must be a JSON object."""
        # A page of another site may post text or a form to this address, but not JSON without being asked first.
        if self._headers.get_content_type() != "application/json":
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected a body of type application/json")
        try:
            content = json.loads(self.read(MAX_JSON_BYTES))
        except (ValueError, RecursionError) as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
        return content


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"


@dataclass(frozen=True)
class Response:
    """A body, or the parts of one that are sent as they come."""

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
