"""A ring that grows while two processes use it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from holdfast.errors import ProtocolError
from holdfast.ring.journal import HEADER_BYTES, RECORD_BYTES, SlotState
from holdfast.ring.ring import Ring

CHUNK_BYTES = 8192


def grown(ring: Ring, ring_chunks: int) -> None:
    ring.allocate(ring_chunks)
    ring.add_slots(ring_chunks)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def make(directory: Path, ring_chunks: int = 4, room_chunks: int = 64) -> Ring:
    return Ring.create(
        directory, chunk_bytes=CHUNK_BYTES, ring_chunks=ring_chunks, attempt=7, room_chunks=room_chunks
    )


def test_slots_of_all_maps_are_apart_and_what_was_there_stays(directory: Path) -> None:
    with make(directory) as ring:
        ring.mark_filling(1, 7, 3, 0)
        ring.slot_memory(1)[:] = b"a" * CHUNK_BYTES
        ring.mark_full(1, [(0, 5)], CHUNK_BYTES)
        held = ring.slot_memory(1)  # a view in use, over both growths
        for ring_chunks in (5, 20):
            grown(ring, ring_chunks)
            assert ring.ring_chunks == ring_chunks
        for slot in range(20):
            if slot != 1:
                assert ring.state(slot) is SlotState.FREE
                assert bytes(ring.slot_memory(slot)) == bytes(CHUNK_BYTES)
                ring.slot_memory(slot)[:] = bytes([slot + 1]) * CHUNK_BYTES
        for slot in range(20):
            expected = b"a" if slot == 1 else bytes([slot + 1])
            assert bytes(ring.slot_memory(slot)) == expected * CHUNK_BYTES
        assert bytes(held) == b"a" * CHUNK_BYTES
        assert [record.slot for record in ring.records() if record.state is SlotState.FULL] == [1]
        with pytest.raises(ProtocolError, match="there is no slot 20, the ring has 20 slots"):
            ring.slot_memory(20)
        with pytest.raises(ProtocolError, match="there is no slot 20, the ring has 20 slots"):
            ring.state(20)


def _play_stager(directory: Path, attached: Event, has_grown: Event) -> None:
    with Ring.attach(directory) as ring:
        assert ring.ring_chunks == 4
        attached.set()
        assert has_grown.wait(60)
        assert ring.ring_chunks == 4, "it knows of nothing that it has not looked for"
        assert ring.refresh_slots() == range(4, 9)
        assert ring.refresh_slots() == range(9, 9)
        ring.mark_filling(8, 7, 12, 1)
        ring.slot_memory(8)[:5] = b"hello"
        ring.mark_full(8, [(0, 5)], 8000)


def test_another_process_that_has_it_mapped_finds_the_new_slots(directory: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    attached, has_grown = spawn.Event(), spawn.Event()
    with make(directory) as ring:
        other = spawn.Process(target=_play_stager, args=(directory, attached, has_grown))
        other.start()
        assert attached.wait(60)
        grown(ring, 9)
        has_grown.set()
        other.join()
        assert other.exitcode == 0
        assert ring.record(8).state is SlotState.FULL
        assert bytes(ring.slot_memory(8)[:6]) == b"hello\0"


def test_a_ring_that_grew_and_was_removed_at_once_is_no_error(directory: Path) -> None:
    """As at the end of a short job: the flusher says that the ring has grown, and that all is done, and leaves."""
    with make(directory) as ring, Ring.attach(directory) as other:
        grown(ring, 9)
        Ring.remove(directory)
        assert other.refresh_slots() == range(4, 9)
        other.slot_memory(8)[:] = b"x" * CHUNK_BYTES
        assert bytes(ring.slot_memory(8)) == b"x" * CHUNK_BYTES


def test_a_flusher_that_dies_between_memory_and_journal_leaves_a_ring_that_the_next_can_grow(
    directory: Path,
) -> None:
    with make(directory) as ring:
        ring.allocate(12)
    with Ring.attach(directory) as found:
        assert found.ring_chunks == 4
        grown(found, 10)
        found.slot_memory(9)[:] = b"x" * CHUNK_BYTES
    with Ring.attach(directory) as found:
        assert found.ring_chunks == 10
        assert bytes(found.slot_memory(9)) == b"x" * CHUNK_BYTES


def test_the_attempt_changes_and_the_number_of_slots_stays(directory: Path) -> None:
    with make(directory) as ring:
        grown(ring, 9)
        ring.set_attempt(8)
    with Ring.attach(directory) as found:
        assert (found.attempt, found.ring_chunks) == (8, 9)


def test_room_takes_no_memory_before_it_is_used(directory: Path) -> None:
    with make(directory, room_chunks=50_000):
        assert (directory / "journal").stat().st_size == HEADER_BYTES + 50_000 * RECORD_BYTES
        assert (directory / "journal").stat().st_blocks * 512 <= HEADER_BYTES + 5 * RECORD_BYTES
        assert (directory / "ring").stat().st_size == 4 * CHUNK_BYTES


def test_a_ring_without_room_keeps_its_size(directory: Path) -> None:
    with make(directory, room_chunks=0) as ring:
        assert ring.room_chunks == 4
        assert (directory / "journal").stat().st_size == HEADER_BYTES + 4 * RECORD_BYTES


def test_chunks_at_which_no_map_can_begin_do_not_grow(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with pages of 64 KiB."""
    monkeypatch.setattr("mmap.ALLOCATIONGRANULARITY", 65536)
    with make(directory) as ring:
        assert ring.room_chunks == 4


def test_a_damaged_number_of_slots_is_named(directory: Path) -> None:
    with make(directory, room_chunks=8):
        pass
    data = bytearray((directory / "journal").read_bytes())
    data[36:40] = (5).to_bytes(4, "little")
    (directory / "journal").write_bytes(data)
    with pytest.raises(ProtocolError, match="5 slots were added to 4, but the file has records for 8"):
        Ring.attach(directory)
    data[36:40] = (1).to_bytes(4, "little")
    (directory / "journal").write_bytes(data)
    with pytest.raises(ProtocolError, match=r"ring: 32768 bytes, the journal says 40960"):
        Ring.attach(directory)
