"""Downloads of weights into torch.hub's cache, whole or not at all."""

import http.client
import os
import urllib.error
import urllib.request
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from urllib.parse import urlsplit

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from inline_attention._version import __version__

from ._checkpoint import check_checkpoint

_TIMEOUT = 30  # seconds without an answer or a byte
_CHUNK = 1 << 20


def download(url: str, *, filename: str, progress: bool = True) -> Path:
    """Downloads weights into the folder `checkpoints` of torch.hub's cache, unless they are there already.

    What arrives is kept only if it is complete and reads as weights. A cached file that does not is replaced.
    torch.hub's own function keeps a file that a broken connection cut short, and waits without limit.

    Args:
        filename: the name in the cache; a link need not end in one.
        progress: show a progress bar on the standard error stream.
    """
    if filename in ("", "..") or PurePath(filename).name != filename:
        raise ValueError(f"filename={filename!r}; expected the name of a file, without folders")
    folder = Path(torch.hub.get_dir(), "checkpoints")
    path = folder / filename
    if path.exists():
        try:
            check_checkpoint(path)
            return path
        except ValueError as error:
            warnings.warn(f"{error}; it is downloaded again", stacklevel=2)

    folder.mkdir(parents=True, exist_ok=True)
    host = urlsplit(url).hostname or url
    otherwise = f"put a copy that was downloaded by hand into {folder} as {filename}"
    with atomic_path(path) as temporary:
        try:
            _fetch(url, temporary, label=filename, progress=progress)
        except ConnectionError as error:
            raise ConnectionError(f"{filename} cannot be downloaded from {host} ({error}): {otherwise}") from error
        try:
            check_checkpoint(temporary)
        except ValueError as error:
            reason = str(error).replace(str(temporary), "it")
            raise ValueError(f"what {host} sent as {filename} was not kept ({reason}): {otherwise}") from error
    return path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, moved there when the block ends; removed when it raises."""
    # A name of its own, not tempfile's: files from there are readable for their owner alone.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _fetch(url: str, path: Path, *, label: str, progress: bool) -> None:
    """Every failure of the network is a ConnectionError with the reason; errors of the disk stay what they are."""
    request = urllib.request.Request(url, headers={"User-Agent": f"inline-attention/{__version__}"})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"it answered {error.code} {error.reason}") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise ConnectionError(getattr(error, "reason", None) or error) from error
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not progress)
    with response, path.open("wb") as file, bar:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        task = bar.add_task(label, total=total)
        received = 0
        for chunk in _chunks(response):
            file.write(chunk)
            received += len(chunk)
            bar.update(task, completed=received)
        if total is not None and received < total:
            raise ConnectionError(f"the connection was cut after {received} of {total} bytes")


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"the connection was cut: {error or type(error).__name__}") from error
        if not chunk:
            return
        yield chunk
