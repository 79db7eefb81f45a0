"""A download that survives an interruption: `.NAME.<CRC-32>-<bytes>.part` beside its destination.

The next call reads the bytes in it and checks their CRC before it relies on them. The process that writes the file has
a lock on it. The name identifies the checkpoint, so another checkpoint starts a new file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.command.place import sync_directory
from holdfast.errors import BusyError

_log = logging.getLogger("holdfast.cli")


@contextmanager
def partial(path: Path, crc32: int, nbytes: int) -> Iterator[int]:
    """Open the partial file, which may have content from an earlier call. An error inside keeps it for the next call.

    On leaving without an error, the file is synced and renamed to `path`, and partial files of other checkpoints for
    the same path are removed.

    Args:
        path: Destination.
        crc32: CRC-32 of the whole file.
        nbytes: Size of the whole file.

    Raises:
        BusyError: Another process writes the same file.
        OSError: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.{crc32:08x}-{nbytes}.part")
    fd = _locked(part)
    try:
        try:
            yield fd
        except BaseException:
            if os.fstat(fd).st_size:
                _log.warning(
                    "%s: the part that was fetched is kept; run the same command again to fetch the rest",
                    part,
                )
            else:  # empty, or emptied by the writer because it was damaged
                part.unlink()
            raise
        os.fsync(fd)
        part.rename(path)
    finally:
        os.close(fd)
    sync_directory(path.parent)
    _remove_others(path)


def _locked(part: Path) -> int:
    while True:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), part.stat()):
                    return fd
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EWOULDBLOCK:
                raise
            raise BusyError(
                f"{part}: another process is fetching this file; wait until it has ended"
            ) from error
        os.close(fd)  # whoever had it has just renamed or removed it


def _remove_others(path: Path) -> None:
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}-\d+\.part")
    for other in path.parent.iterdir():
        if name.fullmatch(other.name):
            with contextlib.suppress(OSError, BusyError):
                fd = _locked(other)
                other.unlink()
                os.close(fd)
