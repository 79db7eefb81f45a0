"""Upload of a big file to a directory, past the page cache.

    begin ─► space reserved ─► parts ─► cut to size ─► fsync ─► link to its name ─► fsync of the directory ─► published
                 └── resume: the same inode, under its temporary name or already under its own ──┘

A file that has the name is never replaced: a link, unlike a rename, is refused then. The temporary name is removed once
the final one is durable.

Space is reserved first, so that a full disk is found before hours of training rest on it. The tail of the file goes
through one padded page, and the file is cut to its exact size at the end.

An error of a direct write concerns its own bytes, which can be written again. An error of a cached write may concern
bytes of an earlier call, and is reported only once: after EIO or ESTALE there nothing in the file can be trusted.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from holdfast.errors import StoreError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.store.parts import BaseUpload
from holdfast.store.posix_errors import translate_errors
from holdfast.store.posix_io import (
    PAGE_BYTES,
    is_aligned,
    make_directories,
    open_direct,
    open_directory,
    reserve,
    round_up_to_pages,
    sync_directory,
    write_all,
    write_in_order,
)
from holdfast.store.spare_room import SpareFile

_log = logging.getLogger("holdfast.store.posix")

_TOKEN = re.compile(r"inode-([0-9]{1,20})")


class PosixUpload(BaseUpload):
    """Upload to a temporary file; `publish` gives it its name. `write_part`: any thread. `temporary`: on the same file
    system. `token`: of the upload to resume. `spare_file`: a retired file whose blocks a new upload may reuse. Raises
    `StoreMissing`: nothing of the upload is left; `StoreError`: no room (needed and free bytes), no permission.
    """

    def __init__(
        self,
        *,
        root: Path,
        path: Path,
        temporary: Path,
        nbytes: int,
        part_bytes: int,
        token: str | None = None,
        spare_file: SpareFile | None = None,
    ) -> None:
        super().__init__(str(path), nbytes=nbytes, part_bytes=part_bytes)
        self._root, self._path, self._temporary = root, path, temporary
        self._used_page_cache = False
        self._failure: StoreError | None = None
        self._file = self._direct = self._inode = -1
        self._closing = threading.Lock()
        if token is None:
            self._begin(spare_file)
        else:
            self._resume(token)

    @property
    def token(self) -> str:
        """The inode of the temporary file; without the device, whose number NFS changes at each mount."""
        return f"inode-{self._inode}"

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:  # noqa: ARG002
        """Write a part to its place. `crc32` is not used: file systems check none, and the read-back compares."""
        if self._failure is not None:
            raise self._failure
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        try:
            with (
                self._ledger.track_part(index, buffers) as part,
                translate_errors("write", self._path, needed_bytes=part.nbytes),
            ):
                try:
                    if self._direct >= 0 and is_aligned(views, part.offset):
                        self._write_direct(views, part.offset)
                    else:
                        self._write_cached(views, part.offset)
                except OSError as error:
                    self._handle_write_error(error)
                    raise
        finally:
            # An abort during this write left closing to this thread: closing a descriptor in use would let its
            # number be reused, and the bytes land in another file.
            if self._ledger.is_closed_and_idle():
                self._close()

    def publish(self) -> None:
        """Count, sync, link, sync the directory, and check the name. A failed sync is final: the kernel may mark lost
        pages clean, and a second sync would succeed on a file with holes.
        """
        if self._published:
            return
        if self._failure is not None:
            raise self._failure
        self._ledger.require_complete()
        nbytes = self._ledger.nbytes
        with translate_errors("publish", self._path, needed_bytes=nbytes, if_missing="lost"):
            self._truncate_and_sync(nbytes)
            size_bytes = os.fstat(self._file).st_size
            if size_bytes != nbytes:
                self._fail(f"has {size_bytes} bytes after sync, {nbytes} were expected; start over")
            with open_directory(self._root, self._path.parent) as directory_fd:
                self._link(directory_fd)
                reach(Point.FILE_NAMED)
                self._verify_link(directory_fd)
                sync_directory(directory_fd)
            self._unlink_temporary()
        self._published = True
        self._finish()

    def hand_over(self) -> None:
        """Sync the parts written here: the publisher's sync does not reach another host's page cache."""
        if self._failure is not None:
            raise self._failure
        if self._file >= 0:
            with translate_errors("sync", self._path, if_missing="lost"):
                self._fsync()
        self._finish()

    def abort(self) -> None:
        if self._published:
            return
        self._finish()
        with translate_errors("abort", self._temporary):
            self._temporary.unlink(missing_ok=True)

    def _begin(self, spare_file: SpareFile | None) -> None:
        with translate_errors("begin", self._path, needed_bytes=self._ledger.nbytes):
            make_directories(self._path.parent)
            make_directories(self._temporary.parent)
            # A call that is retried may have left one; the name is random, so it is nobody else's.
            self._temporary.unlink(missing_ok=True)
            self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                if spare_file is not None:
                    self._file = spare_file.reuse_for(self._temporary, self._file)
                reserve(self._file, self._path, self._ledger.nbytes)
                self._direct = open_direct(self._temporary)
                self._inode = os.fstat(self._file).st_ino
            except BaseException:
                self._close()
                self._temporary.unlink(missing_ok=True)
                raise

    def _resume(self, token: str) -> None:
        """Resume the file of a dead process, under its temporary name or its own. Its reserved space stays."""
        match, nbytes = _TOKEN.fullmatch(token), self._ledger.nbytes
        self._inode = int(match[1]) if match else -1
        with translate_errors("resume", self._path):
            unfinished, named = _stat_or_none(self._temporary), _stat_or_none(self._path)
            if _is_same_file(named, self._inode, {nbytes}):
                # Only the dead process knew whether the name is durable.
                sync_directory(self._path.parent)
                if _is_same_file(unfinished, self._inode, None):
                    self._unlink_temporary()
                self._published = True
                self._ledger.close()
            elif _is_same_file(unfinished, self._inode, {nbytes, round_up_to_pages(nbytes)}):
                self._file, self._direct = self._open_temporary()
            else:
                raise StoreMissing(
                    f"{self._path}: there is nothing to resume as {token[:80]!r} ({nbytes} bytes): at "
                    f"{self._temporary} {_describe(unfinished)}, at its own name {_describe(named)}; start over",
                    begin_anew=True,
                )
        self._ledger.mark_all_present()

    def _open_temporary(self) -> tuple[int, int]:
        """Open both descriptors of the temporary file, if it is ours."""
        file = os.open(self._temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_ino != self._inode:
                raise StoreMissing(
                    f"{self._temporary}: another file stands there now; two writers use this run, start over",
                    begin_anew=True,
                )
            return file, open_direct(self._temporary)
        except BaseException:
            os.close(file)
            raise

    def _write_direct(self, views: Sequence[memoryview], offset: int) -> None:
        start = offset
        try:
            for view in views:
                whole = view.nbytes // PAGE_BYTES * PAGE_BYTES
                write_all(self._direct, view[:whole], offset)
                if whole < view.nbytes:
                    # One aligned page, with zeros after the tail that are cut off at publish.
                    with mmap.mmap(-1, PAGE_BYTES) as page:
                        page[: view.nbytes - whole] = view[whole:]
                        os.pwrite(self._direct, page, offset + whole)
                offset += view.nbytes
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems open with O_DIRECT and refuse the write, or need a larger alignment.
            _log.info(
                "%s: the file system refused a direct write, so this part goes through the page cache",
                self._path,
            )
            self._write_cached(views, start)

    def _write_cached(self, views: Sequence[memoryview], offset: int) -> None:
        self._used_page_cache = True
        write_in_order(self._file, views, offset)

    def _handle_write_error(self, error: OSError) -> None:
        """Give the upload up if an error costs more than this write; reopen the file if its handle is stale."""
        if error.errno not in (errno.EIO, errno.ESTALE):
            return
        if self._used_page_cache:
            self._fail(
                f"writing through the page cache failed ({error.strerror}), and may concern earlier bytes; start over",
                error,
            )
        if error.errno == errno.ESTALE:
            self._reopen(error)

    def _reopen(self, cause: OSError) -> None:
        """Replace a handle that the server has forgotten, under the same number, for the threads that write."""
        try:
            file, direct = self._open_temporary()
        except (FileNotFoundError, StoreMissing):
            self._fail(
                "its temporary file was removed by another writer, and the bytes with it; start over", cause
            )
        with self._closing:
            for new, old in ((file, self._file), (direct, self._direct)):
                if new >= 0 and old >= 0:
                    os.dup2(new, old, inheritable=False)
        for new in (file, direct):
            if new >= 0:
                os.close(new)
        _log.warning("%s: the file's handle was stale, so the file is opened again", self._path)

    def _truncate_and_sync(self, nbytes: int) -> None:
        # Unlike a failed sync, a failed truncation loses nothing: its cause can be fixed.
        os.ftruncate(self._file, nbytes)
        self._fsync()

    def _fsync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            self._fail(f"sync failed ({error.strerror}); what was written may be lost, start over", error)
        # Drop the file's pages from the cache: the read-back must come from the disk.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _link(self, directory_fd: int) -> None:
        """Link the file to its name in the opened directory, if that is free. `_verify_link` decides."""
        try:
            with open_directory(self._root, self._temporary.parent) as temporary_fd:
                os.link(
                    self._temporary.name,
                    self._path.name,
                    src_dir_fd=temporary_fd,
                    dst_dir_fd=directory_fd,
                    follow_symlinks=False,
                )
        except FileExistsError:
            _log.info("%s: a file stands there; checking whether it is this one", self._path)
        except FileNotFoundError:
            # Where another process has resumed this upload, the file may have its name already.
            _log.warning(
                "%s: its temporary file is gone; checking whether it has its name already", self._path
            )

    def _verify_link(self, directory_fd: int) -> None:
        status = _stat_or_none(self._path.name, directory_fd)
        if status is None:
            self._fail("its temporary file was removed by another writer, and the bytes with it; start over")
        mine = os.fstat(self._file)
        if (status.st_dev, status.st_ino, status.st_size) != (mine.st_dev, mine.st_ino, self._ledger.nbytes):
            self._fail(
                "another file stands there, and is left as it is; two writers use this run, start over"
            )

    def _unlink_temporary(self) -> None:
        try:
            self._temporary.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed (%s); the next sweep takes it", self._temporary, error)

    def _fail(self, why: str, cause: OSError | None = None) -> NoReturn:
        """Give this upload up for good, also for other processes: the next sync of this file may wrongly succeed."""
        self._failure = StoreError(f"{self._path}: {why}", begin_anew=True)
        if _is_same_file(_stat_or_none(self._temporary), self._inode, None):
            self._unlink_temporary()
        raise self._failure from cause

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


def _stat_or_none(path: Path | str, directory: int | None = None) -> os.stat_result | None:
    """Return the status of `path`, also relative to an opened directory, not following a link; None if missing."""
    try:
        return os.stat(path, dir_fd=directory, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_same_file(status: os.stat_result | None, inode: int, sizes_bytes: set[int] | None) -> bool:
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and status.st_ino == inode
        and (sizes_bytes is None or status.st_size in sizes_bytes)
    )


def _describe(status: os.stat_result | None) -> str:
    return "there is nothing" if status is None else f"stands inode {status.st_ino} of {status.st_size} bytes"
