"""Writes a file or a folder for a tool, completely or not at all.

check_file_place ─► .NAME.<random>.part ─► filled ─► fsync ─► rename
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import ConfigError, StoreError


def check_file_place(destination: Path, file_name: str, *, force: bool) -> Path:
    """Return the path for a file: `destination`, or `file_name` in it if that is a directory. Raises `ConfigError`: the
    path cannot be used. Call before reading, so that the user need not wait for the error.
    """
    try:
        path = destination / file_name if destination.is_dir() else destination
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: its directory {path.parent} does not exist; make it first")
        if path.is_dir():
            raise ConfigError(f"{path}: expected a file, it is a directory; name a file in it")
        if path.exists() and not force:
            raise ConfigError(f"{path}: is already there; --force replaces it")
    except OSError as error:  # a name that is too long, a directory that may not be entered
        raise ConfigError(f"{destination}: cannot be used: {error.strerror}") from error
    return path


def check_folder_place(destination: Path, mark: str, *, force: bool) -> Path:
    """Return the path for a folder. `mark`: a file in every folder of this kind; with `force` such a folder may be
    replaced, any other never. Raises `ConfigError`: the path cannot be used.
    """
    path = Path(os.path.abspath(destination))  # noqa: PTH100 - `.` has no name to rename to
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: its directory {path.parent} does not exist; make it first")
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path}: expected a folder, it is a file; name a folder")
        if path.is_dir() and any(path.iterdir()):
            if not (path / mark).exists():
                raise ConfigError(
                    f"{path}: the folder has other contents (there is no {mark} in it); name a new folder"
                )
            if not force:
                raise ConfigError(f"{path}: is already there; --force replaces it")
    except OSError as error:
        raise ConfigError(f"{destination}: cannot be used: {error.strerror}") from error
    return path


def write_atomically(path: Path, nbytes: int, fill: Callable[[int], None]) -> None:
    """Write the file at `path` through a temporary file beside it; `fill` writes to its descriptor. Raises
    `StoreError`: the write failed; the message says that `nbytes` are needed.
    """
    temporary = _temporary(path)
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fill(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, nbytes, error) from error
    finally:
        temporary.unlink(missing_ok=True)  # renamed, or never created


def write_folder(path: Path, nbytes: int, fill: Callable[[Path], None]) -> None:
    """Write a folder like `write_atomically`; `fill` writes files into it, which are synced. An existing folder is
    replaced; for a moment the path does not exist.
    """
    temporary, old = _temporary(path), _temporary(path)
    try:
        temporary.mkdir()
        fill(temporary)
        for file in temporary.iterdir():
            _sync(file, os.O_RDONLY)
        sync_directory(temporary)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, nbytes, error) from error
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)


def write_all(fd: int, data: memoryview) -> None:
    """Write all of `data` at the file's position."""
    while data:
        data = data[os.write(fd, data) :]


def write_error(path: Path, nbytes: int, error: OSError) -> StoreError:
    """Build the error for a failed system call on `path`."""
    return StoreError(f"{path}: cannot be written: {error.strerror or error} ({nbytes} bytes are needed)")


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable."""
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
