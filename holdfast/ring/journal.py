"""The journal: which chunk of which checkpoint lies in each slot of the ring, in bytes that survive every process.

One 4096-byte header, then one 8192-byte record per slot. A slot's state goes round:

    FREE ──stager──► FILLING ──stager──► FULL ──flusher──► FREE        (FILLING ──stager──► FREE when it gives up)

Each state has one writer, so nothing locks. docs/ring.md has the bytes, and the order of stores that makes a kill at
any instruction harmless: a record torn in `mark_full`, for example, is still a whole FILLING record.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from holdfast.crc import crc32
from holdfast.errors import ConfigError, HoldfastError, ProtocolError
from holdfast.image.chunks import Source
from holdfast.image.layout import SOURCES_MAX
from holdfast.ring.side_files import read_side_file, write_side_file

HEADER_BYTES = 4096
RECORD_BYTES = 8192
RING_CHUNKS_MAX = 1 << 20
CHUNK_BYTES_MAX = 1 << 34
_MAGIC = b"HFRING\r\n"  # a transfer that mangles line ends shows
_VERSION = 1
_VERSION_MORE = 2  # the same, and some record has sources that do not fit into it
_PAGE_BYTES = 4096
_WHOLE_MAX = 2**62

_HEADER = struct.Struct("<8sIIQQ")  # magic, version, ring_chunks, chunk_bytes, attempt
_STATE = struct.Struct("<I")
_PLACE = struct.Struct("<QQQI")  # attempt, step, chunk, place_crc
_CONTENT = struct.Struct("<IIQ")  # content_crc, sources, nbytes
_PAIR = struct.Struct("<II")  # rank, crc
_PLACE_OFFSET = 8
_CONTENT_OFFSET = _PLACE_OFFSET + _PLACE.size
_PAIRS_OFFSET = 64
_VERSION_OFFSET = 8
_ADDED_OFFSET = _HEADER.size + _STATE.size  # after the header's CRC: 36
SOURCES_INSIDE_MAX = (RECORD_BYTES - _PAIRS_OFFSET) // _PAIR.size


class SlotState(IntEnum):
    FREE = 0
    FILLING = 1
    FULL = 2


_STATES = tuple(SlotState)


class SlotRecord(NamedTuple):
    """The journal's record of one slot. Fields that the state does not promise are 0 or empty."""

    slot: int
    state: SlotState
    attempt: int = 0
    step: int = 0
    chunk: int = 0
    nbytes: int = 0
    sources: tuple[Source, ...] = ()


class Header(NamedTuple):
    """Geometry of the ring when it was made, and the attempt that may write into it."""

    chunk_bytes: int
    ring_chunks: int
    attempt: int

    @property
    def journal_bytes(self) -> int:
        return HEADER_BYTES + self.ring_chunks * RECORD_BYTES

    @property
    def ring_bytes(self) -> int:
        return self.chunk_bytes * self.ring_chunks

    def checked(self, source: str) -> Header:
        """Return this header if every field is in range. Raises a `ProtocolError` that names `source` and the field."""
        if not 0 < self.chunk_bytes <= CHUNK_BYTES_MAX or self.chunk_bytes % _PAGE_BYTES:
            raise ProtocolError(
                f"{source}: chunk_bytes {self.chunk_bytes}, expected a multiple of {_PAGE_BYTES}"
            )
        if not 0 < self.ring_chunks <= RING_CHUNKS_MAX:
            raise ProtocolError(f"{source}: ring_chunks {self.ring_chunks}, expected 1 to {RING_CHUNKS_MAX}")
        if not 0 < self.attempt < _WHOLE_MAX:
            raise ProtocolError(f"{source}: attempt {self.attempt}, expected 1 to 2^62")
        return self


class Journal:
    """Reads and writes the records in mapped memory. `memory`: the whole journal file, mapped shared; it may have room
    for more records than there are slots. `directory`: the ring's, with the files for sources that do not fit into a
    record. Raises `ProtocolError`: the header is not one of ours.
    """

    def __init__(self, memory: mmap.mmap, directory: Path) -> None:
        self._memory, self._directory, self._source = memory, directory, str(directory / "journal")
        self.header = self._read_header()
        self.ring_chunks = self.header.ring_chunks
        self.refresh_slots()

    @staticmethod
    def write_header(memory: mmap.mmap, header: Header, version: int = _VERSION) -> None:
        """Write a new header; the records after it must be zero, which is FREE."""
        # The CRC is that of version 1, so that the version changes by one store of one byte.
        raw = _HEADER.pack(_MAGIC, _VERSION, header.ring_chunks, header.chunk_bytes, header.attempt)
        crc = _STATE.pack(crc32(raw))
        raw = raw[:_VERSION_OFFSET] + _STATE.pack(version) + raw[_VERSION_OFFSET + _STATE.size :]
        memory[: len(raw) + len(crc)] = raw + crc

    @property
    def room_chunks(self) -> int:
        """How many slots the file has room for."""
        return (len(self._memory) - HEADER_BYTES) // RECORD_BYTES

    def add_slots(self, ring_chunks: int) -> None:
        """Record the new number of slots. Flusher only; records of new ones are zero, which is FREE."""
        assert self.ring_chunks <= ring_chunks <= self.room_chunks, (
            "slots are never taken away, and each has a record"
        )
        with memoryview(self._memory) as whole, whole[_ADDED_OFFSET : _ADDED_OFFSET + 4].cast("I") as added:
            added[0] = ring_chunks - self.header.ring_chunks  # one aligned store of one word
        self.ring_chunks = ring_chunks

    def refresh_slots(self) -> None:
        """Read how many slots there are now. Raises `ProtocolError` if the file has no records for them."""
        (added,) = _STATE.unpack_from(self._memory, _ADDED_OFFSET)
        ring_chunks = self.header.ring_chunks + added
        if ring_chunks > self.room_chunks:
            raise ProtocolError(
                f"{self._source}: header: {added} slots were added to {self.header.ring_chunks}, but the file has "
                f"records for {self.room_chunks} slots"
            )
        self.ring_chunks = ring_chunks

    def set_attempt(self, attempt: int) -> None:
        """Set the attempt whose chunks may arrive from now on. Flusher only, while no stager is attached."""
        header = self.header._replace(attempt=attempt).checked(self._source)
        (version,) = _STATE.unpack_from(self._memory, _VERSION_OFFSET)
        self.write_header(self._memory, header, version)
        self.header = header

    def mark_filling(self, slot: int, attempt: int, step: int, chunk: int) -> None:
        """FREE → FILLING: the slot will hold `chunk` of `step`. Stager only."""
        base = self._base(slot, {SlotState.FREE})
        # Cleared first: if the stager dies before FULL, the old bytes must not count as the new chunk.
        self._memory[base + _CONTENT_OFFSET : base + _CONTENT_OFFSET + _CONTENT.size] = bytes(_CONTENT.size)
        raw = _PLACE.pack(attempt, step, chunk, 0)[:-4]
        self._memory[base + _PLACE_OFFSET : base + _CONTENT_OFFSET] = raw + _STATE.pack(crc32(raw))
        self._set_state(base, SlotState.FILLING)

    def mark_full(self, slot: int, sources: Sequence[tuple[int, int]], nbytes: int) -> None:
        """FILLING → FULL: all senders' bytes are in place. Stager only. `sources`: each sender's `(rank, crc32)`."""
        base = self._base(slot, {SlotState.FILLING})
        ordered = sorted(sources)
        if not 0 < len(ordered) <= SOURCES_MAX:
            raise ProtocolError(
                f"{self._source}: slot {slot}: {len(ordered)} sources, expected 1 to {SOURCES_MAX}"
            )
        pairs = b"".join(_PAIR.pack(*pair) for pair in ordered)
        if len(ordered) > SOURCES_INSIDE_MAX:
            # Version 2 first: a reader of version 1 alone must not meet a record that it cannot read.
            self._memory[_VERSION_OFFSET] = _VERSION_MORE  # one store: `pack_into` would clear the word first
            write_side_file(self._directory / f"sources-{slot}", pairs[SOURCES_INSIDE_MAX * _PAIR.size :])
        inside = pairs[: SOURCES_INSIDE_MAX * _PAIR.size]
        self._memory[base + _PAIRS_OFFSET : base + _PAIRS_OFFSET + len(inside)] = inside
        raw = _CONTENT.pack(0, len(ordered), nbytes)[4:]
        content = _STATE.pack(crc32(pairs, crc32(raw))) + raw
        self._memory[base + _CONTENT_OFFSET : base + _CONTENT_OFFSET + len(content)] = content
        self._set_state(base, SlotState.FULL)

    def free(self, slot: int) -> None:
        """FULL → FREE (flusher), or FILLING → FREE (stager; flusher only after the stager is gone)."""
        self._set_state(self._base(slot, {SlotState.FILLING, SlotState.FULL}), SlotState.FREE)

    def state(self, slot: int) -> SlotState:
        """Read only the state word, cheaply enough for every slot. Raises `ProtocolError` if it is not a state."""
        if not 0 <= slot < self.ring_chunks:
            raise ProtocolError(
                f"{self._source}: there is no slot {slot}, the ring has {self.ring_chunks} slots"
            )
        word: int = _STATE.unpack_from(self._memory, HEADER_BYTES + slot * RECORD_BYTES)[0]
        if word >= len(_STATES):
            raise ProtocolError(f"{self._source}: record {slot}: state {word}, expected 0, 1 or 2")
        return _STATES[word]

    def record(self, slot: int) -> SlotRecord:
        """Return one slot's record, every field checked. Raises a `ProtocolError` that names file, record and field."""
        state = self.state(slot)
        return SlotRecord(slot, state) if state is SlotState.FREE else self._read(slot, state)

    def remains(self, slot: int) -> SlotRecord | None:
        """Return the chunk in a FULL slot, or the last one that is still in a FREE slot; None without a whole chunk.
        For the stager, which alone fills slots: the answer stays true until it does.
        """
        state = self.state(slot)
        if state is SlotState.FILLING:
            return None
        try:
            return self._read(slot, SlotState.FULL)._replace(state=state)
        except HoldfastError:
            return None

    def _read(self, slot: int, state: SlotState) -> SlotRecord:
        base = HEADER_BYTES + slot * RECORD_BYTES
        raw = self._memory[base + _PLACE_OFFSET : base + _CONTENT_OFFSET]
        attempt, step, chunk, place_crc = _PLACE.unpack(raw)
        self._expect(place_crc == crc32(raw[:-4]), slot, "place_crc does not hold")
        self._expect(0 < attempt < _WHOLE_MAX, slot, f"attempt {attempt} is out of range")
        self._expect(step < _WHOLE_MAX, slot, f"step {step} is out of range")
        self._expect(chunk < _WHOLE_MAX // self.header.chunk_bytes, slot, f"chunk {chunk} is out of range")
        if state is SlotState.FILLING:
            return SlotRecord(slot, state, attempt, step, chunk)
        raw = self._memory[base + _CONTENT_OFFSET : base + _CONTENT_OFFSET + _CONTENT.size]
        content_crc, count, nbytes = _CONTENT.unpack(raw)
        self._expect(0 < count <= SOURCES_MAX, slot, f"sources {count}, expected 1 to {SOURCES_MAX}")
        self._expect(0 < nbytes <= self.header.chunk_bytes, slot, f"nbytes {nbytes} is out of range")
        inside = min(count, SOURCES_INSIDE_MAX)
        pairs = self._memory[base + _PAIRS_OFFSET : base + _PAIRS_OFFSET + inside * _PAIR.size]
        if count > inside:
            pairs += self._read_more_sources(slot)
            self._expect(
                len(pairs) == count * _PAIR.size,
                slot,
                f"{len(pairs) // _PAIR.size} of {count} sources are there, with those of sources-{slot} beside it",
            )
        self._expect(content_crc == crc32(pairs, crc32(raw[4:])), slot, "content_crc does not hold")
        sources = tuple(Source(*pair) for pair in _PAIR.iter_unpack(pairs))
        in_order = all(one.rank < other.rank for one, other in itertools.pairwise(sources))
        self._expect(in_order, slot, "its ranks are not ascending")
        return SlotRecord(slot, state, attempt, step, chunk, nbytes, sources)

    def _read_more_sources(self, slot: int) -> bytes:
        try:
            return read_side_file(self._directory / f"sources-{slot}")
        except FileNotFoundError:
            return b""
        except ConfigError as error:  # costs the slot, as any damage of its record does
            raise ProtocolError(str(error)) from error

    def _expect(self, holds: bool, slot: int, what: str) -> None:
        if not holds:
            raise ProtocolError(
                f"{self._source}: record {slot}: {what}; the journal is damaged, this slot is not used"
            )

    def _base(self, slot: int, expected: set[SlotState]) -> int:
        found = self.state(slot)
        if found not in expected:
            names = " or ".join(sorted(state.name for state in expected))
            raise ProtocolError(f"{self._source}: record {slot}: state {found.name}, expected {names}")
        return HEADER_BYTES + slot * RECORD_BYTES

    def _set_state(self, base: int, state: SlotState) -> None:
        # One store of the lowest byte. `pack_into` clears the word before it writes: a stager that saw FREE in between,
        # and set FILLING, would have that overwritten by the flusher's FREE.
        self._memory[base] = state

    def _read_header(self) -> Header:
        if len(self._memory) < HEADER_BYTES:
            raise ProtocolError(
                f"{self._source}: the file has {len(self._memory)} bytes, expected a header of {HEADER_BYTES} bytes"
            )
        raw = self._memory[: _HEADER.size]
        (stated,) = _STATE.unpack_from(self._memory, _HEADER.size)
        magic, version, ring_chunks, chunk_bytes, attempt = _HEADER.unpack(raw)
        raw = _HEADER.pack(magic, _VERSION, ring_chunks, chunk_bytes, attempt)  # covered by the CRC
        if magic != _MAGIC:
            raise ProtocolError(
                f"{self._source}: header: magic {magic!r}, expected {_MAGIC!r}; the file is not a journal of holdfast"
            )
        if version not in {_VERSION, _VERSION_MORE}:
            raise ProtocolError(
                f"{self._source}: header: version {version}, this holdfast reads {_VERSION} and {_VERSION_MORE}"
            )
        if stated != crc32(raw):
            raise ProtocolError(f"{self._source}: header: header_crc {stated:#x}, expected {crc32(raw):#x}")
        header = Header(chunk_bytes, ring_chunks, attempt).checked(f"{self._source}: header")
        if len(self._memory) < header.journal_bytes or (len(self._memory) - HEADER_BYTES) % RECORD_BYTES:
            raise ProtocolError(
                f"{self._source}: the file has {len(self._memory)} bytes, expected {header.journal_bytes} for "
                f"{ring_chunks} chunks, or more by whole records"
            )
        return header
