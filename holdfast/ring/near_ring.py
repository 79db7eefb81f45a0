"""The ring as a rank on the stager's machine reads it: from shared memory, without messages to the stager.

    stager   where it lies: directory, attempt, token, boot id ─────────► rank: are they the same here?
             (the token is in `stager-<attempt>`)                            │ yes
                                                          record ─► bytes ─► the same record still?

The rank opens everything read-only. The stager may refill a slot at any time, even while it is being read. But it
clears the record before the first byte of another chunk can arrive (journal.py, rule 4), so bytes count only if the
record is unchanged after they were copied. A frozen reader finds out when it wakes up.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import Field, TypeAdapter, ValidationError

from holdfast.errors import ConfigError, HoldfastError, ProtocolError, StoreError
from holdfast.faultpoint import Point, reach
from holdfast.process import boot_id
from holdfast.ring.directory import check_private_directory, machine_error, open_private_file
from holdfast.ring.journal import Journal, SlotRecord, SlotState
from holdfast.ring.side_files import read_side_file, stager_lock_path

_Text = Annotated[str, Field(min_length=1, max_length=4096)]
_FIELDS = TypeAdapter(tuple[_Text, Annotated[int, Field(ge=1, lt=2**62)], _Text, _Text])


class RingLocation(NamedTuple):
    """Where a stager's ring lies, and how another process recognises that very ring, and not one of the same name."""

    directory: str  # the run's runtime directory, as the stager names it
    attempt: int  # the stager's
    token: str  # random, in the file that this stager keeps beside the ring
    boot_id: str  # of the kernel: machines may share a directory, but not memory

    def to_bytes(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read the bytes of `to_bytes`. Raises `ProtocolError`."""
        try:
            return cls(*_FIELDS.validate_json(data))
        except (ValidationError, RecursionError) as error:
            raise ProtocolError(f"FETCHED: the place of the ring cannot be read: {error}") from error


class NearRing:
    """A ring of this machine, for reading. Any thread. Raises `ConfigError`: it is not on this machine, not this
    user's, or replaced by another one; `ProtocolError`: the journal is damaged; `StoreError`: the machine lacks
    something.
    """

    def __init__(self, place: RingLocation) -> None:
        directory = Path(place.directory)
        if not directory.is_absolute() or place.boot_id != boot_id():
            raise ConfigError(f"{directory}: the stager's ring is not on this machine")
        try:
            check_private_directory(directory)
            journal = os.fdopen(open_private_file(directory / "journal", os.O_RDONLY), "rb")
            with journal:
                memory = mmap.mmap(journal.fileno(), 0, access=mmap.ACCESS_READ)
            self._descriptor = open_private_file(directory / "ring", os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            # Checked last: a flusher removes this file before it makes another ring. If it still has the token, journal
            # and bytes are of the stager's ring.
            if read_side_file(stager_lock_path(directory, place.attempt)) != place.token.encode():
                raise ConfigError(f"{directory}: this is not the ring of the stager that answers")
        except FileNotFoundError as error:
            raise ConfigError(f"{error.filename}: there is no such file on this machine") from error
        except (OSError, ValueError) as error:  # an empty journal cannot be mapped
            raise ConfigError(f"{directory}: the ring cannot be read: {error}") from error
        self._journal = Journal(memory, directory)
        self._slots: dict[tuple[int, int, int], int] = {}
        for slot in range(self._journal.ring_chunks):
            record = self._record(slot)
            if record is not None:
                self._slots[record.attempt, record.step, record.chunk] = slot

    def read(self, attempt: int, step: int, chunk: int, wanted: Iterable[tuple[int, memoryview]]) -> bool:
        """Fill memory with parts of a chunk. `wanted`: where each part begins in the chunk, and its memory. Return
        whether these are bytes of that chunk; if not, it has left the ring, and the memory's content is undefined.
        Raises `StoreError`: the machine failed.
        """
        wanted_chunk = (attempt, step, chunk)
        slot = self._slots.get(wanted_chunk)
        record = None if slot is None else self._record(slot)
        if slot is None or record is None or (record.attempt, record.step, record.chunk) != wanted_chunk:
            return False
        reach(Point.RING_SEEN)
        base = slot * self._journal.header.chunk_bytes
        for offset, view in wanted:
            if offset + view.nbytes > record.nbytes or not self._fill(base + offset, view):
                return False
        return self._record(slot) == record

    def _fill(self, position: int, view: memoryview) -> bool:
        while view.nbytes:
            try:
                count = os.preadv(self._descriptor, [view], position)
            except OSError as error:
                raise machine_error(Path("the stager's ring"), error) from error
            if count == 0:
                return False
            position, view = position + count, view[count:]
        return True

    def _record(self, slot: int) -> SlotRecord | None:
        """Return the chunk in a slot as if the slot were free: the flusher may free it meanwhile; its bytes stay."""
        try:
            record = self._journal.remains(slot)
        except HoldfastError:
            return None
        return None if record is None else record._replace(state=SlotState.FREE)


def open_near_ring(encoded: bytes) -> NearRing | None:
    """Open the ring at the place that a stager named; None if this process cannot read it. Any thread."""
    try:
        return NearRing(RingLocation.from_bytes(encoded))
    except (ConfigError, ProtocolError, StoreError):
        return None
