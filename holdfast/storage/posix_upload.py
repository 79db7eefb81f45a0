"""A big file on its way into a directory, written past the page cache.

Room is reserved first, so that a full disk is found before hours of training rest on it. Parts are written
with O_DIRECT where address, offset and size are multiples of 4096 bytes; the tail of the file goes through
one padded page, and the file is cut to its exact size at the end. Whatever does not fit that is written the
ordinary way into the same file.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import StoreError
from holdfast.storage.ledger import PartLedger
from holdfast.storage.posix_errors import free_bytes, no_room, translated

__all__ = ["PosixUpload", "make_directories", "sync_directory", "write_all"]

_log = logging.getLogger("holdfast.storage.posix")

_PAGE_BYTES = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


class PosixUpload:
    """Upload to a temporary file; `publish` renames it. `write_part` may be called from any thread.

    Args:
        path: Where the file will stand.
        temporary: Where it is written; on the same file system.
        nbytes: Size of the file.
        part_bytes: Size of a part.

    Raises:
        StoreError: No room (needed and free bytes in the message), no permission.
    """

    def __init__(self, *, path: Path, temporary: Path, nbytes: int, part_bytes: int) -> None:
        self._ledger = PartLedger(str(path), nbytes=nbytes, part_bytes=part_bytes)
        self._path, self._temporary = path, temporary
        self._published = False
        self._failure: StoreError | None = None
        self._direct = -1
        self._closing = threading.Lock()
        with translated("begin", path, needed_bytes=nbytes):
            make_directories(path.parent)
            make_directories(temporary.parent)
            self._file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                _reserve(self._file, path, nbytes)
                self._direct = _open_direct(temporary)
            except BaseException:
                os.close(self._file)
                temporary.unlink(missing_ok=True)
                raise

    @property
    def part_bytes(self) -> int:
        """Size of every part but the last."""
        return self._ledger.part_bytes

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:  # noqa: ARG002
        """Write a part to its place. The buffers' bytes are what is read back later; the file system checks
        no CRC.
        """
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        try:
            with (
                self._ledger.entry(index, buffers) as part,
                translated("write", self._path, needed_bytes=part.nbytes),
            ):
                if self._direct >= 0 and _is_aligned(views, part.offset):
                    self._write_direct(views, part.offset)
                else:
                    _write_in_order(self._file, views, part.offset)
        finally:
            # An abort while this part was under way left the closing to us: closing a descriptor under a
            # writer would let its number be reused, and the bytes land in another file.
            if self._ledger.is_closed_and_idle():
                self._close()

    def publish(self) -> None:
        """Count, sync, rename, sync the directory, and see that the name now leads to this very file.

        A failed sync is final: after it the kernel may call lost pages clean, and a second sync would succeed
        on a file with holes. The upload must be begun anew then.
        """
        if self._published:
            return
        if self._failure is not None:
            raise self._failure
        self._ledger.require_complete()
        nbytes = self._ledger.nbytes
        with translated("publish", self._path, needed_bytes=nbytes, missing_is="swept"):
            self._sync(nbytes)
            mine = os.fstat(self._file)
            if mine.st_size != nbytes:
                raise StoreError(
                    f"{self._temporary}: has {mine.st_size} bytes after sync, {nbytes} were expected; begin anew"
                )
            try:
                self._temporary.rename(self._path)
            except FileNotFoundError:
                # NFS may lose the answer of a rename that was done; the look at the name below decides.
                _log.warning(
                    "%s: its temporary file is gone, seeing whether it was renamed already", self._path
                )
            try:
                there = self._path.stat()
            except FileNotFoundError as error:
                raise StoreError(
                    f"{self._path}: its temporary file was removed by another writer, and the bytes with it; begin anew"
                ) from error
            if (there.st_dev, there.st_ino, there.st_size) != (mine.st_dev, mine.st_ino, nbytes):
                raise StoreError(
                    f"{self._path}: another file stands there after the rename; two writers use this run"
                )
            sync_directory(self._path.parent)
        self._published = True
        self._finish()

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._published:
            return
        self._finish()
        with translated("abort", self._temporary):
            self._temporary.unlink(missing_ok=True)

    def _sync(self, nbytes: int) -> None:
        try:
            os.ftruncate(self._file, nbytes)
            os.fsync(self._file)
        except OSError as error:
            self._failure = StoreError(
                f"{self._path}: sync failed ({error.strerror}); what was written may be lost, "
                "this checkpoint is given up"
            )
            raise self._failure from error
        # Whatever went through the page cache leaves it: the read-back must come from the disk.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write_direct(self, views: Sequence[memoryview], offset: int) -> None:
        try:
            for view in views:
                whole = view.nbytes // _PAGE_BYTES * _PAGE_BYTES
                write_all(self._direct, view[:whole], offset)
                if whole < view.nbytes:
                    # A page of our own: aligned, and zero behind the tail, which is cut off at publish.
                    with mmap.mmap(-1, _PAGE_BYTES) as page:
                        page[: view.nbytes - whole] = view[whole:]
                        os.pwrite(self._direct, page, offset + whole)
                offset += view.nbytes
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems open with O_DIRECT and refuse the write, or want a larger alignment.
            _log.info("%s: direct write refused, this part goes through the page cache", self._path)
            _write_in_order(self._file, views, offset)

    def _finish(self) -> None:
        if self._ledger.close():
            self._close()

    def _close(self) -> None:
        with self._closing:
            direct, self._direct = self._direct, -1
            file, self._file = self._file, -1
        for descriptor in (direct, file):
            if descriptor >= 0:
                os.close(descriptor)


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """`pwrite` until every byte is taken."""
    done = 0
    while done < view.nbytes:
        done += os.pwrite(descriptor, view[done:], offset + done)


def make_directories(directory: Path) -> None:
    """Make a directory and its parents, durably: a synced file in a directory that vanishes is gone too."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # some file systems, such as /proc, say this where they mean never
        raise StoreError(
            f"cannot make {directory}: its file system takes no directories; choose another path"
        ) from error
    for place in missing:
        sync_directory(place.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if (
            error.errno != errno.EINVAL
        ):  # some FUSE file systems have no sync of directories; nothing more can be done there
            raise
    finally:
        os.close(descriptor)


def _write_in_order(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    for view in views:
        write_all(descriptor, view, offset)
        offset += view.nbytes


def _open_direct(path: Path) -> int:
    """A second descriptor for writes past the page cache, or -1 where the file system has none."""
    if not _DIRECT:
        return -1
    try:
        return os.open(path, os.O_WRONLY | _DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return -1


def _is_aligned(views: Sequence[memoryview], offset: int) -> bool:
    for view in views[:-1]:
        if view.nbytes % _PAGE_BYTES:
            return False
    return offset % _PAGE_BYTES == 0 and all(_address(view) % _PAGE_BYTES == 0 for view in views)


def _address(view: memoryview) -> int:
    import numpy as np  # the one way to the address of a read-only buffer

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _reserve(descriptor: int, path: Path, nbytes: int) -> None:
    """Reserve room for the whole file, or refuse it now.

    Not `os.posix_fallocate`: where the file system cannot reserve, as NFS before 4.2, glibc imitates it by
    writing into every block, which takes as long as the checkpoint itself. There a look at the free room must
    do.
    """
    free = free_bytes(path)
    if free is not None and free < nbytes:
        raise no_room(path, needed_bytes=nbytes, cause="the file system is too full")
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0, 0, -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(number, os.strerror(number))
