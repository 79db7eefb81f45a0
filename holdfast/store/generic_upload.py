"""Upload of a big object to a file system of fsspec: parts are objects of their own until `publish` joins them.

    .begun ─► .part-000000 ... ─► joined ─► .begun says so ─► mv to the name ─► size ─► parts and .begun removed

The marker `.begun` exists from the first step to the last. Its token tells a resume whether these parts belong to this
upload, and whether an object of the right size under the name can be ours.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence

from holdfast.crc import crc32 as crc32_of
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.store.generic_folder import GenericFolder
from holdfast.store.parts import BaseUpload

_MARKER_BYTES_MAX = 1 << 12
_TOKEN_NEW = re.compile(r"new-[0-9a-f]{16}")


class GenericUpload(BaseUpload):
    """One upload. `write_part`: any thread. `temporary`: full path that begins the names of unfinished objects.
    `token`: of the upload to resume. `crc32s`: of its parts as they must be. Raises `StoreMissing` if nothing of it is
    left.
    """

    def __init__(
        self,
        folder: GenericFolder,
        path: str,
        temporary: str,
        *,
        nbytes: int,
        part_bytes: int,
        token: str | None = None,
        crc32s: Mapping[int, int] | None = None,
    ) -> None:
        self._folder, self._path, self._temporary = folder, path, temporary
        super().__init__(path, nbytes=nbytes, part_bytes=part_bytes)
        self._marker = f"{temporary}.begun"
        if token is None:
            # With "over", an earlier object of the name is never taken for ours, even if it has the same size.
            kind = "new" if folder.size_or_none(path) is None else "over"
            self._token = f"{kind}-{secrets.token_hex(8)}"
            self._write_marker(joined=False)
        else:
            self._token = token
            self._resume(crc32s or {})

    @property
    def token(self) -> str:
        return self._token

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        """Write the part as an object of its own; its CRC-32 is checked here, since no driver does."""
        with self._ledger.track_part(index, buffers):
            data = b"".join(buffers)
            if crc32_of(data) != crc32:
                raise DamageError(
                    f"{self._path}: part {index} has CRC-32 {crc32_of(data):08x}, {crc32:08x} was stated; not written"
                )
            self._folder.put(self._part_path(index), data)

    def publish(self) -> None:
        """Join the parts, move the result to its name, and check its size."""
        if self._published:
            return
        self._ledger.require_complete()
        try:
            self._folder.join(
                [self._part_path(index) for index in range(self._ledger.parts)], self._temporary
            )
        except StoreMissing as error:
            raise StoreError(
                f"{self._path}: a part was removed by another writer ({error}); start over", begin_anew=True
            ) from error
        self._write_marker(joined=True)
        self._folder.move(self._temporary, self._path)
        nbytes = self._folder.size_of(self._path)
        if nbytes != self._ledger.nbytes:
            raise StoreError(
                f"{self._path}: expected {self._ledger.nbytes} bytes after the move, got {nbytes}; begin a new upload",
                begin_anew=True,
            )
        self._published = True
        self._remove_parts()

    def abort(self) -> None:
        if self._published:
            return
        self._folder.remove(self._temporary)
        self._remove_parts()

    def _resume(self, crc32s: Mapping[int, int]) -> None:
        marker = self._read_marker()
        if self._is_in_place(marker):
            self._ledger.mark_all_present()
            self._published = True
            self._remove_parts()
            return
        if marker is None or marker.get("token") != self._token:
            raise StoreMissing(
                f"{self._path}: there is nothing to resume as {self._token[:80]!r}: "
                f"{self._marker} is gone or of another upload; start over",
                begin_anew=True,
            )
        self._ledger.mark_present(
            index for index in range(self._ledger.parts) if self._has_part(index, crc32s.get(index))
        )

    def _is_in_place(self, marker: Mapping[str, object] | None) -> bool:
        if self._folder.size_or_none(self._path) != self._ledger.nbytes:
            return False
        if marker is None:  # removed last; an object under a name that was free is ours
            return _TOKEN_NEW.fullmatch(self._token) is not None
        joined = marker.get("token") == self._token and marker.get("joined") is True
        return joined and self._folder.size_or_none(self._temporary) is None

    def _has_part(self, index: int, crc32: int | None) -> bool:
        part = self._part_path(index)
        nbytes = self._ledger.place(index).nbytes
        if self._folder.size_or_none(part) != nbytes:
            return False
        return crc32 is None or crc32_of(self._folder.get(part, nbytes)) == crc32

    def _write_marker(self, *, joined: bool) -> None:
        self._folder.put(self._marker, json.dumps({"token": self._token, "joined": joined}).encode())

    def _read_marker(self) -> dict[str, object] | None:
        """Return the content of the marker; None without a marker, empty if it is not readable."""
        try:
            marker = json.loads(self._folder.get(self._marker, _MARKER_BYTES_MAX))
        except StoreMissing:
            return None
        except (DamageError, ValueError, RecursionError):
            return {}
        return marker if isinstance(marker, dict) else {}

    def _remove_parts(self) -> None:
        self._ledger.close()
        for index in range(self._ledger.parts):
            self._folder.remove(self._part_path(index))
        self._folder.remove(self._marker)

    def _part_path(self, index: int) -> str:
        return f"{self._temporary}.part-{index:06d}"
