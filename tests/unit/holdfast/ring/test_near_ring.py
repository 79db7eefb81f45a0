"""A ring that a rank of the same machine reads itself: correct bytes or none, while the stager changes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import ProtocolError
from holdfast.process import boot_id
from holdfast.ring.directory import open_private_file
from holdfast.ring.near_ring import NearRing, RingLocation, open_near_ring
from holdfast.ring.ring import Ring

ATTEMPT, CHUNK = 3, 2
BYTES = bytes(range(256)) * 16


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    """Slot 1 has chunk 2 of step 5, FULL; a stager holds the ring."""
    with Ring.create(tmp_path / "run", chunk_bytes=4096, ring_chunks=4, attempt=ATTEMPT) as made:
        made.hold(ATTEMPT)
        _fill(made, 5, BYTES)
        yield made


def _fill(ring: Ring, step: int, data: bytes) -> None:
    ring.mark_filling(1, ATTEMPT, step, CHUNK)
    ring.slot_memory(1)[: len(data)] = data
    ring.mark_full(1, [(0, 77)], len(data))


def _place(ring: Ring) -> RingLocation:
    return RingLocation(str(ring.directory), ATTEMPT, ring.token, boot_id())


def test_parts_of_a_chunk_are_read_while_the_flusher_frees_it_and_after_the_ring_is_gone(ring: Ring) -> None:
    near = NearRing(_place(ring))
    one, other = bytearray(100), bytearray(7)

    def wanted() -> Iterator[tuple[int, memoryview]]:
        yield 50, memoryview(one)
        ring.free(1)
        yield 4089, memoryview(other)

    assert near.read(ATTEMPT, 5, CHUNK, wanted())
    assert bytes(one + other) == BYTES[50:150] + BYTES[4089:]
    Ring.remove(ring.directory)
    assert near.read(ATTEMPT, 5, CHUNK, [(0, memoryview(one))])
    assert one == BYTES[:100]


@pytest.mark.parametrize("key", [(ATTEMPT, 6, CHUNK), (ATTEMPT, 5, 0), (2, 5, CHUNK)])
def test_a_checkpoint_that_is_not_in_the_ring_is_not_read(ring: Ring, key: tuple[int, int, int]) -> None:
    assert not NearRing(_place(ring)).read(*key, [(0, memoryview(bytearray(8)))])


def test_a_read_ends_at_the_end_of_its_chunk(ring: Ring) -> None:
    ring.free(1)
    _fill(ring, 5, BYTES[:100])
    near = NearRing(_place(ring))
    assert near.read(ATTEMPT, 5, CHUNK, [(92, memoryview(bytearray(8)))])
    assert not near.read(ATTEMPT, 5, CHUNK, [(93, memoryview(bytearray(8)))])


def _to_another_step(ring: Ring) -> None:
    _fill(ring, 6, bytes(4096))


def _to_the_same_length(ring: Ring) -> None:
    """Another stager's step of the same number: all but the bytes and their CRC is the same."""
    ring.mark_filling(1, ATTEMPT, 5, CHUNK)
    ring.mark_full(1, [(0, 78)], 4096)


def _begun(ring: Ring) -> None:
    ring.mark_filling(1, ATTEMPT, 6, CHUNK)


def _given_up(ring: Ring) -> None:
    _begun(ring)
    ring.free(1)


@pytest.mark.parametrize("refill", [_begun, _given_up, _to_another_step, _to_the_same_length])
@pytest.mark.parametrize("copied", [False, True])
def test_bytes_of_a_slot_that_is_filled_meanwhile_do_not_count(
    ring: Ring, refill: Callable[[Ring], None], copied: bool
) -> None:
    """Before the copy or after it: a reader that was frozen there finds out when it goes on."""
    ring.free(1)
    near = NearRing(_place(ring))
    view = memoryview(bytearray(100))

    def wanted() -> Iterator[tuple[int, memoryview]]:
        if not copied:
            refill(ring)
        yield 0, view
        if copied:
            refill(ring)

    assert not near.read(ATTEMPT, 5, CHUNK, wanted())
    assert not copied or view == BYTES[:100]


@pytest.mark.parametrize(
    "wrong",
    [
        {"boot_id": "of another machine"},
        {"token": "0" * 32},
        {"attempt": ATTEMPT + 1},
        {"directory": "run"},
        {"directory": "/nowhere/run"},
    ],
    ids=str,
)
def test_a_ring_that_is_not_here_is_not_read(ring: Ring, wrong: dict[str, object]) -> None:
    place = _place(ring)
    assert open_near_ring(place.to_bytes()) is not None
    assert open_near_ring(RingLocation(**(place._asdict() | wrong)).to_bytes()) is None


def test_a_ring_of_others_or_a_damaged_one_is_not_read(ring: Ring) -> None:
    said = _place(ring).to_bytes()
    ring.directory.chmod(0o755)
    assert open_near_ring(said) is None
    ring.directory.chmod(0o700)
    assert open_near_ring(said) is not None
    journal = ring.directory / "journal"
    for data in (b"", b"x" * 4096):
        journal.unlink()
        journal.write_bytes(data)
        journal.chmod(0o600)
        assert open_near_ring(said) is None
    journal.unlink()
    assert open_near_ring(said) is None


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 9999, json.dumps(["/a", 0, "t", "b"]).encode(), b'["/a",1,"t"]']
)
def test_an_answer_that_is_no_place_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="place of the ring"):
        RingLocation.from_bytes(data)
    assert open_near_ring(data) is None


def test_a_ring_that_is_made_anew_while_it_is_opened_is_not_read(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the journal of one would say what lies in the bytes of another, before and after each copy."""
    said = _place(ring).to_bytes()
    made: list[Ring] = []

    def another_before(path: Path, flags: int) -> int:
        if path.name == "ring" and not made:
            Ring.remove(ring.directory)
            made.append(Ring.create(ring.directory, chunk_bytes=4096, ring_chunks=4, attempt=ATTEMPT))
            made[0].hold(ATTEMPT)
        return open_private_file(path, flags)

    monkeypatch.setattr("holdfast.ring.near_ring.open_private_file", another_before)
    assert open_near_ring(said) is None
    made[0].close()
