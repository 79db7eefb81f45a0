"""A file that is still coming, kept over a death: `.NAME.<CRC-32>-<bytes>.part`, beside where it will be.

What is in it is believed because it is read and summed again, never because it is there. It is locked by who writes it,
and a name tells of which checkpoint it is: another one begins anew.
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
    """Gives a file to write to, with what an earlier call has left in it. Inside, an error leaves it for the next call.

    Behind, it is durable and has the name `path`; what was left of other checkpoints that were to be there is removed.

    Args:
        path: Where it goes in the end.
        crc32: Of the whole.
        nbytes: Of the whole.

    Raises:
        BusyError: Another process writes it.
        OSError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.{crc32:08x}-{nbytes}.part")
    fd = _locked(part)
    try:
        try:
            yield fd
        except BaseException:
            if os.fstat(fd).st_size:
                _log.warning("%s: what has come is kept; the same command again fetches the rest", part)
            else:  # nothing worth keeping, or the writer wants it gone
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
            raise BusyError(f"{part}: another process is fetching this file; wait for it") from error
        os.close(fd)  # whoever had it has just renamed or removed it


def _remove_others(path: Path) -> None:
    """What is left of fetches that nobody goes on with."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}-\d+\.part")
    for other in path.parent.iterdir():
        if name.fullmatch(other.name):
            with contextlib.suppress(OSError, BusyError):
                fd = _locked(other)
                other.unlink()
                os.close(fd)
