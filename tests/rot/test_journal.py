"""A byte flips beside the ring: journal header, slot records, checkpoint files, layouts.

A reader gets one of our named errors, or exactly the written value. A state word has no CRC of its own, because it is
one aligned store: a flip there makes a slot look FREE (its missing chunk is noticed) or FILLING, or is invalid.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from flusher.engine import Engine
from flusher.recovery import adopt_staged, resolve_checkpoints
from holdfast.errors import HoldfastError, ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.checkpoint_record import CheckpointRecord
from holdfast.ring.journal import HEADER_BYTES, RECORD_BYTES, SlotRecord, SlotState
from holdfast.ring.ring import Ring
from tests.rot.flips import COUNT, Flip, flips
from tests.support.images import made_up

CHUNK_BYTES = 4096
IMAGE = made_up(3, entries=10, chunk_bytes=CHUNK_BYTES, ranks=3, entry_bytes_max=6000)
SLOTS = IMAGE.layout.chunks + 3
_HEADER_CHECKED_BYTES = 36
_STATE = range(4)
_PLACE = range(8, 36)  # attempt, step, chunk, place_crc
_CONTENT = range(36, 52)  # content_crc, sources, nbytes
_PAIRS_AT = 64


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make a ring with one staged checkpoint, one slot FILLING, and FREE slots that were used before."""
    path = tmp_path / "ring"
    with Ring.create(path, chunk_bytes=CHUNK_BYTES, ring_chunks=SLOTS, attempt=7) as ring:
        digest = ring.put_layout(IMAGE.layout)
        for chunk in range(IMAGE.layout.chunks):
            data = IMAGE.chunk_bytes(chunk)
            ring.mark_filling(chunk, 7, 12, chunk)
            ring.slot_memory(chunk)[: len(data)] = data
            ring.mark_full(chunk, IMAGE.sources(chunk), len(data))
        ring.mark_filling(SLOTS - 1, 7, 13, 0)
        ring.mark_filling(SLOTS - 2, 7, 11, 2)
        ring.mark_full(SLOTS - 2, [(0, 5)], 100)
        ring.free(SLOTS - 2)
        record = {
            "ranks": {"0": {"saved_at_unix": 1700000000.25}},
            "stager": {"staged_at_unix": 1700000001.5},
        }
        ring.write_checkpoint(7, 12, "staged", digest, record)
    return path


def _used(slot: SlotRecord) -> set[int]:
    """Return the bytes of a record that are valid in its state, without the state itself."""
    used: set[int] = set()
    if slot.state is not SlotState.FREE:
        used |= set(_PLACE)
    if slot.state is SlotState.FULL:
        used |= set(_CONTENT) | set(range(_PAIRS_AT, _PAIRS_AT + 8 * len(slot.sources)))
    return used


def test_every_flip_in_the_header_is_refused(directory: Path) -> None:
    journal = directory / "journal"
    whole = journal.read_bytes()
    for flip in flips("header", _HEADER_CHECKED_BYTES):
        journal.write_bytes(flip.applied(whole))
        with pytest.raises(ProtocolError, match="journal"):
            Ring.attach(directory)
    for flip in flips("rest of the header", HEADER_BYTES - _HEADER_CHECKED_BYTES, 100):
        journal.write_bytes(Flip(_HEADER_CHECKED_BYTES + flip.offset, flip.mask).applied(whole))
        with Ring.attach(directory) as ring:  # zeros that no code reads
            assert ring.attempt == 7
    # Both versions are read in the same way, so swapping them does no harm.
    journal.write_bytes(Flip(8, 1 ^ 2).applied(whole))
    with Ring.attach(directory) as ring:
        assert ring.attempt == 7
        assert len(ring.records()) == SLOTS


@pytest.mark.parametrize("of_use", [True, False], ids=["valid fields", "anywhere"])
def test_every_flip_in_a_record_is_an_error_or_changes_nothing(directory: Path, of_use: bool) -> None:
    journal = directory / "journal"
    whole = journal.read_bytes()
    with Ring.attach(directory) as ring:
        truth = ring.records()
    places = [
        (slot.slot, at)
        for slot in truth
        for at in (sorted(_used(slot) | set(_STATE)) if of_use else range(RECORD_BYTES))
    ]
    seen: Counter[str] = Counter()
    with Ring.attach(directory) as ring:
        for flip in flips(f"record {of_use}", len(places)):
            slot, at = places[flip.offset]
            there = Flip(HEADER_BYTES + slot * RECORD_BYTES + at, flip.mask)
            _write(journal, there.offset, whole[there.offset] ^ flip.mask)
            found, refusal = _read(ring, slot)
            if found is None:
                assert f"{journal}: record {slot}" in refusal
                seen["refused"] += 1
            else:
                if at in _STATE:
                    _check_other_state(ring, truth[slot], found)
                    seen["another state"] += 1
                else:
                    assert at not in _used(truth[slot]), (slot, at, flip)
                    assert found == truth[slot]
                    seen["a byte that nothing reads"] += 1
            _write(journal, there.offset, whole[there.offset])
    assert seen.total() == COUNT
    if of_use:
        assert seen["a byte that nothing reads"] == 0
        assert seen["refused"] > COUNT * 0.8


def _read(ring: Ring, slot: int) -> tuple[SlotRecord | None, str]:
    """Return a record, or the reason why it cannot be read."""
    try:
        return ring.record(slot), ""
    except ProtocolError as error:
        return None, str(error)


def _check_other_state(ring: Ring, truth: SlotRecord, found: SlotRecord) -> None:
    """Check a flip to another valid state. If a chunk is no longer FULL, its checkpoint is reported as incomplete."""
    assert found.state is not truth.state
    taken = Taken()
    if truth.state is SlotState.FULL:
        assert adopt_staged(cast(Engine, taken), ring) == [CheckpointId(7, 12)]
        assert taken.chunks == set(range(IMAGE.layout.chunks)) - {truth.chunk}, (
            "the pipeline misses it and says so"
        )
    elif found.state is SlotState.FULL:
        # A former content: the chunk matches the record, or its CRC will fail. No known checkpoint includes it.
        assert found.step == 11
        adopt_staged(cast(Engine, taken), ring)
        assert ring.state(found.slot) is SlotState.FREE
        assert len(taken.chunks) == IMAGE.layout.chunks


class Taken:
    """Replaces the engine, and records its input."""

    def __init__(self) -> None:
        self.chunks: set[int] = set()
        self.given_up: dict[CheckpointId, HoldfastError] = {}

    def knows(self, key: CheckpointId) -> bool:
        return key in self.given_up

    def pipeline_knows(self, key: CheckpointId) -> bool:
        return False

    def load_doubts(self) -> None:
        pass

    def load_proofs(self) -> None:
        pass

    def begin(self, key: CheckpointId, layout: object) -> None:
        assert key == CheckpointId(7, 12)

    def add_chunk(self, record: SlotRecord) -> None:
        self.chunks.add(record.chunk)

    def mark_staged(self, key: CheckpointId) -> None:
        assert key == CheckpointId(7, 12)

    def receiving(self) -> list[CheckpointId]:
        return []

    def give_up(self, key: CheckpointId, error: HoldfastError) -> None:
        self.given_up[key] = error


def _write(path: Path, offset: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([value]))


def test_every_flip_in_a_checkpoint_file_is_refused(directory: Path) -> None:
    path = directory / "checkpoint-7-12.json"
    whole = path.read_bytes()
    with Ring.attach(directory) as ring:
        assert ring.checkpoint(7, 12) == CheckpointRecord(
            attempt=7,
            step=12,
            state="staged",
            layout_digest=IMAGE.layout.digest,
            record={
                "ranks": {"0": {"saved_at_unix": 1700000000.25}},
                "stager": {"staged_at_unix": 1700000001.5},
            },
        )
        for flip in flips("checkpoint", len(whole)):
            path.write_bytes(flip.applied(whole))
            with pytest.raises(ProtocolError, match=path.name):
                ring.checkpoint(7, 12)
        for nbytes in range(len(whole)):
            path.write_bytes(whole[:nbytes])
            with pytest.raises(ProtocolError, match=path.name):
                ring.checkpoint(7, 12)


def test_a_damaged_checkpoint_file_costs_only_its_own_checkpoint(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = directory / "checkpoint-7-12.json"
    path.write_bytes(Flip(40, 1).applied(path.read_bytes()))
    with Ring.attach(directory) as ring:
        taken = Taken()
        assert adopt_staged(cast(Engine, taken), ring) == []
        resolve_checkpoints(cast(Engine, taken), ring, "its stager ended")
        assert set(taken.given_up) == {CheckpointId(7, 12)}
        assert all(ring.state(slot) is SlotState.FREE for slot in range(SLOTS)), "its chunks were given back"
    assert any("CRC-32" in record.message for record in caplog.records)


def test_every_flip_in_a_layout_is_refused_or_changes_nothing(directory: Path) -> None:
    path = directory / f"layout-{IMAGE.layout.digest[:16]}"
    whole = path.read_bytes()
    seen: Counter[str] = Counter()
    for flip in flips("layout", len(whole)):
        path.write_bytes(flip.applied(whole))
        with Ring.attach(directory) as ring:
            try:
                found = ring.layout(IMAGE.layout.digest)
            except ProtocolError:
                seen["refused"] += 1
            else:
                # The same document, compressed differently (a zlib header records its level, for example).
                assert found == IMAGE.layout
                seen["the same layout"] += 1
    assert seen.total() == COUNT
    assert seen["refused"] > COUNT * 0.99, seen
