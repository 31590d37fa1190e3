"""Downloads, from a server on this machine that behaves well or badly."""

import io
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from inline_attention.models import _download
from inline_attention.models.weights import download, read_checkpoint

HTML = b"<!DOCTYPE html>\n<html><body>Please sign in</body></html>"


def checkpoint_bytes(value=1.0):
    buffer = io.BytesIO()
    torch.save({"model": {"w": torch.full((1000,), value)}}, buffer)
    return buffer.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder for downloads in a cache of this test's own."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "torch" / "hub" / "checkpoints"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append(self.path)
        body = server.body
        if server.status != 200:
            return self.send_error(server.status)
        self.send_response(200)
        if server.send_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cut_after])
        if server.stall is not None:
            self.wfile.flush()
            server.stall.wait(20)

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client that hangs up is what these tests are about."""


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests, server.body, server.status = [], checkpoint_bytes(), 200
        server.send_length, server.cut_after, server.stall = True, None, None
        server.url = f"http://127.0.0.1:{server.server_port}/f/1d6b8191/?dl=1"  # as published: no file name at the end
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        if server.stall is not None:
            server.stall.set()
        server.shutdown()
        thread.join()


def test_downloads_once(hub, server, capfd):
    path = download(server.url, filename="model.pth")
    assert path == hub / "model.pth"
    assert "model.pth" in capfd.readouterr().err  # the progress bar
    assert torch.equal(read_checkpoint(path)["w"], torch.ones(1000))
    assert download(server.url, filename="model.pth", progress=False) == path
    assert server.requests == ["/f/1d6b8191/?dl=1"]
    assert [file.name for file in hub.iterdir()] == ["model.pth"]
    assert capfd.readouterr().err == ""


def test_file_is_readable_for_others_as_the_umask_allows(hub, server, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    assert download(server.url, filename="model.pth", progress=False).stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("send_length", [True, False])
def test_cut_connection_leaves_nothing(hub, server, send_length):
    server.cut_after, server.send_length = 2000, send_length
    with pytest.raises((ConnectionError, ValueError), match=r"cut after 2000 of|truncated") as caught:
        download(server.url, filename="model.pth", progress=False)
    assert "model.pth" in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
    assert list(hub.iterdir()) == []


def test_stalled_connection_ends(hub, server, monkeypatch):
    monkeypatch.setattr(_download, "_TIMEOUT", 0.2)
    server.cut_after, server.stall = 2000, threading.Event()
    with pytest.raises(ConnectionError, match="timed out"):
        download(server.url, filename="model.pth", progress=False)
    assert list(hub.iterdir()) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError, OSError])
def test_interrupted_download_leaves_nothing(hub, server, monkeypatch, interruption):
    """Ctrl-C, or a full disk, while the first half is on the disk already."""
    server.body = checkpoint_bytes() * 2000
    original = _download._chunks

    def interrupted(response):
        for index, chunk in enumerate(original(response)):
            if index == 2:
                assert [file.suffix for file in hub.iterdir()] == [".partial"]
                raise interruption("no space left")
            yield chunk

    monkeypatch.setattr(_download, "_chunks", interrupted)
    with pytest.raises(interruption) as caught:
        download(server.url, filename="model.pth", progress=False)
    assert type(caught.value) is interruption  # not taken for a failure of the network
    assert list(hub.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [(HTML, "web page"), (b"", "is empty"), (b'{"error": "quota exceeded"}', "neither a safetensors file nor")],
)
def test_what_is_not_weights_is_not_kept(hub, server, body, message):
    server.body = body
    with pytest.raises(ValueError, match=message) as caught:
        download(server.url, filename="model.pth", progress=False)
    assert ".partial" not in str(caught.value)
    assert list(hub.iterdir()) == []


@pytest.mark.parametrize("status", [404, 503])
def test_http_error_is_one_sentence(hub, server, status):
    server.status = status
    with pytest.raises(ConnectionError, match=str(status)) as caught:
        download(server.url, filename="model.pth", progress=False)
    message = str(caught.value)
    for part in ("127.0.0.1", "model.pth", str(hub)):
        assert part in message
    assert "\n" not in message
    assert list(hub.iterdir()) == []


def test_unreachable_host_is_one_sentence(hub):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/?dl=1"
        with pytest.raises(ConnectionError, match="refused") as caught:
            download(url, filename="model.pth", progress=False)
    message = str(caught.value)
    for part in ("127.0.0.1", "model.pth", str(hub)):
        assert part in message
    assert "\n" not in message


def test_file_put_there_by_hand_is_used(hub, server):
    hub.mkdir(parents=True)
    (hub / "model.pth").write_bytes(checkpoint_bytes(5.0))
    assert read_checkpoint(download(server.url, filename="model.pth"))["w"][0] == 5
    assert server.requests == []


@pytest.mark.parametrize("cached", [b"", HTML, checkpoint_bytes()[:3000]], ids=["empty", "html", "truncated"])
def test_cached_file_that_does_not_read_is_replaced(hub, server, cached):
    hub.mkdir(parents=True)
    (hub / "model.pth").write_bytes(cached)
    with pytest.warns(UserWarning, match=r"model\.pth .* downloaded again"):
        path = download(server.url, filename="model.pth", progress=False)
    assert path.read_bytes() == server.body

    path.write_bytes(cached)
    server.status = 404
    with pytest.warns(UserWarning, match="downloaded again"), pytest.raises(ConnectionError):
        download(server.url, filename="model.pth", progress=False)
    assert path.read_bytes() == cached  # what the user put there is not destroyed for nothing


@pytest.mark.parametrize("filename", ["", ".", "..", "../model.pth", "a/b.pth", "/model.pth"])
def test_filename_stays_in_the_folder(hub, server, filename):
    with pytest.raises(ValueError, match="filename"):
        download(server.url, filename=filename)
    assert server.requests == []
