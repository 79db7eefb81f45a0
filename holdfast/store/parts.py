"""Ledger of one upload: which parts are there, how many are in flight, and whether the upload is still open.

    track_part ─► part is struck out ─► bytes are sent ─► part is entered      close ─► no further part

Every backend's upload has one, so that a missing, short or late part gives the same error. A part is struck out before
it is sent again: a half-finished replacement must not count as the part it replaces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from holdfast.errors import StoreError


class Part(NamedTuple):
    """The place of a part in the file."""

    offset: int
    nbytes: int


class PartLedger:
    """Counts the parts of one upload. Thread-safe. Raises `StoreError`: a size is not positive."""

    def __init__(self, label: str, *, nbytes: int, part_bytes: int) -> None:
        if nbytes <= 0 or part_bytes <= 0:
            raise StoreError(
                f"{label}: cannot upload {nbytes} bytes in parts of {part_bytes}; both must be at least 1"
            )
        self.label, self.nbytes, self.part_bytes = label, nbytes, part_bytes
        self.parts = -(-nbytes // part_bytes)
        self._present: set[int] = set()
        self._active = 0
        self._closed = False
        self._changed = threading.Condition()

    def place(self, index: int) -> Part:
        """Return the place of part `index`. Raises `StoreError` if there is no such part."""
        if not 0 <= index < self.parts:
            raise StoreError(
                f"{self.label}: there is no part {index}; {self.nbytes} bytes make {self.parts} parts"
            )
        offset = index * self.part_bytes
        return Part(offset, min(self.part_bytes, self.nbytes - offset))

    @contextmanager
    def track_part(self, index: int, buffers: Sequence[memoryview]) -> Iterator[Part]:
        """Context in which one part is sent. Raises `StoreError`: no such part, another size, or the upload is over."""
        part = self.place(index)
        given = sum(buffer.nbytes for buffer in buffers)
        if given != part.nbytes:
            raise StoreError(f"{self.label}: part {index} has {given} bytes, {part.nbytes} were expected")
        with self._changed:
            if self._closed:
                raise StoreError(
                    f"{self.label}: the upload is over, part {index} comes too late; begin a new one"
                )
            self._present.discard(index)
            self._active += 1
        done = False
        try:
            yield part
            done = True
        finally:
            with self._changed:
                self._active -= 1
                if done:
                    self._present.add(index)
                self._changed.notify_all()

    def present(self) -> frozenset[int]:
        with self._changed:
            return frozenset(self._present)

    def mark_present(self, indexes: Iterable[int]) -> None:
        """Enter parts that an earlier process has sent."""
        with self._changed:
            self._present.update(index for index in indexes if 0 <= index < self.parts)

    def mark_all_present(self) -> None:
        """Enter every part: the file is in place, or nothing says which are missing."""
        self.mark_present(range(self.parts))

    def require_complete(self) -> None:
        """Check that every part is there and none in flight. Raises `StoreError`: names the first missing parts."""
        with self._changed:
            missing = [index for index in range(self.parts) if index not in self._present]
            active = self._active
        if missing:
            some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise StoreError(
                f"{self.label}: cannot be published, {len(missing)} of {self.parts} parts are missing ({some}); "
                "send them first"
            )
        if active:
            raise StoreError(
                f"{self.label}: cannot be published while {active} parts are still being sent; wait for them first"
            )

    def close(self) -> bool:
        """Accept no further parts; return whether no part is in flight."""
        with self._changed:
            self._closed = True
            return self._active == 0

    def is_closed_and_idle(self) -> bool:
        """Whether the upload is over and no part is in flight."""
        with self._changed:
            return self._closed and self._active == 0

    def wait_idle(self, seconds_max: float) -> bool:
        """Wait until no part is in flight; return False if one still is after `seconds_max`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._active == 0, timeout=seconds_max)


class BaseUpload:
    """The methods of an upload that are the same in every backend. Raises `StoreError`: a size is not positive."""

    def __init__(self, label: str, *, nbytes: int, part_bytes: int) -> None:
        self._ledger = PartLedger(label, nbytes=nbytes, part_bytes=part_bytes)
        self._published = False

    @property
    def part_bytes(self) -> int:
        return self._ledger.part_bytes

    @property
    def published(self) -> bool:
        return self._published

    def written(self) -> frozenset[int]:
        return self._ledger.present()

    def hand_over(self) -> None:
        """Only close the ledger: a server keeps what it has acknowledged."""
        self._ledger.close()
