"""The files of one event log: the one that is written, and those before it.

    events.jsonl.000007  ─►  events.jsonl.000008  ─►  events.jsonl        oldest line first

A file that is full gets the next number by one rename, so a process that is killed then leaves either no change or the
whole of it. Lines are appended under a shared lock where that may happen, and the rename has the lock alone: nothing is
appended to a file that has its number, and who follows a log may leave it at its end. Nobody waits for a lock: a line
that is written in the very moment of the rename stays in the log, but a follower may have passed the place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FILE_BYTES_MAX = 32 << 20
NUMBERED_MAX = 8  # older ones are removed
EVENTS_NAME = "events.jsonl"  # of the log of a run that names no other file
_MARGIN_BYTES = 1 << 20  # below the limit by more, nobody can be about to rename the file
_NUMBER = re.compile(r"\.(\d{6,12})")
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


def log_directory(key: str) -> Path:
    """The log directory of the run with this key, unless the user names another one."""
    import platformdirs

    return Path(platformdirs.user_state_dir("holdfast", appauthor=False)) / "runs" / key


def numbered(path: Path) -> list[tuple[int, Path]]:
    """The files that were full, oldest first. None if the directory cannot be listed."""
    found = []
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            match = (
                _NUMBER.fullmatch(other.name, len(path.name)) if other.name.startswith(path.name) else None
            )
            if match is not None:
                found.append((int(match[1]), other))
    return sorted(found)


def open_all(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Every file of the log, oldest first, each open while it is given. Raises `OSError`: no file can be read."""
    with contextlib.ExitStack() as stack:
        # First: what it is renamed to meanwhile is in the list then, and known by its inode.
        try:
            newest = stack.enter_context(path.open("rb"))
        except FileNotFoundError:
            newest = None
        older = numbered(path)
        if newest is None and not older:
            stack.enter_context(path.open("rb"))
        for _, one in older:
            with contextlib.suppress(FileNotFoundError), one.open("rb") as file:
                if newest is None or not is_same(file.fileno(), newest.fileno()):
                    yield one, file
        if newest is not None:
            yield path, newest


def is_same(one: int, other: int) -> bool:
    """Whether two descriptors are of the same file. Raises `OSError`."""
    return os.path.samestat(os.fstat(one), os.fstat(other))


def is_current(fd: int, path: Path) -> bool:
    """Whether the open file still has that name. Raises `OSError`, but not for a file that is gone."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def appending(fd: int, bytes_max: int) -> Iterator[None]:
    """Keep others from renaming a file that is about full. Never waits: whoever holds the lock may be stopped."""
    locked = os.fstat(fd).st_size + _MARGIN_BYTES > bytes_max and _lock(fd, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if locked:
            fcntl.flock(fd, fcntl.LOCK_UN)


def rotate(fd: int, path: Path, *, bytes_max: int) -> None:
    """Number the file if it is full, and remove the oldest ones, unless another process does. Raises `OSError`."""
    if os.fstat(fd).st_size < bytes_max or not _lock(fd, fcntl.LOCK_EX):
        return
    try:
        if is_current(fd, path):
            older = numbered(path)
            path.rename(path.with_name(f"{path.name}.{(older[-1][0] if older else 0) + 1:06d}"))
            for _, one in older[: max(0, len(older) + 1 - NUMBERED_MAX)]:
                one.unlink(missing_ok=True)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
