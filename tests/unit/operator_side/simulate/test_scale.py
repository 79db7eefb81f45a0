"""Figures of a checkpoint at any size agree with layout and session; rings and machines have reasons."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.message_load import MessageLoad
from holdfast.errors import ConfigError, ProtocolError
from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import SOURCES_MAX, Layout
from holdfast.ring.journal import HEADER_BYTES, RECORD_BYTES
from holdfast.store.s3_upload import part_bytes_for
from holdfast.wire.frames import Kind
from operator_side.simulate.scale import (
    STAGERS,
    Machine,
    Shape,
    best_ring,
    find_machine,
    smallest_machine,
    staged_seconds,
    stagers_needed,
)
from stager.session.session_messages import (
    Done,
    Durable,
    FillSlot,
    GrantCredit,
    MarkFull,
    MarkStaged,
    SendMessage,
)
from tests.unit.stager.session.sessions import Stager

_CHUNK = 4096
_GIB = 1 << 30
_SLOW = Machine("slow", 8, 4 * _GIB)  # 1 GB/s


def _layout(image_bytes: int, ranks: int) -> Layout:
    return Layout(image_bytes, _CHUNK, ranks, (Entry("a", 64, image_bytes - 200, REPLICATED, ()),))


@pytest.mark.parametrize(("chunks", "ranks"), [*itertools.product((1, 7, 64, 201), (1, 2, 3, 16, 100))])
def test_frames_are_those_of_a_real_layout(chunks: int, ranks: int) -> None:
    layout = _layout(chunks * _CHUNK - 100, ranks)
    frames = sum(len(layout.senders(chunk)) for chunk in range(layout.chunks))
    load = MessageLoad.of(Shape(ranks, layout.image_bytes, _CHUNK))
    assert load.chunks == layout.chunks
    assert frames <= load.frames_max, "no more than is said"
    assert load.frames_max - frames < ranks, "and not many fewer: those whose slice ends with a chunk"


def test_messages_and_journal_are_those_of_a_real_session() -> None:
    """One checkpoint of four ranks through the stager's state machine: what is said to it, and by it."""
    layout = _layout(21 * _CHUNK - 100, 4)
    stager = Stager(layout, slots=64)
    stager.offer_all(1)
    stager.pay_all(1)
    for rank in range(layout.ranks):
        stager.take(Done(rank, 1))
    stager.take(Durable(1))
    frames = sum(len(layout.senders(chunk)) for chunk in range(layout.chunks))
    to_stager = layout.ranks + frames + layout.ranks  # OFFER, SENT, DONE
    assert len(stager.of(GrantCredit)) == frames
    assert [(tell.rank, tell.kind) for tell in stager.of(SendMessage)] == [(None, Kind.DURABLE)], "to all"
    assert len(stager.of(MarkStaged)) == 1, "which says STAGED to all"
    said = to_stager + frames + 2 * layout.ranks
    load = MessageLoad.of(Shape(layout.ranks, layout.image_bytes, _CHUNK))
    assert load.control_messages_max - said == 2 * (load.frames_max - frames)
    freed = layout.chunks  # by the flusher
    assert len(stager.of(FillSlot)) + len(stager.of(MarkFull)) + freed == load.journal_writes


def test_parts_are_at_least_what_s3_asks_for() -> None:
    for image_bytes in (1, 10**9, 10**12, 4 * 10**12):
        assert MessageLoad.of(Shape(1024, image_bytes)).part_bytes_min <= part_bytes_for(
            image_bytes, 16 << 20
        )
    assert MessageLoad.of(Shape(1024, 10**12)).part_bytes_min == part_bytes_for(10**12, 16 << 20)


def test_more_ranks_than_a_chunk_takes_senders_can_meet_in_one_chunk() -> None:
    """The limit that docs/scaling.md states: small values of each rank lie side by side."""
    ranks = SOURCES_MAX + 8
    entries = tuple(Entry(f"value-{rank}", 64 + 1024 * rank, 1024, rank, ()) for rank in range(ranks))
    whole = 128 + 1024 * ranks
    with pytest.raises(
        ProtocolError, match=r"163\d\d ranks send into chunk 0 .* 16384 may.* such as 8388608"
    ):
        Layout(whole, 32 << 20, ranks, entries)
    assert len(Layout(whole, 8 << 20, ranks, entries).senders(0)) <= SOURCES_MAX


def test_a_ring_is_twice_the_image_then_once_then_what_there_is_room_for() -> None:
    shape = Shape(8, 10 * _GIB)
    rates = {"in_rate": 4e9, "out_rate": 1e9}
    twice, once, less = (best_ring(shape, memory_bytes=memory * _GIB, **rates) for memory in (32, 16, 6))
    assert [ring.images for ring in (twice, once, less)] == [2, 1, 0]
    assert (twice.ring_bytes, once.ring_bytes) == (20 * _GIB, 10 * _GIB)
    assert twice.staged_seconds == once.staged_seconds == 10 * _GIB / 4e9
    assert less.staged_seconds == (10 * _GIB - less.ring_bytes) / 1e9 > once.staged_seconds
    for ring, memory in ((twice, 32), (once, 16), (less, 6)):
        assert ring.ring_bytes % shape.chunk_bytes == 0
        assert ring.journal_bytes == HEADER_BYTES + RECORD_BYTES * (ring.ring_bytes // shape.chunk_bytes)
        assert ring.ring_bytes + ring.journal_bytes + _GIB <= memory * _GIB


def test_a_ring_holds_a_part_and_eight_chunks_or_says_what_is_missing() -> None:
    assert best_ring(Shape(1, 1), in_rate=1, out_rate=1, memory_bytes=2 * _GIB).ring_bytes == 8 * (16 << 20)
    with pytest.raises(ConfigError, match=r"at least \d+ bytes; take a larger machine"):
        best_ring(Shape(1, 1), in_rate=1, out_rate=1, memory_bytes=_GIB)
    with pytest.raises(ConfigError, match="into the store: expected more than 0"):
        best_ring(Shape(1, 1), in_rate=1, out_rate=0, memory_bytes=_GIB)


def test_bytes_without_room_in_the_ring_wait_for_the_store() -> None:
    assert staged_seconds(100, 100, 10, 1) == 10
    assert staged_seconds(100, 0, 10, 1) == 100
    assert staged_seconds(100, 60, 10, 1) == 40
    assert staged_seconds(100, 0, 1, 10) == 100, "a store that is faster never stands in the way"


def test_stagers_by_network_and_store() -> None:
    assert stagers_needed(10**9, 1, _SLOW) == 1
    assert stagers_needed(10**9 + 1, 1, _SLOW) == 2
    assert stagers_needed(10**9, 1, _SLOW, store_rate=0.25e9) == 4
    with pytest.raises(ConfigError, match="interval: expected more than 0"):
        stagers_needed(1, 0, _SLOW)


def test_the_smallest_machine_that_is_fast_and_roomy_enough() -> None:
    assert smallest_machine(10**9, 1) is STAGERS[0]
    assert smallest_machine(50 * 10**9, 600) is STAGERS[1], "the first has no room for the image"
    assert smallest_machine(10**12, 600) is STAGERS[0], "none has, so the image streams"
    assert smallest_machine(10**12, 10) is None
    assert smallest_machine(10**12, 600, store_rate=1e6) is None
    assert find_machine("c7gn.8xlarge") is STAGERS[1]
    with pytest.raises(ConfigError, match=r"c7gn\.4xlarge, .*give its memory"):
        find_machine("t3.micro")


@pytest.mark.parametrize("field", ["ranks", "image_bytes", "chunk_bytes"])
def test_a_shape_of_nothing_is_refused(field: str) -> None:
    sizes = {"ranks": 1, "image_bytes": 1, "chunk_bytes": 1}
    with pytest.raises(ConfigError, match=f"{field}: expected at least 1, got 0"):
        Shape(**{**sizes, field: 0})
