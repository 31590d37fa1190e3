"""Files that are written as a whole or not at all."""

import contextlib
import hashlib
import itertools
import os
import shutil
from pathlib import Path


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a kill at any moment leaves the old or the new content."""
    unfinished = path.with_name(f".{path.name}.saving")
    try:
        write_synced(unfinished, content)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, atomically; a copy if the file system has no hard links."""
    unfinished = target.with_name(f".{target.name}.saving")
    unfinished.unlink(missing_ok=True)
    try:
        os.link(source, unfinished)
    except OSError:
        shutil.copyfile(source, unfinished)
    unfinished.replace(target)


def remove(path: Path) -> None:
    """Remove a file or folder, and ignore errors. If something remains, the next write to that name raises."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def unused(path: Path) -> Path:
    """`path`, or the first of path.2, path.3, … that does not exist."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal text."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
