"""Requests to the page of `inline explore`: valid ones, mutated ones, and visitors who leave."""

import contextlib
import http.client
import json
import math
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from explored import huge_png, picture_file

from .part import MIB, Part

VISITORS = 4  # at a time
SETTLED = 1_000  # requests after which the server's stores of pictures and maps are full
MAY_GROW = 48 * MIB


class Page(Part):
    name = "page"
    what = "requests to the page of `inline explore`"
    promise = "every request answered as it should be, no error of the server's own, memory that stays where it was"
    count, per_case, per_chunk = 10_000, 50, 100
    patience = 240.0  # to start a server and to settle it, too

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self.errors = folder / "stderr.txt"
        with self.errors.open("wb") as errors:
            command = [sys.executable, "-m", "inline_attention", "explore", "--port", "0", "--device", "cpu"]
            self.server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert self.server.stdout is not None
            address = self.server.stdout.readline()
            assert address, f"the server did not start: {self.errors.read_text()}"
            self.port = int(address.split()[0].rstrip("/").rpartition(":")[2])
            setup = json.loads(self._ask("GET", "/api/setup")[1])
            self.layers = [model["layers"] for model in setup["models"]]
            self.pictures = [photo["picture"] for photo in setup["photos"]]
            self.uploads: list[str] = []
            settle = random.Random(seed)
            for _ in range(SETTLED // self.per_case):
                self._visit(settle)
            for number in range(80):  # more pictures than the server keeps
                self._upload(random.Random(number))
        except BaseException:
            self.server.kill()
            raise
        self.resident = _resident(self.server.pid)

    def run(self, case: int) -> Mapping[str, int]:
        return self._visit(self.draw(case))

    def close(self) -> Mapping[str, float]:
        try:
            grown = _resident(self.server.pid) - self.resident
        finally:
            self.server.kill()
            self.server.wait()
        assert grown < MAY_GROW, f"the server grew by {grown / MIB:.0f} MiB, from {self.resident / MIB:.0f}"
        return {"resident before, MiB": self.resident / MIB, "growth, MiB": grown / MIB}

    def _visit(self, draw: random.Random) -> Counter[str]:
        chosen = draw.choices(list(REQUESTS), weights=list(REQUESTS.values()), k=self.per_case)
        seeds = [draw.getrandbits(63) for _ in chosen]

        def make(request: Callable[[Page, random.Random], str], seed: int) -> str:
            return request(self, random.Random(seed))

        with ThreadPoolExecutor(VISITORS) as pool:
            outcomes = Counter(pool.map(make, chosen, seeds))
        assert self.server.poll() is None, f"the server ended with {self.server.returncode}"
        assert not self.errors.stat().st_size, f"the server printed {self.errors.read_text()[-2000:]}"
        return outcomes

    def _ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=50)) as connection:
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()

    def _expect(self, status: int, content: bytes, *expected: int) -> None:
        assert status in expected, f"status {status}, expected {expected}: {content[:300]!r}"
        if status >= 400:
            message = json.loads(content)["error"]
            assert message
            assert "Traceback" not in message

    def _file(self, draw: random.Random) -> str:
        path = draw.choice(["/", "/style.css", "/main.js", "/api/setup", "/api/cost", f"/pictures/{self.pictures[0]}"])
        status, content = self._ask("GET", path)
        self._expect(status, content, 200)
        return "files and figures"

    def _query(self, draw: random.Random) -> dict[str, Any]:
        model = draw.randrange(len(self.layers))
        picture = draw.choice([*self.pictures, *self.uploads[-20:]])
        return dict(
            picture=picture, model=model, layer=draw.randrange(self.layers[model]), head=draw.choice([None, 0]),
            x=draw.random(), y=draw.random(),
        )  # fmt: skip

    def _map(self, draw: random.Random) -> str:
        query = self._query(draw)
        status, content = self._ask(
            "POST", "/api/map", json.dumps(query).encode(), **{"Content-Type": "application/json"}
        )
        self._expect(status, content, 200)
        weights = json.loads(content)["weights"]
        assert weights
        assert all(math.isfinite(weight) for weight in _numbers(weights))
        return "attention maps"

    def _wrong_map(self, draw: random.Random) -> str:
        query = self._query(draw)
        for _ in range(draw.choice([1, 2])):
            query[draw.choice([*query, "more"])] = draw.choice(
                [None, True, -1, 2**70, 1.5, float("nan"), "x" * 500, [], {}]
            )
        body = bytearray(json.dumps(query).encode())
        if draw.random() < 0.4:
            body[draw.randrange(len(body))] = draw.randrange(256)
        status, content = self._ask("POST", "/api/map", bytes(body), **{"Content-Type": "application/json"})
        self._expect(status, content, 200, 400, 404)  # head may be null, and a changed digit is still a digit
        return "wrong queries"

    def _upload(self, draw: random.Random) -> str:
        format = draw.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"])
        picture = picture_file(draw.randint(1, 300), draw.randint(1, 300), seed=draw.getrandbits(30), format=format)
        status, content = self._ask("POST", "/api/pictures", picture)
        self._expect(status, content, 201)
        self.uploads.append(json.loads(content)["picture"])
        return "pictures"

    def _wrong_upload(self, draw: random.Random) -> str:
        if draw.random() < 0.1:
            body = huge_png(draw.choice([7_000, 65_000, 2**31 - 1]))
        else:
            format = draw.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"])
            changed = bytearray(picture_file(draw.randint(8, 60), 40, seed=draw.getrandbits(30), format=format))
            for _ in range(draw.choice([1, 4, 30])):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            body = bytes(changed[: draw.choice([len(changed), draw.randrange(len(changed))])])
        status, content = self._ask("POST", "/api/pictures", body)
        self._expect(status, content, 201, 422)
        return "damaged pictures"

    def _malformed(self, draw: random.Random) -> str:
        request = bytearray(b"POST /api/map HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        for _ in range(draw.choice([1, 3, 10])):
            request[draw.randrange(len(request))] = draw.randrange(256)
        with socket.create_connection(("127.0.0.1", self.port), timeout=50) as connection:
            connection.sendall(request)
            with contextlib.suppress(OSError):  # the server may have answered and closed already
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):  # a server may refuse what it has not read to the end
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
                assert not answer or b'{"error":' in answer, f"{bytes(request)!r} got {answer[:300]!r}"
        return "malformed requests"

    def _leave(self, draw: random.Random) -> str:
        body = json.dumps(self._query(draw)).encode()
        lines = ("POST /api/map HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "", "")
        request = "\r\n".join(lines).encode() + body
        with socket.create_connection(("127.0.0.1", self.port), timeout=50) as connection:
            connection.sendall(request[: draw.randrange(len(request) + 1)])
        return "visitors who left"


REQUESTS: dict[Callable[[Page, random.Random], str], int] = {
    Page._file: 25,
    Page._map: 15,
    Page._wrong_map: 20,
    Page._upload: 3,
    Page._wrong_upload: 12,
    Page._malformed: 15,
    Page._leave: 10,
}


def _resident(process: int) -> int:
    """Resident memory of a process in bytes, as Linux counts it."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096


def _numbers(values: Any) -> list[float]:
    return [number for value in values for number in _numbers(value)] if isinstance(values, list) else [values]
