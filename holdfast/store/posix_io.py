"""System calls below a big file: complete writes, durable directories, reserved space, reads past the page cache.

reserve ─► open_direct ─► write_all | write_in_order ─► (fsync, link: posix_upload) ─► sync_directory
read_fully: whole pages directly, the rest of the last one by the page cache
OpenFile: opened once for many reads, where the file is in memory anyway
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import StoreError
from holdfast.store.posix_errors import free_bytes, no_room_error

PAGE_BYTES = 4096
_BLOCK_BYTES = 512  # the unit of `st_blocks`, on every file system
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)  # the answers of a file system without direct access
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def round_up_to_pages(nbytes: int) -> int:
    """Round up to whole pages: the size of a file while it is written, for its last page is written whole."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """`pwrite` until every byte is written."""
    done = 0
    while done < view.nbytes:
        done += os.pwrite(descriptor, view[done:], offset + done)


def make_directories(directory: Path) -> None:
    """Make a directory and its parents, durably: a synced file in a directory that vanishes is gone too."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as some file systems, such as /proc, refuse it
        raise StoreError(
            f"cannot make {directory}: its file system takes no directories; choose another path"
        ) from error
    for place in missing:
        sync_directory(place.parent)


def sync_directory(directory: Path | int) -> None:
    """Make the names in a directory durable. `directory`: its path, or an open descriptor."""
    descriptor = directory if isinstance(directory, int) else os.open(directory, _DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some FUSE file systems have no sync of directories; nothing more can be done there.
        if error.errno != errno.EINVAL:
            raise
    finally:
        if not isinstance(directory, int):
            os.close(descriptor)


@contextmanager
def open_directory(root: Path, directory: Path) -> Iterator[int]:
    """Yield a descriptor of `directory`, below `root`, which stays valid if the path changes meanwhile. Raises a
    `StoreError` that names a symbolic link on the way.
    """
    descriptor, place = os.open(root, _DIRECTORY), root
    try:
        for part in directory.relative_to(root).parts:
            place /= part
            try:
                below = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError:
                reject_symlinks(root, place)
                raise
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def reject_symlinks(root: Path, directory: Path) -> None:
    """Raise a `StoreError` that names a link between `root` and `directory`, which might lead out of the run. `root`
    itself may be a link: a person has made it.
    """
    place = root
    for part in directory.relative_to(root).parts:
        place /= part
        try:
            is_link = stat.S_ISLNK(place.lstat().st_mode)
        except FileNotFoundError:
            return
        if is_link:
            raise StoreError(
                f"{place}: is a symbolic link, and below a run none is followed; put the directory itself there, or "
                "give the path behind the link as the store's"
            )


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file for reading, without following a link or waiting for a pipe."""
    descriptor = os.open(path, flags | os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise StoreError(f"{path}: is no regular file; move it away")


def write_in_order(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Write the views back to back from `offset`."""
    for view in views:
        write_all(descriptor, view, offset)
        offset += view.nbytes


def open_direct(path: Path) -> int:
    """Open a second descriptor for writes past the page cache; return -1 where the file system has none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return -1


def is_aligned(views: Sequence[memoryview], offset: int) -> bool:
    """Whether the views can bypass the page cache: whole aligned pages, except the end of the last one."""
    if offset % PAGE_BYTES or any(view.nbytes % PAGE_BYTES for view in views[:-1]):
        return False
    return all(_address(view) % PAGE_BYTES == 0 for view in views)


def _address(view: memoryview) -> int:
    import numpy as np  # the only way to the address of a read-only buffer

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def read_fully(path: Path, offset: int, view: memoryview) -> int:
    """Fill `view` from `offset`; return how many bytes were there. Whole pages into page-aligned memory bypass the page
    cache: a file read once need not evict those that are read often.
    """
    direct_bytes = view.nbytes // PAGE_BYTES * PAGE_BYTES if is_aligned([view], offset) else 0
    descriptor = _open_for_reading(path, direct=direct_bytes > 0)
    try:
        done = 0
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            done = _read_direct(descriptor, view[:direct_bytes], offset)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return _read_rest(descriptor, view, offset, done)
    finally:
        os.close(descriptor)


class OpenFile:
    """A regular file that several threads read. It is closed with the last reference, since a reader may hang."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1  # opening may raise
        self._descriptor = open_regular(path, 0)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, offset: int, view: memoryview) -> int:
        """As `read_fully`, but through the page cache."""
        return _read_rest(self._descriptor, view, offset, 0)


def _read_rest(descriptor: int, view: memoryview, offset: int, done: int) -> int:
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _open_for_reading(path: Path, *, direct: bool) -> int:
    try:
        return open_regular(path, os.O_DIRECT if direct else 0)
    except OSError as error:
        if not direct or error.errno not in _NO_DIRECT:
            raise
        return open_regular(path, 0)


def _read_direct(descriptor: int, view: memoryview, offset: int) -> int:
    """Read as far as whole pages go: a file may end within one, and some file systems take the flag, not the read."""
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
        done += count
        if count == 0 or count % PAGE_BYTES:
            break
    return done


def reserve(descriptor: int, path: Path, nbytes: int) -> None:
    """Reserve space for the whole file, or raise now.

    Not `os.posix_fallocate`: where the file system cannot reserve, as NFS before 4.2, glibc writes into every block,
    which takes as long as the checkpoint itself. There a check of the free space must do. The file gets its full size
    in any case, by which a resume recognises it.
    """
    free, held_bytes = free_bytes(path), os.fstat(descriptor).st_blocks * _BLOCK_BYTES
    if free is not None and free < nbytes - held_bytes:
        raise no_room_error(path, needed_bytes=nbytes, cause="the file system is too full")
    os.ftruncate(descriptor, round_up_to_pages(nbytes))
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0, 0, round_up_to_pages(nbytes)) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(number, os.strerror(number))
