"""Several rings read as one: merged lists, and bytes from the ring that holds them."""

from __future__ import annotations

import pytest

from holdfast.errors import PeerLost
from holdfast.image.chunks import Source
from holdfast.ring.journal import SlotRecord, SlotState
from holdfast.ring.remains import FetchKind, HeldCheckpoint, decode_held, encode_held
from trainer_side.link.ring_group import RingGroup


class Ring:
    """Simulates the answers of one stager."""

    def __init__(self, held: list[HeldCheckpoint]) -> None:
        self.held, self.is_lost = held, False
        self.asked: list[tuple[FetchKind, int]] = []

    def fetch(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        if self.is_lost:
            raise PeerLost("it is lost")
        self.asked.append((fetch_kind, chunk))
        match fetch_kind:
            case FetchKind.HELD:
                return encode_held(self.held)
            case FetchKind.BYTES:
                of_step = [one for one in self.held if (one.attempt, one.step) == (attempt, step)]
                return body + bytes([chunk]) if any(chunk in one.chunks for one in of_step) else None
            case FetchKind.LAYOUT:
                return body if self.held else None
            case _:
                return b"here"


def _held(step: int, chunks: range, digest: str = "d", drift: str = "") -> HeldCheckpoint:
    records = {
        chunk: SlotRecord(-1, SlotState.FREE, 1, step, chunk, 4096, (Source(0, chunk),)) for chunk in chunks
    }
    return HeldCheckpoint(1, step, digest, records, drift)


def _ask(rings: list[Ring]) -> dict[int, HeldCheckpoint]:
    said = RingGroup([ring.fetch for ring in rings]).fetch(FetchKind.HELD)
    assert said is not None
    return {held.step: held for held in decode_held(said)}


def test_the_chunks_of_all_rings_make_one_checkpoint() -> None:
    rings = [Ring([_held(5, range(2)), _held(4, range(1))]), Ring([_held(5, range(2, 5), drift="torn")])]
    found = _ask(rings)
    assert list(found) == [5, 4], "newest first"
    assert set(found[5].chunks) == set(range(5))
    assert (found[5].staged_digest, found[5].drift) == ("d", "torn")


@pytest.mark.parametrize("other", ["", "e"])
def test_a_checkpoint_is_staged_only_if_every_ring_with_a_part_of_it_says_so(other: str) -> None:
    found = _ask([Ring([_held(5, range(2))]), Ring([_held(5, range(2, 5), digest=other)])])
    assert found[5].staged_digest == ""
    assert set(found[5].chunks) == set(range(5)), "the store may know it"


def test_bytes_come_from_the_ring_that_has_them_and_it_is_asked_first_for_the_next() -> None:
    rings = [Ring([_held(5, range(2))]), Ring([_held(5, range(2, 5))])]
    group = RingGroup([ring.fetch for ring in rings])
    for chunk in range(5):
        assert group.fetch(FetchKind.BYTES, attempt=1, step=5, chunk=chunk, body=b"x") == b"x" + bytes(
            [chunk]
        )
    assert [chunk for _, chunk in rings[0].asked] == [0, 1, 2]
    assert [chunk for _, chunk in rings[1].asked] == [2, 3, 4]
    assert group.fetch(FetchKind.BYTES, attempt=1, step=5, chunk=9) is None


def test_a_layout_comes_from_any_ring_a_proof_from_the_leads_and_a_place_from_none() -> None:
    rings = [Ring([]), Ring([_held(5, range(1))])]
    group = RingGroup([ring.fetch for ring in rings])
    assert group.fetch(FetchKind.LAYOUT, body=b"d") == b"d"
    assert group.fetch(FetchKind.PROOF, attempt=1, step=5) == b"here"
    assert rings[1].asked == [(FetchKind.LAYOUT, 0)]
    assert group.fetch(FetchKind.PLACE) is None


def test_a_ring_that_is_lost_is_no_empty_one() -> None:
    rings = [Ring([_held(5, range(2))]), Ring([])]
    rings[1].is_lost = True
    with pytest.raises(PeerLost):
        _ask(rings)
