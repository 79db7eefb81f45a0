"""The files beside a ring's journal: written in memory, replaced whole by a rename, read without following a link."""

from __future__ import annotations

import os
import re
from pathlib import Path

from holdfast.errors import ProtocolError, StoreError
from holdfast.ring.directory import machine_error, open_private_file

_BYTES_MAX = 1 << 28


def stager_lock_path(directory: Path, attempt: int) -> Path:
    """Return the file by which the stager of an attempt holds the ring (`Ring.hold`)."""
    return directory / f"stager-{attempt}"


def read_writers(directory: Path, attempt: int) -> int:
    """Return how many flushers write an attempt's checkpoints, as `Ring.record_writers` wrote; 1: only this ring's."""
    try:
        text = read_side_file(directory / f"writers-{attempt}").decode("ascii", "replace")
    except FileNotFoundError:
        return 1
    return int(text) if re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII) else 1


def read_side_file(path: Path) -> bytes:
    """Read a file beside a ring whole. Raises `ProtocolError` if it is too large, and `FileNotFoundError`."""
    fd = open_private_file(path, os.O_RDONLY)
    with open(fd, "rb") as file:  # noqa: PTH123 (a descriptor, opened without following links)
        nbytes = os.fstat(fd).st_size
        if nbytes > _BYTES_MAX:
            raise ProtocolError(f"{path}: {nbytes} bytes, expected at most {_BYTES_MAX}")
        return file.read(_BYTES_MAX)


def write_side_file(path: Path, data: bytes) -> None:
    """Replace a file beside a ring, whole. Raises `StoreError` if the machine lacks room or descriptors, or the flusher
    has ended and removed the ring.
    """
    # In memory: a rename is enough, there is nothing to sync.
    temporary = path.with_name(f".new-{os.getpid()}-{path.name}")
    try:
        fd = open_private_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except FileNotFoundError as error:
        raise StoreError(f"{path.parent}: the ring is gone, because its flusher has ended") from error
    try:
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(data)
        temporary.rename(path)
    except OSError as error:
        raise machine_error(path, error) from error
