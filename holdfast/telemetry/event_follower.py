"""Follows an event log: the lines that its writers append from now on, over all its files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.telemetry.event_files import is_same, numbered

_LINE_BYTES_MAX = 1 << 20  # the rest of a line that its writer never ended
_READ_BYTES = 1 << 20
_FILES_MAX = 64  # that one look goes through


def json_objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines; others are passed over."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(line)
            if isinstance(said, dict):
                yield said


class Follower:
    """Reads whole lines that are appended to an event log from now on, over all its files. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest, self._offset = path, b"", 0
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = path.open("rb")
            self._offset = self._file.seek(0, os.SEEK_END)
        self._number = max((number for number, _ in numbered(path)), default=0)  # all up to it were read

    def read(self) -> Iterator[dict[str, Any]]:
        """The new lines that are JSON objects."""
        try:
            data = self._more()
        except OSError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            self._rest = b""
        yield from json_objects(lines)

    def close(self) -> None:
        """Read no more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _more(self) -> bytes:
        for _ in range(_FILES_MAX):
            if self._file is not None:
                is_current = self._open_again()
                if self._offset > os.fstat(self._file.fileno()).st_size:
                    self._offset = 0  # the file was truncated
                self._file.seek(self._offset)
                data = self._file.read(_READ_BYTES)
                self._offset += len(data)
                if data or is_current:  # to a file that has its number nothing is appended
                    return data
            following = self._following()
            if following is None:
                return b""
            if self._file is not None:
                self._file.close()
            # The rest belongs to a line that a dead process did not end.
            self._file, self._offset, self._rest = following, 0, b""
        return b""

    def _open_again(self) -> bool:
        """Open the file once more, since on NFS only so are new lines seen; whether it is the one that is written."""
        assert self._file is not None
        for path in self._places():
            with contextlib.suppress(FileNotFoundError):
                file = path.open("rb")
                if is_same(file.fileno(), self._file.fileno()):
                    self._file.close()
                    self._file = file
                    return path == self._path
                file.close()
        return False

    def _places(self) -> Iterator[Path]:
        yield self._path
        yield from (path for number, path in numbered(self._path) if number > self._number)

    def _following(self) -> BinaryIO | None:
        """The file after the one that was read to its end; None if it does not exist yet."""
        try:
            newest: BinaryIO | None = self._path.open("rb")
        except FileNotFoundError:
            newest = None
        for number, path in numbered(self._path):
            if number <= self._number:
                continue
            with contextlib.suppress(FileNotFoundError):
                file = path.open("rb")
                self._number = number
                if self._file is not None and is_same(file.fileno(), self._file.fileno()):
                    file.close()  # the one that was read
                    continue
                if newest is not None:
                    newest.close()
                return file
        return newest
