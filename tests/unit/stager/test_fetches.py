"""The stager returns the bytes that its ring still holds, in order, and never bytes of a reused slot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ProtocolError
from holdfast.ring.near_ring import RingLocation, open_near_ring
from holdfast.ring.remains import ANSWER_BYTES_MAX, FetchKind
from holdfast.ring.ring import Ring
from holdfast.wire.frames import Frame, Kind, to_json
from tests.support.ring_checkpoint import LiveFetch, put_in_ring
from tests.unit.trainer_side.tiered import saved


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    with Ring.create(tmp_path / "run", chunk_bytes=4096, ring_chunks=64, attempt=1) as made:
        yield made


def _bytes(fetch: LiveFetch, step: int, chunk: int, offset: int = 0, nbytes: int = 100) -> bytes | None:
    body = to_json({"offset": offset, "nbytes": nbytes})
    return fetch(FetchKind.BYTES, attempt=1, step=step, chunk=chunk, body=body)


def test_bytes_are_those_of_the_chunk_or_none(ring: Ring) -> None:
    made = saved(3)
    put_in_ring(ring, made, range(64), state="durable")
    fetch = LiveFetch(ring)
    assert _bytes(fetch, 3, 1) is None, "nobody has asked what there is"
    assert fetch(FetchKind.HELD)
    assert _bytes(fetch, 3, 1, 50) == made.image()[4096 + 50 : 4096 + 150]
    assert _bytes(fetch, 3, 1, 4000) is None, "beyond its end"
    assert _bytes(fetch, 4, 1) is None
    assert _bytes(fetch, 3, 63) is None
    ring.mark_filling(1, 2, 4, 1)
    assert _bytes(fetch, 3, 1) is None, "its slot is being filled"
    ring.mark_full(1, [(0, 1)], 4096)
    assert _bytes(fetch, 3, 1) is None, "its slot holds another step"
    assert _bytes(fetch, 3, 2) is not None


def test_the_holder_of_a_ring_says_where_it_lies(ring: Ring) -> None:
    fetch = LiveFetch(ring)
    assert fetch(FetchKind.PLACE) is None
    ring.hold(LiveFetch.attempt)
    said = fetch(FetchKind.PLACE)
    assert said is not None
    assert RingLocation.from_bytes(said)[:3] == (str(ring.directory), LiveFetch.attempt, ring.token)
    assert open_near_ring(said) is not None
    ring.hold(LiveFetch.attempt)
    assert open_near_ring(said) is None, "the token is of one stager"


def test_a_layout_is_there_or_not(ring: Ring) -> None:
    made = saved(3)
    put_in_ring(ring, made, range(64), state="durable")
    fetch = LiveFetch(ring)
    assert fetch(FetchKind.LAYOUT, body=made.layout.digest.encode()) == made.layout.to_bytes()
    assert fetch(FetchKind.LAYOUT, body=b"0" * 64) is None
    assert fetch(FetchKind.LAYOUT, body=b"../../etc/passwd") is None


def test_two_answers_at_a_time_are_on_their_way_to_a_rank_in_the_order_of_its_questions(ring: Ring) -> None:
    fetch = LiveFetch(ring)
    fetches, port = fetch.fetches, fetch.port
    for rank, step in ((0, 1), (0, 2), (0, 3), (1, 7)):
        fetches.handle(rank, Frame(Kind.FETCH, 9, step, 0, FetchKind.LAYOUT, 1, b""))
    assert fetches.answer()
    assert [(rank, frame.step) for rank, frame in port.sent] == [(0, 1), (0, 2), (1, 7)]
    assert fetches.busy
    assert not fetches.answer()
    port.unsent.clear()
    assert fetches.answer()
    assert port.sent[-1][1].step == 3
    fetches.handle(1, Frame(Kind.FETCH, 9, 8, 0, FetchKind.LAYOUT, 1, b""))
    fetches.drop_requests(1)
    assert not fetches.busy


@pytest.mark.parametrize(
    ("flags", "body"),
    [
        (len(FetchKind), b"{}"),
        (FetchKind.BYTES, b""),
        (FetchKind.BYTES, b'{"offset":-1,"nbytes":5}'),
        (FetchKind.BYTES, b'{"offset":0,"nbytes":0}'),
        (FetchKind.BYTES, b'{"offset":0,"nbytes":%d}' % (ANSWER_BYTES_MAX + 1)),
        (FetchKind.BYTES, b'{"offset":0,"nbytes":5}' + b" " * (1 << 20)),
        (FetchKind.HELD, bytes(1 << 20)),
        (FetchKind.LAYOUT, b"0" * (1 << 20)),
        (FetchKind.PLACE, bytes(1 << 20)),
    ],
)
def test_nonsense_drops_the_rank(ring: Ring, flags: int, body: bytes) -> None:
    fetches = LiveFetch(ring).fetches
    with pytest.raises(ProtocolError, match="FETCH"):
        fetches.handle(0, Frame(Kind.FETCH, 9, 3, 0, flags, 1, body))
    assert not fetches.busy
