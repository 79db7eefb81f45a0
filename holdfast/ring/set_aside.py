"""The checkpoints that `holdfast run` has set aside: a file of the run's runtime directory, which the flusher reads.

They are evidence of what went wrong, so retention keeps them for as long as the run is supervised. Each is a line with
its `CheckpointId.label`, appended by one write: a line without its end is still being written.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from holdfast.errors import ConfigError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.directory import machine_error, open_private_file

SET_ASIDE_NAME = "set-aside"
_BYTES_MAX = 1 << 16


def record_set_aside(directory: Path, key: CheckpointId) -> None:
    """Append one. Raises `ConfigError`: the file is not ours; `StoreError`: the machine lacks something, such as room."""
    path = directory / SET_ASIDE_NAME
    try:
        fd = open_private_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, f"{key.label}\n".encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise machine_error(path, error) from error


def read_set_aside(directory: Path) -> list[CheckpointId]:
    """Return all of them, oldest first; [] without the file. Unreadable lines are skipped."""
    try:
        fd = open_private_file(directory / SET_ASIDE_NAME, os.O_RDONLY)
    except (FileNotFoundError, ConfigError, StoreError):
        return []
    try:
        *lines, _ = os.pread(fd, _BYTES_MAX, 0).decode("ascii", "replace").split("\n")
    except OSError:
        return []
    finally:
        os.close(fd)
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(CheckpointId.from_label(line))
    return found
