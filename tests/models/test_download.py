"""Downloads, from a server on this machine that behaves well or badly."""

import hashlib
import io
import logging
import pickle
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import timm
import torch

from inline_attention import create_model
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
        if server.redirect:
            self.send_response(302)
            self.send_header("Location", server.redirect)
            return self.end_headers()
        if server.status != 200:
            return self.send_error(server.status)
        self.send_response(200)
        if server.send_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for start in range(0, len(body[: server.cut_after]), server.piece):
            self.wfile.write(body[: server.cut_after][start : start + server.piece])
            time.sleep(server.pause)
        if server.stall is not None:
            self.wfile.flush()
            server.stall.wait(20)

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Print nothing: these tests expect clients that disconnect."""


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests, server.body, server.status = [], checkpoint_bytes(), 200
        server.send_length, server.cut_after, server.stall, server.redirect = True, None, None, None
        server.piece, server.pause = 1 << 20, 0.0
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
    assert path.read_bytes() == cached  # a failed download keeps the user's file


@pytest.mark.parametrize("filename", ["", ".", "..", "../model.pth", "a/b.pth", "/model.pth"])
def test_filename_stays_in_the_folder(hub, server, filename):
    with pytest.raises(ValueError, match="filename"):
        download(server.url, filename=filename)
    assert server.requests == []


def test_too_large_a_file_is_not_kept(hub, server, monkeypatch):
    monkeypatch.setattr(_download, "_MAX_BYTES", 1000)
    for send_length, message in ((True, "announces .* more than the limit"), (False, "sent more than the limit")):
        server.send_length = send_length
        with pytest.raises(ConnectionError, match=message):
            download(server.url, filename="model.pth", progress=False)
    assert list(hub.iterdir()) == []


def test_slow_server_meets_the_deadline(hub, server, monkeypatch):
    """Every byte arrives in time, but the whole file does not."""
    monkeypatch.setattr(_download, "_DEADLINE", 0.5)
    server.piece, server.pause = 10, 0.05
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="not complete after"):
        download(server.url, filename="model.pth", progress=False)
    assert time.monotonic() - start < 10
    assert list(hub.iterdir()) == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/model.pth", "file:///etc/passwd", "data:,x", "model.pth"])
def test_only_http_is_followed(hub, server, url):
    with pytest.raises(ValueError, match="http"):
        download(url, filename="model.pth", progress=False)
    server.redirect = url if ":" in url else f"gopher://{url}"
    with pytest.raises(ConnectionError, match=r"only http and https|not allowed"):
        download(server.url, filename="model.pth", progress=False)
    assert list(hub.iterdir()) == []


def test_digest_is_compared_or_logged(hub, server, caplog):
    digest = hashlib.sha256(server.body).hexdigest()
    with pytest.raises(ValueError, match=f"its SHA-256 is {digest}, expected {'0' * 64}"):
        download(server.url, filename="model.pth", sha256="0" * 64, progress=False)
    assert list(hub.iterdir()) == []
    with caplog.at_level(logging.WARNING):
        download(server.url, filename="model.pth", sha256=digest, progress=False)
        assert not caplog.records
        download(server.url, filename="other.pth", progress=False)
    assert digest in caplog.text


def test_pretrained_weights_belong_to_their_address(hub, server):
    """One model, two addresses: the cache keeps both files, and the plain name stays free."""
    model = create_model("inline_deit_tiny", depth=1)
    tensors, found = model.state_dict(), []
    for number, value in enumerate((1.0, 2.0, 1.0)):
        buffer = io.BytesIO()
        torch.save({"model": {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}}, buffer)
        server.body = buffer.getvalue()
        overlay = dict(url=server.url + ("" if value == 1 else "&v=2"))
        loaded = create_model("inline_deit_tiny", depth=1, pretrained=True, pretrained_cfg_overlay=overlay)
        found.append(loaded.head.bias[0].item())
        assert len(server.requests) == min(number + 1, 2)
    assert found == [1, 2, 1]
    assert not (hub / "inline_deit_tiny.pth").exists()


def test_pretrained_weights_in_a_folder_of_the_users(hub, server, tmp_path):
    buffer = io.BytesIO()
    torch.save(create_model("inline_deit_tiny", depth=1).state_dict(), buffer)
    server.body = buffer.getvalue()
    options = dict(depth=1, pretrained=True, pretrained_cfg_overlay=dict(url=server.url), cache_dir=tmp_path / "mine")
    for _ in range(2):
        create_model("inline_deit_tiny", **options)
    assert len(list((tmp_path / "mine").iterdir())) == len(server.requests) == 1
    assert not hub.exists()


def test_configuration_keeps_no_copy_of_the_weights(hub, server):
    buffer = io.BytesIO()
    torch.save(create_model("inline_deit_tiny", depth=1).state_dict(), buffer)
    server.body = buffer.getvalue()
    options = dict(pretrained=True, depth=1, pretrained_cfg_overlay=dict(url=server.url))
    for model in (
        create_model("inline_deit_tiny", **options),
        create_model("inline_deit_tiny", features_only=True, out_indices=1, **options),
        create_model("inline_deit_study", pretrained=True, features_only=True),
        create_model("inline_deit_study", pretrained=True),
    ):
        for module in model.modules():
            assert "state_dict" not in getattr(module, "pretrained_cfg", {})
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        assert len(pickle.dumps(model)) < 1.3 * weights


def test_timm_lists_the_weights_of_the_package():
    names = [f"{kind}_deit_study" for kind in ("inline", "linear", "softmax")]
    assert timm.list_models("*_deit_study", pretrained=True) == [f"{name}.tiny_imagenet_100c" for name in names]
