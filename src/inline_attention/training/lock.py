"""A lock on a file: one process at a time, and the kernel releases it when that process ends, however it ends."""

import errno
import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # on this file system


class FileLock(AbstractContextManager["FileLock"]):
    """Between processes, not between threads. Without locks (Windows, some network file systems) anyone may take it.

    A POSIX lock (`lockf`) belongs to the process. That of `flock` belongs to the open file: forked data loader workers
    would inherit it, and keep it for seconds after the process that trains was killed. In return, closing any
    descriptor of the file releases a POSIX lock, so the process that holds one opens the file nowhere else. The file
    stays: if it were removed, two processes could hold locks on two files of that name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Whether this process has the lock now; False: another one has it. The file's folder must exist."""
        if self._descriptor is not None:
            return True
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                if error.errno in _TAKEN:
                    return False
                raise
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode())
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __exit__(self, *_: object) -> None:
        self.release()

    def holder(self) -> str:
        """ "PID on HOST" of who took it last"""
        return self.path.read_text()
