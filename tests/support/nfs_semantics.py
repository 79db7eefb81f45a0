"""Import this in a process, and its calls below the directory TEST_NFS behave as badly as those on a mounted NFS may.

    link, rename, unlink    every second answer is lost: the client retries, and gets the error of a second call
    open for reading        every fifth meets a stale handle; the next one does not
    listing a directory     two times of three a stale listing, without changes that other processes made since

A process sees its own changes at once. Local file systems never behave like this.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

_LOST_EVERY, _STALE_EVERY, _FRESH_EVERY = 2, 5, 3
_BELOW = os.environ["TEST_NFS"]
_counts: Counter[str] = Counter()
_listings: dict[str, list[Any]] = {}


def _is_below(path: Any, directory: int | None) -> bool:
    if directory is not None:
        path = f"/proc/self/fd/{directory}"
    return isinstance(path, str | os.PathLike) and os.path.realpath(path).startswith(_BELOW)


def _every(what: str, count: int) -> bool:
    _counts[what] += 1
    return _counts[what] % count == 0


def _answers_lost(name: str, number: int, directory: str) -> None:
    """Every second call succeeds, and then raises as a retry would."""
    real: Callable[..., None] = getattr(os, name)

    def call(*arguments: Any, **directories: Any) -> None:
        real(*arguments, **directories)
        if _is_below(arguments[-1], directories.get(directory)):
            _listings.clear()
            if _every(name, _LOST_EVERY):
                raise OSError(number, os.strerror(number), str(arguments[-1]))

    setattr(os, name, call)


_open = os.open


def _opened(path: Any, flags: int, *arguments: Any, **directories: Any) -> int:
    if _is_below(path, directories.get("dir_fd")):
        if flags & os.O_CREAT:
            _listings.clear()
        elif not flags & os.O_DIRECTORY and not flags & os.O_ACCMODE and _every("open", _STALE_EVERY):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    return _open(path, flags, *arguments, **directories)


class _Listing:
    """Iterator and context manager, as `os.scandir` returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Do nothing: no directory is open."""


_scandir = os.scandir


def _listed(path: Any = ".") -> Any:
    if not _is_below(path, None):
        return _scandir(path)
    name = os.fspath(path)
    if name not in _listings or _every(f"list {name}", _FRESH_EVERY):
        with _scandir(path) as entries:
            _listings[name] = list(entries)
    return _Listing(_listings[name])


for _name, _number, _directory in (
    ("link", errno.EEXIST, "dst_dir_fd"),
    ("rename", errno.ENOENT, "dst_dir_fd"),
    ("unlink", errno.ENOENT, "dir_fd"),
):
    _answers_lost(_name, _number, _directory)
os.open, os.scandir = _opened, _listed
