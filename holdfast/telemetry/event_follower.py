"""Follows an event log across its files: yields the lines that writers append from now on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.telemetry.event_files import is_same_file, numbered_files

_LINE_BYTES_MAX = 1 << 20  # drop an unfinished line beyond this size
_READ_BYTES = 1 << 20
_FILES_MAX = 64  # per call of `read`


def json_objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines; skip other lines."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


class Follower:
    """Reader of whole lines appended to an event log from now on, across its files. The log need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial_line, self._offset = path, b"", 0
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = path.open("rb")
            self._offset = self._file.seek(0, os.SEEK_END)
        # Files up to this number are done.
        self._number = max((number for number, _ in numbered_files(path)), default=0)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the new lines that are JSON objects."""
        try:
            data = self._read_more()
        except OSError:
            return
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        if len(self._partial_line) > _LINE_BYTES_MAX:
            self._partial_line = b""
        yield from json_objects(lines)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_more(self) -> bytes:
        for _ in range(_FILES_MAX):
            if self._file is not None:
                is_current = self._reopen()
                if self._offset > os.fstat(self._file.fileno()).st_size:
                    self._offset = 0  # the file was truncated
                self._file.seek(self._offset)
                data = self._file.read(_READ_BYTES)
                self._offset += len(data)
                if data or is_current:  # writers append nothing to a numbered file
                    return data
            next_file = self._open_next()
            if next_file is None:
                return b""
            if self._file is not None:
                self._file.close()
            # Drop the rest: a dead process left that line unfinished.
            self._file, self._offset, self._partial_line = next_file, 0, b""
        return b""

    def _reopen(self) -> bool:
        """Reopen the file, because NFS shows new lines only then. Return whether it is the file being written."""
        assert self._file is not None
        for path in self._candidate_paths():
            with contextlib.suppress(FileNotFoundError):
                file = path.open("rb")
                if is_same_file(file.fileno(), self._file.fileno()):
                    self._file.close()
                    self._file = file
                    return path == self._path
                file.close()
        return False

    def _candidate_paths(self) -> Iterator[Path]:
        yield self._path
        yield from (path for number, path in numbered_files(self._path) if number > self._number)

    def _open_next(self) -> BinaryIO | None:
        """Open the file after the one that was read to its end; None if it does not exist yet."""
        try:
            newest: BinaryIO | None = self._path.open("rb")
        except FileNotFoundError:
            newest = None
        for number, path in numbered_files(self._path):
            if number <= self._number:
                continue
            with contextlib.suppress(FileNotFoundError):
                file = path.open("rb")
                self._number = number
                if self._file is not None and is_same_file(file.fileno(), self._file.fileno()):
                    file.close()  # already read
                    continue
                if newest is not None:
                    newest.close()
                return file
        return newest
