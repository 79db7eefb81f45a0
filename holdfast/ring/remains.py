"""The bytes of checkpoints that a ring still has, and the messages with which ranks ask the stager for them.

    FULL slots   staged, or being received: the flusher has not written them yet
    FREE slots   written, and not refilled since: the bytes are still there (`holdfast/ring/journal.py`, rule 4)

The stager holds no slot back for this: a free slot is refilled in its turn. A ring may therefore have all of a
checkpoint, a part, or nothing. Whether a checkpoint was ever staged is known from its checkpoint file, while the
flusher works on it, or from the store, which has published it. Other remains must not be used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source
from holdfast.image.layout import Layout
from holdfast.image.replicas import drift_of
from holdfast.image.save_record import TRACKER_CHARACTERS_MAX, TRACKERS_MAX, StepRecord
from holdfast.ring.doubts import doubt_about, read_doubts
from holdfast.ring.journal import SlotRecord, SlotState
from holdfast.ring.ring import Ring

ANSWER_BYTES_MAX = 8 << 20  # of a chunk, in one answer
_TOLD_MAX = 16  # checkpoints, newest first; older ones are in the store
_RAW_BYTES_MAX = 1 << 28
_Whole = Annotated[int, Field(ge=0, lt=2**62)]
_U32 = Annotated[int, Field(ge=0, lt=2**32)]
_Chunk = tuple[_U32, _Whole, list[tuple[_U32, _U32]]]
_Digest = Annotated[str, Field(max_length=64)]
_Drift = Annotated[str, Field(max_length=4096)]
_Short = Annotated[str, Field(max_length=TRACKER_CHARACTERS_MAX)]
_Trackers = Annotated[dict[_Short, _Short], Field(max_length=TRACKERS_MAX)]
_ROWS = TypeAdapter(list[tuple[_Whole, _Whole, _Digest, list[_Chunk], _Drift, _Trackers]])


class FetchKind(IntEnum):
    """The kind of bytes that a FETCH asks for."""

    HELD = 0
    LAYOUT = 1
    BYTES = 2
    PLACE = 3
    PROOF = 4


class HeldCheckpoint(NamedTuple):
    """The chunks of one checkpoint that the ring still has."""

    attempt: int
    step: int
    staged_digest: str  # of its layout, while it is staged and not in the store; else empty
    chunks: Mapping[int, SlotRecord]  # chunk → record of its slot
    drift: str = ""  # while it is staged: where its replicas differed, or why it may be torn
    trackers: Mapping[str, str] = MappingProxyType({})  # while it is staged: its runs of experiment trackers

    def chunks_fitting(self, layout: Layout) -> frozenset[int]:
        return frozenset(
            chunk
            for chunk, record in self.chunks.items()
            if chunk < layout.chunks
            and record.nbytes == layout.chunk_extent(chunk).nbytes
            and tuple(source.rank for source in record.sources) == layout.senders(chunk)
        )


def held_checkpoints(ring: Ring) -> list[HeldCheckpoint]:
    """Return all checkpoints of which the ring has something, newest first. Stager only."""
    found: dict[CheckpointId, dict[int, SlotRecord]] = {}
    for record in ring.remains():
        found.setdefault(CheckpointId(record.attempt, record.step), {})[record.chunk] = record
    return [_held_checkpoint(ring, key, chunks) for key, chunks in sorted(found.items(), reverse=True)]


def _held_checkpoint(ring: Ring, key: CheckpointId, chunks: dict[int, SlotRecord]) -> HeldCheckpoint:
    try:
        stored = ring.checkpoint(*key)
    except ProtocolError:  # the flusher reports it
        stored = None
    if stored is None or stored.state != "staged":
        return HeldCheckpoint(*key, "", chunks)
    record = StepRecord.from_json(stored.record)
    caveat = drift_of(record, key.step) or doubt_about(read_doubts(ring.directory), key)
    return HeldCheckpoint(*key, stored.layout_digest, chunks, caveat, record.trackers)


def encode_held(held: Iterable[HeldCheckpoint]) -> bytes:
    """Encode the newest of them for the wire."""
    rows = [
        [
            *(one.attempt, one.step, one.staged_digest),
            [[chunk, record.nbytes, record.sources] for chunk, record in one.chunks.items()],
            *(one.drift, dict(one.trackers)),
        ]
        for one in list(held)[:_TOLD_MAX]
    ]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)


def decode_held(body: bytes) -> list[HeldCheckpoint]:
    """Read the message of `encode_held`, which names no slots. Raises `ProtocolError`: malformed, or too large."""
    try:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(body, _RAW_BYTES_MAX)
        if inflater.unconsumed_tail or not inflater.eof:
            raise ProtocolError(
                f"FETCHED: the list of the ring's contents is truncated, or above {_RAW_BYTES_MAX} bytes unpacked"
            )
        rows = _ROWS.validate_json(raw)
    except (zlib.error, ValidationError, RecursionError) as error:
        raise ProtocolError(f"FETCHED: the list of the ring's contents cannot be read: {error}") from error
    return [
        HeldCheckpoint(
            attempt,
            step,
            digest,
            {
                chunk: SlotRecord(
                    -1, SlotState.FREE, attempt, step, chunk, nbytes, tuple(Source(*pair) for pair in pairs)
                )
                for chunk, nbytes, pairs in chunks
            },
            drift,
            trackers,
        )
        for attempt, step, digest, chunks, drift, trackers in rows
    ]
