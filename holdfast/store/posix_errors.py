"""Turns an `OSError` of a file system into an error that says whether to retry or what a person must do.

    EACCES EPERM EROFS ENOSPC EDQUOT ...   a person fixes it; the written data stays     not retriable
    EIO ESTALE ETIMEDOUT ...               a network file system recovers                retriable, within a budget
    a failed sync, a removed file          the written data is lost                      begin_anew (posix_upload)

An I/O error of a self-contained call (a stat, a read, a direct write) concerns that call alone, and a soft-mounted NFS
returns it while its server is silent: the call is retried. A stale handle is retried too, because each call resolves
its path again. For an upload that holds a descriptor, `posix_upload` decides first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import StoreError, StoreMissing

_ADVICE = {
    errno.EACCES: "give the user of this process write permission there",
    errno.EPERM: "give the user of this process write permission there",
    errno.EROFS: "the file system is mounted read-only; mount it for writing, or choose another store",
    errno.ENOTDIR: "a part of the path is a file, not a directory; choose another path or move the file away",
    errno.EISDIR: "a directory stands where the file should be; move it away",
    errno.EEXIST: "something else stands where a directory should be; choose another path or move it away",
    errno.ENAMETOOLONG: "choose a shorter path for the run",
    errno.ELOOP: "a symbolic link stands there, and below a run none is followed; put the file itself there",
    errno.EFBIG: "the file system or a limit (ulimit -f) does not take files of this size",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENXIO: "the device is gone; see that it is attached and mounted",
    errno.ENODEV: "the device is gone; see that it is attached and mounted",
    errno.EIO: "see the kernel's log (dmesg) for the device or server; do not train on a disk that fails",
    errno.ESTALE: "the NFS server does not know this place any more; if it stays so, mount it again",
    errno.ETIMEDOUT: "the file server does not answer; see the network and the server",
    errno.EINVAL: "the file system does not take this operation; choose another store",
}
_RETRIABLE = {
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.EREMOTEIO),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET),
    *(errno.ENOTCONN, errno.ENOLCK),
}
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def free_bytes(path: Path) -> int | None:
    """Return how many bytes this user may still write at `path`, which need not exist; None: unknown."""
    for place in (path, *path.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return None


def is_full(error: OSError) -> bool:
    """Whether the disk is full, or a quota exhausted."""
    return error.errno in _NO_ROOM


def no_room_error(path: Path, *, needed_bytes: int, cause: str) -> StoreError:
    """Return the error of a full disk or an exhausted quota."""
    free = free_bytes(path)
    known = "an unknown number of" if free is None else str(free)
    return StoreError(
        f"{path}: no room ({cause}): {needed_bytes} bytes are needed, {known} are free; "
        "remove old checkpoints, lower keep_last, or choose a larger store",
        no_room=True,
    )


@contextmanager
def translate_errors(
    operation: str, path: Path, *, needed_bytes: int = 0, if_missing: str = "missing"
) -> Iterator[None]:
    """Turn an `OSError` inside the block into the error that says what to do about it. `needed_bytes`: for the message
    of a full disk. `if_missing`: meaning of a path that does not exist: `missing` (StoreMissing), `swept` (another
    writer's sweep removed a temporary file; a retry makes it again) or `lost` (the same, and the upload must start
    over).
    """
    try:
        yield
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in _NO_ROOM:
            raise no_room_error(path, needed_bytes=needed_bytes, cause=cause) from error
        if error.errno == errno.ENOENT and if_missing == "missing":
            raise StoreMissing(f"{path}: there is no such file ({operation})") from error
        if error.errno == errno.ENOENT:
            raise StoreError(
                f"cannot {operation} {path}: its temporary file or directory vanished; if it happens again, "
                "two writers use this run",
                retriable=if_missing == "swept",
                begin_anew=if_missing == "lost",
            ) from error
        retriable = error.errno in _RETRIABLE
        unknown = "the file system may recover" if retriable else "see the cause"
        advice = _ADVICE.get(error.errno or 0, unknown)
        raise StoreError(f"cannot {operation} {path}: {cause}; {advice}", retriable=retriable) from error
