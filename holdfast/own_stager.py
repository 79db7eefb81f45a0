"""The note of a stager that a job has started for itself: the stager's address and key.

    stager ─► /dev/shm/holdfast-UID/own/RUN.json, mode 0600, locked while it lives ─► rank 0 of the next start

A job that restarts on this machine finds the stager of the previous job, whose ring has the newest checkpoints. The
kernel releases the lock of a dead process, so readers ignore a note without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import ConfigError, HoldfastError, StoreError
from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.net.address import Address
from holdfast.ring.directory import make_private_directory, open_private_file, run_key
from holdfast.wire.frames import peer_error

_BYTES_MAX = 4096
_HELD_SECONDS_MAX = 10.0  # a stager that is ending closes its note within this time
_PAUSE_SECONDS = 0.05


class OwnStagerEndpoint(NamedTuple):
    """Where ranks reach a stager of their job. `address`: HOST:PORT. `share`: as K/S."""

    address: str
    key: str
    share: str = str(WHOLE)

    def to_bytes(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> OwnStagerEndpoint:
        """Raises `ValueError`: `data` is not a place."""
        try:
            document = _EndpointDocument.model_validate_json(data)
        except ValidationError:
            raise ValueError("expected the address and the key of a stager") from None
        return cls(document.address, document.key, document.share)


def report_endpoint(endpoint: OwnStagerEndpoint) -> None:
    """Tell rank 0, which reads stdout, that this stager listens; later writes to stdout go to the log."""
    _write_first_line(endpoint.to_bytes())


def report_error(error: HoldfastError) -> None:
    """Tell rank 0, which reads only the first line of stdout, why this stager has not started."""
    _write_first_line(json.dumps({"error": [error.code, str(error)]}).encode())


def _write_first_line(line: bytes) -> None:
    with contextlib.suppress(OSError):  # rank 0 is gone
        os.write(1, line + b"\n")
    os.dup2(2, 1)


def parse_first_line(line: bytes) -> OwnStagerEndpoint:
    """Parse the first line of a stager. Raises `ValueError`: not a place; `HoldfastError`: the stager's own error."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        raise peer_error(*json.loads(line)["error"])
    return OwnStagerEndpoint.from_bytes(line)


class _EndpointDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    address: str = Field(min_length=1, max_length=1024)
    key: str = Field(max_length=1024)
    share: str = Field(default=str(WHOLE), max_length=16)  # a note of an older version has none


def note_path(store_url: str, runtime_dir: Path) -> Path:
    return runtime_dir.absolute() / "own" / f"{run_key(store_url)}.json"


class OwnStagerNote:
    """Note of a living stager, until `close`. Raises `ConfigError`: another stager holds it, or it is not private."""

    def __init__(
        self, store_url: str, runtime_dir: Path, address: Address, key: bytes, share: ShareNumber = WHOLE
    ) -> None:
        self._path = note_path(store_url, runtime_dir)
        self._fd = self._lock_note()
        os.truncate(self._fd, 0)
        os.write(self._fd, OwnStagerEndpoint(str(address), key.decode(), str(share)).to_bytes())

    def _lock_note(self) -> int:
        deadline = time.monotonic() + _HELD_SECONDS_MAX
        while True:
            make_private_directory(self._path.parent)
            try:
                fd = open_private_file(self._path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # another stager has just removed the directory at its end
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                if time.monotonic() < deadline:
                    time.sleep(_PAUSE_SECONDS)
                    continue
                raise ConfigError(
                    f"{self._path}: another job of this user has a stager of its own for this run on this machine; "
                    "each run has one job at a time: end that job, or give this one another store"
                ) from None
            # The locked file may be one that another stager has just removed when it closed its note.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), self._path.lstat()):
                    return fd
            os.close(fd)

    def close(self) -> None:
        """Remove the note. May be called twice."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: it has notes of other runs
                self._path.parent.rmdir()
            os.close(self._fd)
            self._fd = -1


def find_own_stager(store_url: str, runtime_dir: Path) -> OwnStagerEndpoint | None:
    """Find the living stager that a job of this user started for this run here. Raises `ConfigError`: not private."""
    try:
        fd = open_private_file(note_path(store_url, runtime_dir), os.O_RDWR)
    except (FileNotFoundError, StoreError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(ValueError):  # the stager is still writing it
            return OwnStagerEndpoint.from_bytes(os.pread(fd, _BYTES_MAX, 0))
    finally:
        os.close(fd)
    return None
