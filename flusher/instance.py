"""One flusher per run on this machine: a lock that the kernel gives back when its holder dies, however it dies.

`flusher.pid` in the run's runtime directory is locked with `flock` for as long as the process lives; the number in it
is only for people and messages. A file that a dead flusher left is simply locked again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from holdfast.errors import FencedError
from holdfast.ring.directory import make_private_directory, open_private_file

__all__ = ["Instance"]

_PID_NAME = "flusher.pid"
_PID_BYTES_MAX = 32


class Instance:
    """The right to be the flusher of one run on this machine.

    Args:
        directory: The run's runtime directory; made if it is not there.

    Raises:
        FencedError: Another flusher holds it; names its pid.
        ConfigError: The directory is not safely ours.
    """

    def __init__(self, directory: Path) -> None:
        make_private_directory(directory)
        self.directory = directory
        self._path = directory / _PID_NAME
        self._fd = self._lock()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _lock(self) -> int:
        while True:
            fd = open_private_file(self._path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, _PID_BYTES_MAX, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                raise FencedError(
                    f"process {pid} is already the flusher of this run ({self.directory}); let it finish, or end it"
                ) from None
            # The one before may have removed the file between our open and our lock: then we hold nothing.
            try:
                if os.path.samestat(os.fstat(fd), self._path.lstat()):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)

    def release(self, *, keep_directory: bool) -> None:
        """Give the right back; remove the directory unless something in it is still wanted."""
        self._path.unlink(missing_ok=True)
        if not keep_directory:
            with contextlib.suppress(OSError):  # not empty: the next flusher may already be at work in it
                self.directory.rmdir()
        os.close(self._fd)
