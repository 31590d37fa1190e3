"""A file lock between processes. The kernel releases it when its process ends, also when it is killed."""

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
    """A lock between processes, not between threads. On Windows and some network file systems it locks nothing.

    It is a POSIX lock (`lockf`), which belongs to the process. A `flock` belongs to the open file: forked data loader
    workers would inherit it, and hold it for seconds after the training process was killed. A POSIX lock is released
    when any descriptor of its file is closed, so its process must not open the file elsewhere. The file is never
    removed: two processes could then lock two files of the same name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Try to lock; False: another process holds the lock. The folder of the file must exist."""
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
        """ "PID on HOST" of the process that took the lock last."""
        return self.path.read_text()
