"""The lock by which a living `holdfast run` keeps the ring of a run from job to job.

A lock on a file of the run's runtime directory, which the kernel takes from the dead. A flusher with nothing left to do
looks whether somebody has it: what is in the ring is then what the next attempt restores from.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from holdfast.errors import StoreError
from holdfast.ring.directory import make_private_directory, open_private_file

_NAME = "keeper"


class RingKeeper:
    """Keeps a run's ring, from now on until `close` or the end of this process. Several may.

    Args:
        directory: The run's runtime directory; made if it is not there.

    Raises:
        ConfigError: The directory is not safely ours.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = self._hold()

    def _hold(self) -> int:
        while True:
            make_private_directory(self._directory)
            try:
                fd = open_private_file(self._directory / _NAME, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # a flusher that ends has just taken the directory away
                continue
            fcntl.flock(fd, fcntl.LOCK_SH)
            # A process that looked in between may have taken the file for one that a dead keeper left.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), (self._directory / _NAME).lstat()):
                    return fd
            os.close(fd)

    def close(self) -> None:
        """Let the flusher end when it has done everything. Without a flusher nothing is left behind."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        os.close(fd)
        is_kept(self._directory)
        with contextlib.suppress(OSError):  # a ring is in it
            self._directory.rmdir()


def is_kept(directory: Path) -> bool:
    """Whether a living process keeps the ring of this runtime directory. The file of a dead one is removed."""
    path = directory / _NAME
    try:
        fd = open_private_file(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except StoreError:
        return True  # out of descriptors: nobody knows, and the next look tells
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.lstat()):
            path.unlink()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    finally:
        os.close(fd)
    return False
