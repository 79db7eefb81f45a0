"""The thread that takes memory for the ring: how much, in which steps, and its messages."""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flusher.ring_room import RingGrown, RingRoom
from flusher.workers import Inbox
from holdfast.ring.growth import growth_bytes, image_chunks_max, wanted_chunks
from holdfast.ring.ring import Ring

CHUNK_BYTES = 8 << 20
MIB = 1 << 20


@pytest.fixture
def ring() -> Iterator[Ring]:
    """In memory: a disk would take as long as it takes."""
    directory = Path(f"/dev/shm/holdfast-test-{os.getpid()}")
    with Ring.create(directory, chunk_bytes=CHUNK_BYTES, ring_chunks=8, attempt=1, room_chunks=1000) as made:
        try:
            yield made
        finally:
            Ring.remove(directory)
            directory.rmdir()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


def said(inbox: Inbox) -> list[RingGrown]:
    """All that the thread says, until its note."""
    found: list[RingGrown] = []
    for _ in range(1000):
        inbox.wait(60)
        found += inbox.drain()
        if found and found[-1].note:
            return found
    raise AssertionError(found)


def test_half_of_what_is_free_is_taken_at_most() -> None:
    assert growth_bytes(100, 60) == 30
    assert growth_bytes(50, 60) == 25
    assert growth_bytes(50, 0) == 0
    assert growth_bytes(50, -7) == 0


def test_wanted_chunks_have_room_for_two_images() -> None:
    assert all(image_chunks_max(wanted_chunks(chunks)) == chunks for chunks in range(100))
    assert image_chunks_max(0) == 0


def test_memory_is_taken_in_steps_and_the_loop_is_told_of_each(ring: Ring, inbox: Inbox) -> None:
    with RingRoom(ring, inbox, grows=True) as room:
        room.request(40)
        found = said(inbox)
    assert wanted_chunks(40) == 88
    assert [one.ring_chunks for one in found] == [40, 72, 88, 88]
    assert [bool(one.note) for one in found] == [False, False, False, True]
    assert found[-1].note == "the ring has 0.7 GiB now, room for two checkpoints"
    assert ring.ring_chunks == 8, "the loop adds them, and nobody else"
    assert (ring.directory / "ring").stat().st_blocks * 512 == 88 * CHUNK_BYTES


def test_new_slots_move_into_huge_pages_before_the_loop_adds_them(
    ring: Ring, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: queue.SimpleQueue[int] = queue.SimpleQueue()

    def use_huge_pages(ring_chunks: int, stopped: Callable[[], bool]) -> int:
        moved.put(ring_chunks)
        return 0

    monkeypatch.setattr(ring, "use_huge_pages", use_huge_pages)
    with RingRoom(ring, inbox, grows=True) as room:
        assert moved.get(timeout=60) == 8
        room.request(20)
        assert moved.get(timeout=60) == 48


def test_an_image_that_fits_takes_no_memory(ring: Ring, inbox: Inbox) -> None:
    with RingRoom(ring, inbox, grows=True) as room:
        assert room.request(20)
        assert said(inbox)[-1].ring_chunks == 48
        assert not room.request(20)
        assert not room.request(5)
        assert room.request(21)
        found = said(inbox)
    assert [one.ring_chunks for one in found] == [50, 50]


def test_a_ring_of_a_set_size_never_grows(ring: Ring, inbox: Inbox) -> None:
    with RingRoom(ring, inbox, grows=False) as room:
        assert not room.request(40)
    assert inbox.drain() == []
    assert (ring.directory / "ring").stat().st_size == 8 * CHUNK_BYTES


def test_where_memory_is_short_it_says_so_once_and_asks_again_for_a_larger_image_only(
    ring: Ring, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def available() -> int:
        asked.append(1)
        return 40 * CHUNK_BYTES

    monkeypatch.setattr("holdfast.ring.growth.available_memory_bytes", available)
    with RingRoom(ring, inbox, grows=True) as room:
        room.request(40)
        found = said(inbox)
        assert [one.ring_chunks for one in found] == [28, 28]
        assert found[-1].note.startswith(
            "the ring has 0.2 GiB; two checkpoints need 0.7 GiB, but no more than half of"
        )
        assert not room.request(40)
        assert room.request(41)
        assert [one.ring_chunks for one in said(inbox)] == [48, 48]
    assert len(asked) == 2


def test_a_system_that_refuses_is_named_and_the_ring_keeps_what_it_has(
    ring: Ring, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        if nbytes > 50 * CHUNK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, nbytes)

    allocate = os.posix_fallocate
    monkeypatch.setattr("os.posix_fallocate", refuse)
    with RingRoom(ring, inbox, grows=True) as room:
        room.request(40)
        found = said(inbox)
    assert [one.ring_chunks for one in found] == [40, 40]
    assert "No space left on device" in found[-1].note
    assert "set ring_bytes" in found[-1].note


def test_the_journal_is_the_limit(inbox: Inbox, tmp_path: Path) -> None:
    with (
        Ring.create(tmp_path / "run", chunk_bytes=MIB, ring_chunks=8, attempt=1, room_chunks=12) as ring,
        RingRoom(ring, inbox, grows=True) as room,
    ):
        room.request(40)
        assert [one.ring_chunks for one in said(inbox)] == [12, 12]
