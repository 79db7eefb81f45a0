"""The lock that a live `holdfast run` keeps beside a ring, and the checkpoints that it has set aside.

The lock keeps the ring from job to job; the kernel releases it when its holder dies. A flusher with nothing left to do
checks whether anyone holds it: the next attempt then restores from the ring.

Checkpoints that were set aside are evidence of what went wrong, so retention keeps them for as long as the run is
supervised. Each is a line of a file, appended by one write: a line without its end is still being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from holdfast.errors import ConfigError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.directory import machine_error, make_private_directory, open_private_file, private_file

SET_ASIDE_NAME = "set-aside"
_NAME = "keeper"
_BYTES_MAX = 1 << 16


class RingKeeper:
    """Keeps a run's ring until `close` or the end of this process. Several keepers may exist. `directory`: the run's
    runtime directory; made if missing. Raises `ConfigError`: it is not private to this user.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = self._lock_file()

    def _lock_file(self) -> int:
        while True:
            make_private_directory(self._directory)
            try:
                fd = open_private_file(self._directory / _NAME, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # a flusher that ends has just removed the directory
                continue
            fcntl.flock(fd, fcntl.LOCK_SH)
            # A process that looked in between may have removed the file as that of a dead keeper.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), (self._directory / _NAME).lstat()):
                    return fd
            os.close(fd)

    def close(self) -> None:
        """Let the flusher end once it is idle. Without a flusher, remove the lock file, and an empty directory."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        os.close(fd)
        is_ring_kept(self._directory)
        with contextlib.suppress(OSError):  # a ring is in it
            self._directory.rmdir()


def is_ring_kept(directory: Path) -> bool:
    """Whether a live process keeps the ring of this runtime directory. The file of a dead one is removed."""
    path = directory / _NAME
    try:
        with private_file(path, os.O_RDWR) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.lstat()):
                path.unlink()
    except FileNotFoundError:
        return False
    except (BlockingIOError, StoreError):
        return True  # also out of descriptors: unknown until the next call
    return False


def record_set_aside(directory: Path, key: CheckpointId) -> None:
    """Append one. Raises `ConfigError`: the file is not ours; `StoreError`: the machine lacks something."""
    path = directory / SET_ASIDE_NAME
    try:
        with private_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
            os.write(fd, f"{key.label}\n".encode())
    except OSError as error:
        raise machine_error(path, error) from error


def read_set_aside(directory: Path) -> list[CheckpointId]:
    """Return all of them, oldest first; [] without the file. Unreadable lines are skipped."""
    try:
        with private_file(directory / SET_ASIDE_NAME, os.O_RDONLY) as fd:
            *lines, _ = os.pread(fd, _BYTES_MAX, 0).decode("ascii", "replace").split("\n")
    except (OSError, ConfigError, StoreError):
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(CheckpointId.from_label(line))
    return found
