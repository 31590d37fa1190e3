"""Downloads weights into torch.hub's cache, completely or not at all."""

import hashlib
import http.client
import logging
import os
import time
import urllib.error
import urllib.request
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import torch
from tqdm import tqdm  # a dependency of huggingface_hub, which timm needs

from inline_attention._version import __version__

from ._checkpoint import open_checkpoint
from .published import PUBLISHED

_TIMEOUT = 30  # seconds without an answer or a byte
_DEADLINE = 6 * 3600  # seconds for a whole download
_MAX_BYTES = 8 << 30  # several times the largest published checkpoint, optimizer state included
_CHUNK = 1 << 20
_SCHEMES = ("http", "https")

_logger = logging.getLogger(__name__)


def local_path(source: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None) -> Path:
    """The local path of a path or URL. An http(s) URL is downloaded first, unless it is in the cache.

    `folder` is the cache, as of `download`.
    """
    text = os.fspath(source)
    url = urlsplit(text)
    if url.scheme in _SCHEMES:
        name, sha256 = _cache_entry(text)
        return download(text, filename=name, folder=folder, sha256=sha256)
    return Path(urllib.request.url2pathname(url.path) if url.scheme == "file" else text).expanduser()


def _cache_entry(url: str) -> tuple[str, str]:
    """The file's name in the cache, and its SHA-256 if that is known.

    A published file has the name of its model. Any other name contains a digest of the URL, because many files are
    called model.safetensors.
    """
    for name, facts in PUBLISHED.items():
        if url == facts.url:
            return f"{name}.pth", facts.sha256
    file = PurePosixPath(urlsplit(url).path)
    return f"{file.stem or 'weights'}-{hashlib.sha256(url.encode()).hexdigest()[:16]}{file.suffix}", ""


def download(
    url: str,
    *,
    filename: str,
    folder: str | os.PathLike[str] | None = None,
    sha256: str = "",
    progress: bool = True,
) -> Path:
    """Downloads weights into a folder, unless they are there already.

    A download is kept only if it is complete and can be read as weights. A cached file that cannot be read is replaced.
    torch.hub's own function keeps truncated files and has no time limit.

    Args:
        url: http or https; redirects to other schemes are refused.
        filename: the name in the cache; a link need not end in one.
        folder: the cache. Default: `checkpoints` in torch.hub's.
        sha256: the expected digest. Without one, the digest of the download is logged.
        progress: show a progress bar on the standard error stream.
    """
    if filename in ("", "..") or PurePath(filename).name != filename:
        raise ValueError(f"filename={filename!r}; expected the name of a file, without folders")
    if urlsplit(url).scheme not in _SCHEMES:
        raise ValueError(f"url={url!r}; expected an address that begins with http:// or https://")
    folder = Path(torch.hub.get_dir(), "checkpoints") if folder is None else Path(folder).expanduser()
    path = folder / filename
    if path.exists():
        try:
            open_checkpoint(path)
            return path
        except ValueError as error:
            warnings.warn(f"{error}; it is downloaded again", stacklevel=2)

    folder.mkdir(parents=True, exist_ok=True)
    host = urlsplit(url).hostname or url
    otherwise = f"put a copy that was downloaded by hand into {folder} as {filename}"
    with atomic_path(path) as temporary:
        try:
            found = _fetch(url, temporary, label=filename, progress=progress)
        except ConnectionError as error:
            raise ConnectionError(f"{filename} cannot be downloaded from {host} ({error}): {otherwise}") from error
        try:
            if sha256 and found != sha256:
                raise ValueError(f"its SHA-256 is {found}, expected {sha256}")
            open_checkpoint(temporary)
        except ValueError as error:
            reason = str(error).replace(str(temporary), "it")
            raise ValueError(f"what {host} sent as {filename} was not kept ({reason}): {otherwise}") from error
    if not sha256:
        _logger.warning("%s has the SHA-256 %s; no published digest is known to compare it with", filename, found)
    return path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`. It is moved there at the end of the block, or removed after an error."""
    # Not from tempfile, whose files only their owner can read.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> urllib.request.Request | None:
        target = args[-1]
        if urlsplit(target).scheme not in _SCHEMES:
            raise urllib.error.URLError(f"it redirects to {target[:100]!r}, and only http and https are followed")
        return super().redirect_request(*args)


def _opener() -> urllib.request.OpenerDirector:
    """urllib's opener without its handlers of ftp:, file: and data: addresses."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        _Redirects,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _fetch(url: str, path: Path, *, label: str, progress: bool) -> str:
    """Write the content of a URL and return its SHA-256.

    Failures of the network are a ConnectionError with the reason. Errors of the disk are raised unchanged.
    """
    request = urllib.request.Request(url, headers={"User-Agent": f"inline-attention/{__version__}"})
    start = time.monotonic()
    try:
        response = _opener().open(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"it answered {error.code} {error.reason}") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise ConnectionError(getattr(error, "reason", None) or error) from error
    length = response.headers.get("Content-Length") or ""
    total = int(length) if length.isdecimal() else None
    digest, received = hashlib.sha256(), 0
    options: dict[str, Any] = dict(desc=label, total=total, unit="B", unit_scale=True, disable=not progress)
    with response, path.open("wb") as file, tqdm(**options) as bar:
        if total is not None and total > _MAX_BYTES:
            raise ConnectionError(f"it announces {total} bytes, more than the limit of {_MAX_BYTES}")
        for chunk in _chunks(response):
            file.write(chunk)
            digest.update(chunk)
            received += len(chunk)
            bar.update(len(chunk))
            if received > _MAX_BYTES:
                raise ConnectionError(f"it sent more than the limit of {_MAX_BYTES} bytes")
            if time.monotonic() - start > _DEADLINE:
                raise ConnectionError(f"it was not complete after {_DEADLINE} seconds, {received} bytes")
    if total is not None and received < total:
        raise ConnectionError(f"the connection was cut after {received} of {total} bytes")
    return digest.hexdigest()


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            # Returns the bytes that have arrived, so a slow server cannot delay the check of the deadline.
            chunk = response.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"the connection was cut: {error or type(error).__name__}") from error
        if not chunk:
            return
        yield chunk
