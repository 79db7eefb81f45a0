"""1,100 ranks send into one chunk, more than a record of the journal can list: through layout, session, journal, and
the checks of the processes that replace dead ones.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from flusher.flight import Flight, describe_chunk_mismatch
from flusher.steps import ChunkFull
from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import verify_chunk
from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.regions import Region
from holdfast.ring.journal import SOURCES_INSIDE_MAX, SlotState
from holdfast.ring.remains import decode_held, encode_held, held_checkpoints
from holdfast.ring.ring import Ring
from stager.previous_jobs import PreviousJobs
from stager.session.session_messages import Action, Done, FillSlot, MarkFull, MarkStaged, Received, Sent
from tests.support.images import Image
from tests.support.split_images import SplitImage, split
from tests.unit.stager.session.sessions import Stager

RANKS = 1100
CHUNK_BYTES = 8192
WIDTH = 3
KEY = CheckpointId(1, 5)
"""Each rank holds one row or column of each of two tensors: three bytes, in one chunk with those of all other ranks."""


def _image() -> SplitImage:
    nbytes = RANKS * WIDTH
    rows, columns = 100, CHUNK_BYTES + 100
    entries = (
        Entry("archive/data/0", rows, nbytes, REPLICATED, ()),
        Entry("archive/data/1", columns, nbytes, REPLICATED, ()),
    )
    data = random.Random(1).randbytes(2 * CHUNK_BYTES)
    made = Image(Layout(len(data), CHUNK_BYTES, RANKS, entries), data, data)
    return split(
        made,
        {
            0: ((RANKS, WIDTH), [Region((rank, 0), (1, WIDTH)) for rank in range(RANKS)]),
            1: ((WIDTH, RANKS), [Region((0, rank), (WIDTH, 1)) for rank in range(RANKS)]),
        },
    )


def _is_mine(action: Action) -> bool:
    return isinstance(action, FillSlot | MarkFull | MarkStaged)


class Staging:
    """A session whose actions change a real ring, as `stager.actions` does, and ranks that send their parts."""

    def __init__(self, image: SplitImage, ring: Ring) -> None:
        self.image, self.ring = image, ring
        self.stager = Stager(image.layout, slots=ring.ring_chunks)
        self.digest = ring.put_layout(image.layout)
        self._carried_out = 0
        ring.write_checkpoint(*KEY, "receiving", self.digest, {})
        self.stager.offer_all(KEY.step)
        self._carry_out()

    def send(self, chunk: int) -> None:
        """All ranks send their frames of one chunk."""
        layout, base = self.image.layout, chunk * CHUNK_BYTES
        for rank, crc in self.image.sources(chunk):
            slot = self.stager.credits.pop((rank, KEY.step, chunk))
            frame, at = self.image.frame(chunk, rank), 0
            for extent in layout.pieces(chunk, rank):
                place = extent.offset - base
                self.ring.slot_memory(slot)[place : place + extent.nbytes] = frame[at : at + extent.nbytes]
                at += extent.nbytes
            self.stager.take(Sent(rank, KEY.step, chunk, len(frame), crc))
            self.stager.take(Received(rank, KEY.step, chunk))
        self._carry_out()

    def done(self) -> None:
        for rank in range(RANKS):
            self.stager.take(Done(rank, KEY.step))
        self._carry_out()

    def _carry_out(self) -> None:
        actions = [action for action in self.stager.done if _is_mine(action)]
        for action in actions[self._carried_out :]:
            match action:
                case FillSlot(slot, step, chunk):
                    self.ring.mark_filling(slot, KEY.attempt, step, chunk)
                case MarkFull(slot, _, _, sources, nbytes):
                    self.ring.mark_full(slot, sources, nbytes)
                case MarkStaged():
                    self.ring.write_checkpoint(*KEY, "staged", self.digest, {})
        self._carried_out = len(actions)


@pytest.fixture(scope="module", name="image")
def _made() -> SplitImage:
    return _image()


@pytest.fixture(scope="module", name="staged")
def _staged(image: SplitImage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring that a stager has filled and left."""
    directory = tmp_path_factory.mktemp("senders") / "run"
    with Ring.create(directory, chunk_bytes=CHUNK_BYTES, ring_chunks=4, attempt=KEY.attempt) as ring:
        staging = Staging(image, ring)
        staging.send(0)
        assert [ring.state(slot) for slot in range(2)] == [SlotState.FULL, SlotState.FILLING]
        staging.send(1)
        assert not staging.stager.of(MarkStaged)
        staging.done()
        assert len(staging.stager.of(MarkStaged)) == 1
    return directory


def test_more_ranks_than_a_record_has_room_for_send_into_each_chunk(image: SplitImage) -> None:
    layout = Layout.from_bytes(image.layout.to_bytes())
    assert [len(layout.senders(chunk)) for chunk in range(2)] == [RANKS, RANKS]
    assert RANKS > SOURCES_INSIDE_MAX
    assert layout.frames == (2,) * RANKS


def test_the_flusher_after_a_dead_one_finds_every_sender(image: SplitImage, staged: Path) -> None:
    index = LayoutIndex(image.layout)
    with Ring.attach(staged) as ring:
        assert ring.checkpoint(*KEY) is not None
        for chunk, record in enumerate(ring.records()[:2]):
            assert record.chunk == chunk
            assert list(record.sources) == image.sources(chunk)
            full = ChunkFull(KEY, record.slot, chunk, record.nbytes, record.sources)
            flight = Flight(KEY, index)
            assert not describe_chunk_mismatch(flight, full)
            less = describe_chunk_mismatch(flight, replace(full, sources=record.sources[:-1]))
            assert less == "sent by 1099 ranks, expected 1100; too many: [], missing: [1099]"
            assert bytes(ring.slot_memory(record.slot)[: record.nbytes]) == image.chunk_bytes(chunk)
            verify_chunk(ring.slot_memory(record.slot), index, chunk, record.sources, key=KEY)


@pytest.mark.parametrize("rank", [3, RANKS - 2])
def test_a_byte_that_changes_is_its_senders(image: SplitImage, staged: Path, rank: int) -> None:
    index = LayoutIndex(image.layout)
    with Ring.attach(staged) as ring:
        for chunk, record in enumerate(ring.records()[:2]):
            memory = bytearray(ring.slot_memory(record.slot))
            memory[image.layout.pieces(chunk, rank)[-1].offset - chunk * CHUNK_BYTES] ^= 1
            with pytest.raises(DamageError, match=f"chunk {chunk} from rank {rank}:"):
                verify_chunk(memoryview(memory), index, chunk, record.sources, key=KEY)


def test_the_stager_after_a_dead_one_finds_it_whole_in_the_ring(image: SplitImage, staged: Path) -> None:
    with Ring.attach(staged) as ring:
        (held,) = decode_held(encode_held(held_checkpoints(ring)))
        assert held.chunks_fitting(image.layout) == {0, 1}
        assert PreviousJobs(10, clock=lambda: 0.0).may_restore(ring, KEY.attempt + 1), "nothing to wait for"
