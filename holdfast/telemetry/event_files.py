"""The files of one event log: the current file, and older numbered ones.

    events.jsonl.000007  ─►  events.jsonl.000008  ─►  events.jsonl        oldest line first

A full file gets the next number by one rename, which is atomic if the process is killed. Writers append under a shared
lock when a file is nearly full, and the rename takes an exclusive lock: nothing is appended to a numbered file, so a
follower may leave it at its end. No process waits for a lock: a line written during the rename stays in the log, but a
follower may miss it.
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
NUMBERED_MAX = 8  # older files are removed
EVENTS_NAME = "events.jsonl"  # default name of a run's event log
_MARGIN_BYTES = 1 << 20  # a file below the limit by more than this cannot be about to be renamed
_NUMBER = re.compile(r"\.(\d{6,12})")
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


def log_directory(key: str) -> Path:
    """Return the default log directory of the run with this key."""
    import platformdirs

    return Path(platformdirs.user_state_dir("holdfast", appauthor=False)) / "runs" / key


def numbered_files(path: Path) -> list[tuple[int, Path]]:
    """List the numbered files, oldest first; empty if the directory cannot be listed."""
    found = []
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            match = _NUMBER.fullmatch(other.name, len(path.name))
            if match is not None and other.name.startswith(path.name):
                found.append((int(match[1]), other))
    return sorted(found)


def open_all(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield every file of the log, oldest first, open during the iteration. Raises `OSError`: no file can be read."""
    with contextlib.ExitStack() as stack:
        # Open the current file first: if it is renamed now, it is also in the list, where its inode identifies it.
        try:
            newest = stack.enter_context(path.open("rb"))
        except FileNotFoundError:
            newest = None
        older = numbered_files(path)
        if newest is None and not older:
            stack.enter_context(path.open("rb"))
        for _, one in older:
            with contextlib.suppress(FileNotFoundError), one.open("rb") as file:
                if newest is None or not is_same_file(file.fileno(), newest.fileno()):
                    yield one, file
        if newest is not None:
            yield path, newest


def is_same_file(one: int, other: int) -> bool:
    """Whether two descriptors refer to the same file. Raises `OSError`."""
    return os.path.samestat(os.fstat(one), os.fstat(other))


def is_current(fd: int, path: Path) -> bool:
    """Whether the open file still has the name `path`. Raises `OSError`, but not if `path` does not exist."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def hold_append_lock(fd: int, bytes_max: int) -> Iterator[None]:
    """Keep others from renaming a file that is nearly full. Never waits: the lock's holder may be suspended."""
    locked = os.fstat(fd).st_size + _MARGIN_BYTES > bytes_max and _try_lock(fd, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if locked:
            fcntl.flock(fd, fcntl.LOCK_UN)


def rotate(fd: int, path: Path, *, bytes_max: int) -> None:
    """Number the file if it is full and remove the oldest, unless another process is doing so. Raises `OSError`."""
    if os.fstat(fd).st_size < bytes_max or not _try_lock(fd, fcntl.LOCK_EX):
        return
    try:
        if is_current(fd, path):
            older = numbered_files(path)
            path.rename(path.with_name(f"{path.name}.{(older[-1][0] if older else 0) + 1:06d}"))
            for _, one in older[: max(0, len(older) + 1 - NUMBERED_MAX)]:
                one.unlink(missing_ok=True)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _try_lock(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
