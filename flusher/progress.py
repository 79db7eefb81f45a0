"""Record, beside the ring, of the parts of one checkpoint that the store has: the next flusher resumes from it.

    flush-<attempt>-<step>      head: file, write-id, token, part_bytes, layout digest
                                one line per part that the store has: its index, its segments' CRCs
                                published

A line is written after the store has the part and before its slots are freed, so a chunk is always in the ring, or
recorded, or both. Each line carries its own CRC-32; reading ends at the first bad line, where a writer was killed. The
file is in memory like the ring: nothing is synced.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flusher.steps import Resume
from holdfast.crc import crc32
from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.directory import machine_error, open_private_file

_BYTES_MAX = 1 << 30
_Text = Annotated[str, Field(min_length=1, max_length=4096)]
_Crc = Annotated[int, Field(ge=0, lt=2**32)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Head(_Line):
    """The upload of the checkpoint: all that `Store.resume` needs."""

    version: Literal[1] = 1
    file: Annotated[str, Field(pattern=r"^step-\d{9,19}(-a\d{3,10})?\.pt$")]
    write_id: _Text
    token: _Text
    part_bytes: Annotated[int, Field(gt=0, lt=2**62)]
    layout_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(_Line):
    part: Annotated[int, Field(ge=0, lt=2**62)]
    chunks: tuple[tuple[_Crc, ...], ...]


class _Published(_Line):
    published: Literal[True]


def progress_path(directory: Path, key: CheckpointId) -> Path:
    return directory / f"flush-{key.attempt}-{key.step}"


class Progress:
    """Record of one checkpoint, made by `begin` or `load`. Any thread may add parts. `parts`: for each part that the
    store has, the segment CRCs of each of its chunks.
    """

    def __init__(self, path: Path, head: Head) -> None:
        self._path, self.head = path, head
        self.parts: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.published = False
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, path: Path, head: Head) -> Progress:
        """Start a new record, replacing an existing one."""
        path.unlink(missing_ok=True)
        progress = cls(path, head)
        progress._append(head)
        return progress

    @classmethod
    def load(cls, path: Path) -> Progress | None:
        """Read a dead flusher's record; None if there is no record, or not even a head.

        A line that the flusher was writing when it died is truncated.

        Raises:
            ProtocolError: A whole line is not of this format.
        """
        try:
            fd = open_private_file(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        with open(fd, "r+b") as file:  # noqa: PTH123 (a descriptor, opened without following links)
            if os.fstat(fd).st_size > _BYTES_MAX:
                raise ProtocolError(
                    f"{path}: expected a record of a flush of at most {_BYTES_MAX} bytes, got a longer file"
                )
            complete_bytes, bodies = _complete_lines(file.read(_BYTES_MAX))
            file.truncate(complete_bytes)
        if not bodies:
            return None
        try:
            progress = cls(path, Head.model_validate_json(bodies[0]))
            for body in bodies[1:]:
                if body.startswith(b'{"part"'):
                    line = _Part.model_validate_json(body)
                    progress.parts[line.part] = line.chunks
                else:
                    progress.published = _Published.model_validate_json(body).published
        except (ValidationError, RecursionError) as error:
            raise ProtocolError(f"{path}: this version cannot read the record of a flush: {error}") from error
        return progress

    def resume(self, chunk_bytes: int) -> Resume:
        return Resume(self.head.part_bytes // chunk_bytes, dict(self.parts))

    def add_part(self, part: int, segment_crcs: tuple[tuple[int, ...], ...]) -> None:
        """Record that the store has this part. Raises a retriable `StoreError` if the record cannot be written."""
        self._append(_Part(part=part, chunks=segment_crcs))
        self.parts[part] = segment_crcs

    def add_published(self) -> None:
        """Record that the file is published, and only its manifest is missing."""
        self._append(_Published(published=True))
        self.published = True

    def _append(self, line: _Line) -> None:
        body = line.model_dump_json().encode()
        data = b"%08x %s\n" % (crc32(body), body)
        try:
            with self._lock:
                fd = open_private_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                try:
                    before = os.fstat(fd).st_size
                    if os.write(fd, data) != len(data):
                        os.ftruncate(fd, before)
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                finally:
                    os.close(fd)
        except OSError as error:
            raise machine_error(self._path, error) from error


def _complete_lines(data: bytes) -> tuple[int, list[bytes]]:
    """Return how many bytes are whole lines, and the bodies of these lines."""
    bodies: list[bytes] = []
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        stated, _, body = data[at:end].partition(b" ")
        if stated != b"%08x" % crc32(body):
            break
        bodies.append(body)
        at = end + 1
    return at, bodies
