"""A download that survives an interruption: `.NAME.<CRC-32>-<bytes>.part` beside its destination.

The next call reads the bytes in the file and checks their CRC before it relies on them. The writing process locks the
file. The file's name identifies the checkpoint, so another checkpoint starts a new file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.command.place import sync_directory
from holdfast.errors import BusyError, StoreError

_log = logging.getLogger("holdfast.cli")


@contextmanager
def partial(path: Path, crc32: int, nbytes: int) -> Iterator[int]:
    """Open the partial file, which may have content from an earlier call; an error inside the block keeps it. Without
    an error, sync the file, rename it to `path`, and remove the partial files of other checkpoints for `path`. Raises
    `BusyError`: another process writes the file; `StoreError`: the file is not the caller's own, and stays; `OSError`.
    """
    part = path.with_name(f".{path.name}.{crc32:08x}-{nbytes}.part")
    fd = _open_locked(part)
    try:
        try:
            yield fd
        except BaseException:
            if os.fstat(fd).st_size:
                _log.warning(
                    "%s: the part that was fetched is kept; run the same command again to fetch the rest",
                    part,
                )
            else:  # empty, perhaps truncated by the writer because it was damaged
                part.unlink()
            raise
        os.fsync(fd)
        part.rename(path)
        if not os.path.samestat(os.fstat(fd), path.lstat()):
            raise StoreError(
                f"{path}: another process put a different file there; fetch to a directory of your own"
            )
    finally:
        os.close(fd)
    sync_directory(path.parent)
    _remove_others(path)


def _open_locked(part: Path, *, create: bool = True) -> int:
    """Open and lock it. Raises `BusyError`: another process writes it; `StoreError`: it is not the caller's own."""
    while True:
        fd = _open(part, create=create)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), part.lstat()):
                    return fd
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EWOULDBLOCK:
                raise
            raise BusyError(
                f"{part}: another process is fetching this file; wait until it has ended"
            ) from error
        os.close(fd)  # its previous writer has just renamed or removed it


def _open(part: Path, *, create: bool) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        if create:
            return os.open(part, flags | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fd = os.open(part, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_own_file(part) from error
        if isinstance(error, FileNotFoundError) and create:
            return _open(part, create=create)  # its previous writer has just renamed it
        raise
    found = os.fstat(fd)
    # Refuse a hard link to another file of the caller's, and a file that another user can still write.
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid != os.geteuid():
        os.close(fd)
        raise _not_own_file(part)
    return fd


def _not_own_file(part: Path) -> StoreError:
    return StoreError(
        f"{part}: expected a regular file of uid {os.geteuid()} without other hard links; "
        "remove it, or fetch to another directory"
    )


def _remove_others(path: Path) -> None:
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}-\d+\.part")
    for other in path.parent.iterdir():
        if name.fullmatch(other.name):
            with contextlib.suppress(OSError, BusyError, StoreError):
                fd = _open_locked(other, create=False)
                other.unlink()
                os.close(fd)
