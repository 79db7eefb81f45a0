"""Reuses the blocks of a removed checkpoint for the next one.

    retire ─► .holdfast/tmp/spare.…, durably ─► begin: nobody else has it? ─► the next upload's temporary file
                        └── a second one, close ─► removed         └── somebody has ─► removed; new blocks

Overwriting blocks may be much faster than allocating new ones (docs/design/004-names-by-attempt.md).

A process that has the old file open, mapped or linked would see it change; such a file is not reused. The kernel can
tell, for local file systems only: it grants a write lease only on a file that nobody else has open.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import secrets
import stat
import threading
from pathlib import Path

from holdfast.faultpoint import Point, reach
from holdfast.store.names import temporary_name
from holdfast.store.posix_io import make_directories, sync_directory

_log = logging.getLogger("holdfast.store.posix")

# statfs(2): these overwrite in place, and are local.
_EXT, _XFS = 0xEF53, 0x58465342
_STATFS_BYTES = 512  # more than the structure needs anywhere


class SpareFile:
    """Keeps at most one old file, whose blocks are reused. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._spare: Path | None = None
        self._lock = threading.Lock()

    def keep(self, path: Path) -> bool:
        """Hide an unwanted file, durably; return False: delete it. Raises `OSError` if it may not be durable."""
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or not status.st_size or not writes_in_place(path.parent):
                return False
            spare = self._root / temporary_name(f"spare.{secrets.token_hex(8)}", "room")
            make_directories(spare.parent)
            path.rename(spare)
        except OSError:
            return False
        try:
            # Before anything overwrites it: a power cut must not bring the old name back with new bytes.
            sync_directory(path.parent)
            sync_directory(spare.parent)
        except BaseException:
            spare.unlink(missing_ok=True)
            raise
        reach(Point.FILE_RETIRED)
        with self._lock:
            older, self._spare = self._spare, spare
        if older is not None:
            older.unlink(missing_ok=True)
        return True

    def reuse_for(self, fresh: Path, descriptor: int) -> int:
        """Put the kept file in the place of a new, empty one. Return the descriptor to use: of the kept file under the
        new name (`descriptor` is closed), or `descriptor` if there is no kept file or another process has it.
        """
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None:
            return descriptor
        try:
            kept = os.open(spare, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            _log.info("%s: the disk space of this old checkpoint is not reused: %s", spare, error)
            spare.unlink(missing_ok=True)
            return descriptor
        try:
            if not _is_ours_alone(kept, like=descriptor):
                _log.info(
                    "%s: another process has the file open or linked, so its disk space is not reused", spare
                )
                spare.unlink(missing_ok=True)
                os.close(kept)
                return descriptor
            spare.rename(fresh)
        except BaseException:
            os.close(kept)
            raise
        reach(Point.ROOM_TAKEN)
        os.close(descriptor)
        return kept

    def drop(self) -> bool:
        """Remove the kept file; return whether there was one."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.unlink(missing_ok=True)
        return spare is not None


def _is_ours_alone(descriptor: int, *, like: int) -> bool:
    """Whether nobody else has the file open, mapped or under a second name; it then gets the new file's permissions."""
    status, wanted = os.fstat(descriptor), os.fstat(like)
    owner = (status.st_uid, status.st_gid, status.st_dev)
    if status.st_nlink != 1 or owner != (wanted.st_uid, wanted.st_gid, wanted.st_dev):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    if status.st_mode != wanted.st_mode:
        os.fchmod(descriptor, stat.S_IMODE(wanted.st_mode))
    return True


def writes_in_place(directory: Path) -> bool:
    """Whether files there are overwritten in place, and opened through this machine's kernel alone: ext4 and XFS."""
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).statfs(os.fsencode(directory), answer) != 0:
        return False
    return ctypes.c_long.from_buffer(answer).value in (_EXT, _XFS)
