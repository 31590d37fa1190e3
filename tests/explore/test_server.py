"""Requests over a real connection: which are answered, how large they may be, and that visitors are kept apart."""

import errno
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from explored import ask, huge_png, picture_file, serve

from inline_attention.cli import main
from inline_attention.explore import ExploreServer, Subject, messages, open_server
from inline_attention.explore import cost as cost_module
from inline_attention.explore import server as server_module
from inline_attention.explore.gate import Busy, Gate
from inline_attention.explore.pictures import MAX_BYTES
from inline_attention.explore.server import MAX_CONNECTIONS, names_this_machine

QUERY = dict(picture="china", model=2, layer=1, head=0, x=0.4, y=0.6)


@pytest.fixture(scope="module")
def server(subjects: list[Subject]) -> Iterator[ExploreServer]:
    yield from serve(subjects)


def test_the_page_needs_nothing_from_elsewhere(server: ExploreServer) -> None:
    status, page, response = ask(server, "GET", "/")
    assert status == 200
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert b"http://" not in page
    assert b"https://" not in page
    for address in ("/style.css", "/main.js", "/attention.js", "/plane.js", "/image.js", "/cost.js", "/dom.js"):
        status, content, _ = ask(server, "GET", address)
        assert status == 200
        assert b"https://" not in content
        assert b"http://" not in content.replace(b"http://www.w3.org/2000/svg", b"")  # a name, not an address


def test_setup(server: ExploreServer) -> None:
    status, setup, _ = ask(server, "GET", "/api/setup")
    assert status == 200
    assert [(model["kind"], model["layers"]) for model in setup["models"]] == [
        ("softmax", 3),
        ("linear", 3),
        ("inline", 3),
    ]
    weights = [model["weights"] for model in setup["models"]]
    assert weights == ["softmax_deit_study.safetensors", None, "inline_deit_study.safetensors"]
    for photo in setup["photos"]:
        status, content, _ = ask(server, "GET", f"/pictures/{photo['picture']}")
        assert status == 200
        assert content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("host", "bound_to", "expected"),
    [
        ("127.0.0.1:7860", "127.0.0.1", True),
        ("localhost:8000", "127.0.0.1", True),  # a forwarded port
        ("[::1]:7860", "::1", True),
        ("evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("192.168.1.5:7860", "127.0.0.1", False),
        ("192.168.1.5:7860", "0.0.0.0", True),
        (socket.gethostname(), "0.0.0.0", True),
        (socket.gethostname(), "127.0.0.1", False),
        ("evil.example", "0.0.0.0", False),
        ("", "0.0.0.0", False),
        (None, "127.0.0.1", False),
        ("[::1", "127.0.0.1", False),
    ],
)
def test_hosts(host: str | None, bound_to: str, expected: bool) -> None:
    assert names_this_machine(host, bound_to=bound_to) is expected


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},  # a name that was made to lead here
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},  # another server of this machine
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/api/setup"), ("POST", "/api/map"), ("POST", "/api/measure")])
def test_other_pages_are_refused(server: ExploreServer, method: str, path: str, headers: dict[str, str]) -> None:
    status, content, _ = ask(server, method, path, QUERY if method == "POST" else None, **headers)
    assert status == 403
    assert "error" in content


def test_own_page_is_answered(server: ExploreServer) -> None:
    origin = server.url.removesuffix("/")
    assert ask(server, "POST", "/api/map", QUERY, Origin=origin, Sec_Fetch_Site="same-origin")[0] == 200
    # A link on another page may open this one.
    assert ask(server, "GET", "/", Sec_Fetch_Site="cross-site")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/../pyproject.toml", 404),
        ("GET", "/%2e%2e/app.py", 404),
        ("GET", "//etc/passwd", 404),
        ("GET", "/pictures/../app.py", 404),
        ("GET", "/pictures/unknown", 404),
        ("GET", "/api/map", 405),
        ("POST", "/api/setup", 405),
        ("POST", "/", 404),
        ("DELETE", "/api/setup", 501),
    ],
)
def test_wrong_addresses(server: ExploreServer, method: str, path: str, status: int) -> None:
    got, content, _ = ask(server, method, path)
    assert got == status
    assert content["error"]
    assert "Traceback" not in content["error"]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"picture": "unknown"}, 404, "load it again"),
        ({"picture": None}, 404, "load it again"),
        ({"model": 3}, 400, "model is 3; expected a whole number below 3"),
        ({"model": True}, 400, "model is True"),
        ({"layer": -1}, 400, "layer is -1; expected a whole number below 3"),
        ({"layer": 1.0}, 400, "layer is 1.0"),
        ({"head": "0"}, 400, "head is '0'"),
        ({"head": -1}, 400, "head is -1"),
        ({"x": 1.5}, 400, "x is 1.5; expected a number from 0 to 1"),
        ({"y": float("nan")}, 400, "y is nan"),
        ({"y": "a" * 1000}, 400, "y is 'aaaa"),
    ],
)
def test_wrong_queries(server: ExploreServer, change: dict[str, Any], status: int, message: str) -> None:
    got, content, _ = ask(server, "POST", "/api/map", QUERY | change)
    assert got == status
    assert message in content["error"]
    assert len(content["error"]) < 200


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 4000, "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"{}", "text/plain", 415),  # what a page of another site may post without asking
        (b" " * 5000, "application/json", 413),
    ],
)
def test_wrong_bodies(server: ExploreServer, body: bytes, content_type: str, status: int) -> None:
    got, content, _ = ask(server, "POST", "/api/map", body, Content_Type=content_type)
    assert got == status
    assert content["error"]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (dict(model=3), 400, "model is 3; expected a whole number below 3"),
        (dict(model=None), 400, "model is None"),
        (dict(picture="../secret"), 404, "the picture is no longer here"),
    ],
)
def test_wrong_requests_for_predictions(
    server: ExploreServer, change: dict[str, Any], status: int, message: str
) -> None:
    found, answer, _ = ask(server, "POST", "/api/prediction", {"picture": "china", "model": 0, **change})
    assert found == status
    assert message in answer["error"]


def test_uploads(server: ExploreServer) -> None:
    status, content, _ = ask(server, "POST", "/api/pictures", picture_file())
    assert status == 201
    assert ask(server, "POST", "/api/map", QUERY | content)[0] == 200
    status, content, _ = ask(server, "POST", "/api/pictures", b"not an image")
    assert status == 422
    assert "not an image" in content["error"]
    status, content, _ = ask(server, "POST", "/api/pictures", huge_png(7000))
    assert status == 422
    assert "7000 × 7000" in content["error"]


def test_a_large_upload_is_refused_unread_and_the_answer_arrives(server: ExploreServer) -> None:
    status, content, _ = ask(server, "POST", "/api/pictures", bytes(MAX_BYTES + 1))
    assert status == 413
    assert "16.0 MiB" in content["error"]


def exchange(server: ExploreServer, request: bytes) -> bytes:
    """Send raw bytes and return the whole answer."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=300) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Length: 100", 400),  # a body that does not come
        ("Content-Length: -5", 400),
        ("Content-Length: 9999999999999999999999", 400),
        ("Content-Length: 9999999999", 413),
        ("Transfer-Encoding: chunked", 411),
    ],
)
def test_lengths(server: ExploreServer, headers: str, status: int) -> None:
    request = f"POST /api/pictures HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n"
    answer = exchange(server, request.encode())
    assert answer.startswith(f"HTTP/1.0 {status} ".encode())
    assert b'{"error":' in answer


@pytest.mark.parametrize(
    "start",
    [b"GET / HTTP/1.0\r\nX: ", b"POST /api/map HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
     b"Content-Length: 4000\r\n\r\n"],
    ids=["headers", "body"],
)  # fmt: skip
def test_dripping_connections_do_not_block_the_page(
    server: ExploreServer, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    """As many connections as the server accepts, each sending a byte now and then for as long as possible."""
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(messages, "JSON_SECONDS", 1.0)
    over = threading.Event()
    with ExitStack() as stack:
        address = ("127.0.0.1", server.server_address[1])
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(MAX_CONNECTIONS)]

        def drip() -> None:
            for connection in connections:
                connection.sendall(start)
            while not over.wait(0.1):
                for connection in connections:
                    with suppress(OSError):  # closed by the server
                        connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        over.wait(0.3)  # all of them are being served
        assert ask(server, "GET", "/")[0] == 200


def test_malformed_requests_get_a_message(server: ExploreServer) -> None:
    for request in (b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70000 + b" HTTP/1.0\r\n\r\n"):
        answer = exchange(server, request)
        assert b'{"error":' in answer
        assert b"Traceback" not in answer


def test_visitors_do_not_meet(server: ExploreServer) -> None:
    """Two visitors with their own pictures send ten requests each at once. Each gets the same answers as alone."""
    names = [ask(server, "POST", "/api/pictures", picture_file(seed=seed))[1]["picture"] for seed in (1, 2)]
    wishes = [QUERY | dict(picture=names[i % 2], layer=i % 3, x=(i % 5) / 5) for i in range(20)]
    alone = [ask(server, "POST", "/api/map", wish)[1] for wish in wishes]
    assert alone[0]["weights"] != ask(server, "POST", "/api/map", wishes[0] | {"picture": names[1]})[1]["weights"]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda wish: ask(server, "POST", "/api/map", wish)[1], wishes))
    assert together == alone
    pictures = [ask(server, "GET", f"/pictures/{name}")[1] for name in names]
    assert pictures[0] != pictures[1]


def test_the_gate_lets_one_run_and_some_wait() -> None:
    gate = Gate(waiting=1, seconds=0.2)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with gate.turn():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait(10)
    with pytest.raises(Busy, match="no turn came"), gate.turn():
        pass
    waiting = threading.Thread(target=lambda: leave.wait(0.1) or leave.set())
    waiting.start()
    with gate.turn():  # as soon as the first has left
        assert leave.is_set()
    thread.join()
    waiting.join()


@pytest.mark.parametrize(
    ("error", "shown"),
    [(ConnectionResetError(), False), (OSError(errno.EBADF, "Bad file descriptor"), False), (KeyError("a bug"), True)],
)
def test_only_errors_of_ours_are_printed(
    error: Exception, shown: bool, server: ExploreServer, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise error
    except Exception:
        server.handle_error(None, None)
    assert ("Traceback" in capsys.readouterr().err) == shown


def test_a_closed_gate_waits_for_threads_whose_turn_is_over() -> None:
    """Such a thread may still be freeing tensors."""
    gate = Gate(waiting=0)
    over, closing = threading.Event(), threading.Event()
    ended = []

    def compute() -> None:
        with gate.turn():
            pass
        over.set()
        closing.wait(10)
        ended.append(True)

    thread = threading.Thread(target=compute)
    thread.start()
    over.wait(10)
    threading.Timer(0.1, closing.set).start()
    gate.close()
    assert ended


def test_too_many_visitors_are_told_so(server: ExploreServer) -> None:
    gate = server.app._gate
    with gate.turn():
        places = [gate._places.acquire(blocking=False) for _ in range(100)].count(True)
        try:
            status, content, response = ask(server, "POST", "/api/map", QUERY)
        finally:
            for _ in range(places):
                gate._places.release()
    assert status == 503
    assert "try again" in content["error"]
    assert response.headers["Retry-After"]
    assert ask(server, "POST", "/api/map", QUERY)[0] == 200


def test_errors_of_ours_are_no_stack_traces(
    server: ExploreServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.app._maps, "attention_map", fail)
    status, content, _ = ask(server, "POST", "/api/map", QUERY)
    assert status == 500
    assert "secret" not in content["error"]
    assert "secret detail" in capfd.readouterr().err


def test_cost(server: ExploreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_module, "SIZES", (32, 64))
    status, content, _ = ask(server, "GET", "/api/cost")
    assert status == 200
    assert content["sizes"] == [32, 64]
    assert len(content["counts"]) == 6
    status, lines, _ = ask(server, "POST", "/api/measure", {})
    events = [json.loads(line) for line in lines.splitlines()]
    assert status == 200
    assert events[0]["done"] == 0
    assert events[-1]["done"] == events[-1]["total"] == len(events) - 1
    assert {(event["kind"], event["size"]) for event in events if "kind" in event} == {
        (kind, size) for kind in ("softmax", "linear", "inline") for size in (32, 64)
    }


def test_who_leaves_ends_the_measurement(server: ExploreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_module, "SIZES", (32,) * 1000)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=300) as connection:
        connection.sendall(b"POST /api/measure HTTP/1.0\r\nHost: localhost\r\n\r\n")
        connection.recv(10)  # it has begun
        status, content, _ = ask(server, "POST", "/api/measure", {})
        assert status == 503
        assert "another measurement is running" in content["error"]
    monkeypatch.setattr(cost_module, "SIZES", (32,))
    for _ in range(100):
        status = ask(server, "POST", "/api/measure", {})[0]
        if status == 200:
            break
        threading.Event().wait(0.1)
    assert status == 200


def test_a_port_in_use(server: ExploreServer, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.server_address[1]
    with pytest.raises(ValueError, match=rf"port {port} of 127.0.0.1 is in use.*--port"):
        open_server(server.app, host="127.0.0.1", port=port)
    with pytest.raises(ValueError, match="cannot listen"):
        open_server(server.app, host="no.such.host.invalid", port=0)
    assert main(["explore", "--port", "70000"]) == 2
    assert "port 70000; expected 0 (any free one) to 65535" in capsys.readouterr().err
