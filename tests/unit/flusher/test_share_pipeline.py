"""Several flush pipelines that write one file, without threads or files: any split, any order, small rings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flusher.pipeline import Pipeline
from flusher.steps import (
    Aborted,
    Action,
    AllSealed,
    Assemble,
    AwaitPublished,
    Begin,
    ChunkFull,
    CrcsPut,
    CrcsRead,
    Discard,
    Event,
    FreeSlots,
    Job,
    JobFailed,
    Open,
    Opened,
    PartWritten,
    Patch,
    Patched,
    Publish,
    Published,
    PutCrcs,
    ReadCrcs,
    ReadSeal,
    Resume,
    Sealed,
    SealRead,
    SealShare,
    Staged,
    Verified,
    Verify,
    WritePart,
)
from holdfast.checkpoints.publish import FinishedImage
from holdfast.checkpoints.share_records import ShareSeal
from holdfast.errors import ConfigError, HoldfastError, PeerLost, ProtocolError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source, patch_chunk, verify_chunk
from holdfast.image.index import LayoutIndex
from holdfast.image.share_sums import ShareSums, combine_sums
from holdfast.image.shares import ImageShare, Shares
from tests.support.images import Image, made_up

CHUNK_BYTES = 4096
KEY = CheckpointId(1, 5)


class Store:
    """The store that the flushers share."""

    def __init__(self, image: Image, shares: Shares) -> None:
        self.image, self.index, self.shares = image, LayoutIndex(image.layout), shares
        self.parts: dict[int, bytes] = {}
        self.crcs: dict[int, tuple[int, ...]] = {}
        self.seals: dict[int, ShareSeal] = {}
        self.published: Publish | None = None

    def file(self) -> bytes:
        return b"".join(self.parts[part] for part in sorted(self.parts))


class Flusher:
    """One pipeline, its ring, and workers that answer in random order."""

    def __init__(
        self,
        store: Store,
        index: int,
        *,
        ring_chunks: int,
        chance: random.Random,
        resume: Resume | None = None,
    ) -> None:
        self.store, self.share, self.chance = store, ImageShare(store.shares, index), chance
        self.pipeline = Pipeline(ring_chunks)
        self.slots: list[bytearray | None] = [None] * ring_chunks
        self.jobs: list[Job] = []
        self.written: dict[int, tuple[tuple[int, ...], ...]] = dict(resume.parts) if resume else {}
        self.discarded: HoldfastError | None = None
        self.ended = False
        recorded = {chunk for part in self.written for chunk in self._chunks(part)}
        self.to_send = [chunk for chunk in self.share.chunks if chunk not in recorded]
        self.tell(Begin(KEY, store.index, resume, self.share))

    def _chunks(self, part: int) -> range:
        first = part * self.store.shares.part_chunks
        return range(first, min(first + self.store.shares.part_chunks, self.store.shares.chunks))

    def tell(self, event: Event) -> None:
        for action in self.pipeline.handle(event):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case FreeSlots(slots):
                for slot in slots:
                    assert self.slots[slot] is not None, "freed twice"
                    self.slots[slot] = None
            case Discard(_, error):
                self.discarded, self.ended = error, True
            case _:
                self.jobs.append(action)

    def send_one(self) -> bool:
        free = [slot for slot, memory in enumerate(self.slots) if memory is None]
        if not self.to_send or not free or self.ended:
            return False
        anywhere = len(free) > self.pipeline.chunks_together(KEY) > 0
        chunk = self.to_send.pop(self.chance.randrange(len(self.to_send)) if anywhere else 0)
        slot, image = self.chance.choice(free), self.store.image
        data = image.chunk_bytes(chunk)
        self.slots[slot] = memory = bytearray(CHUNK_BYTES)
        memory[: len(data)] = data
        sources = tuple(Source(*pair) for pair in image.sources(chunk))
        self.tell(ChunkFull(KEY, slot, chunk, len(data), sources))
        if not self.to_send:
            self.tell(Staged(KEY))
        return True

    def work_one(self) -> bool:
        """One job that need not wait for another flusher, any, is done."""
        ready = [job for job in self.jobs if not self._waits(job)]
        if not ready:
            return False
        job = self.chance.choice(ready)
        self.jobs.remove(job)
        self.tell(self._answer(job))
        return True

    def _waits(self, job: Job) -> bool:
        store = self.store
        match job:
            case ReadCrcs():
                return job.share_index not in store.crcs
            case ReadSeal():
                return job.share_index not in store.seals
            case AwaitPublished():
                return store.published is None
        return False

    def _memory(self, slot: int) -> memoryview:
        memory = self.slots[slot]
        assert memory is not None, "a job reads a slot that is free"
        return memoryview(memory)

    def _answer(self, job: Job) -> Event:
        store = self.store
        match job:
            case Open():
                return Opened(KEY, store.shares.part_chunks)
            case Verify():
                memory = self._memory(job.slots[0])
                return Verified(
                    KEY, job.chunk, verify_chunk(memory, job.index, job.chunk, job.sources, key=KEY)
                )
            case Patch():
                crcs = job.entry_crcs, job.verified_crcs
                memory = self._memory(job.slots[0])
                return Patched(KEY, job.chunk, patch_chunk(memory, job.index, job.chunk, *crcs, key=KEY))
            case WritePart():
                assert job.part in self.share.parts, "a part of another share"
                store.parts[job.part] = b"".join(self._memory(slot)[:nbytes] for slot, nbytes in job.pieces)
                self.written[job.part] = job.segment_crcs
                return PartWritten(KEY, job.part)
            case PutCrcs():
                store.crcs[self.share.index] = job.entry_crcs
                return CrcsPut(KEY)
            case ReadCrcs():
                return CrcsRead(KEY, job.share_index, store.crcs[job.share_index])
            case SealShare():
                assert self.written.keys() == set(self.share.parts)
                store.seals[self.share.index] = sealed(job)
                return Sealed(KEY, job.share, store.seals[self.share.index])
            case ReadSeal():
                return SealRead(KEY, job.share_index, store.seals[job.share_index])
            case Assemble():
                assert [seal.index for seal in job.seals] == list(range(store.shares.count))
                sums = [ShareSums(seal.chunk_crcs, seal.entry_crcs) for seal in job.seals]
                return AllSealed(
                    FinishedImage(KEY, store.index, *combine_sums(store.image.layout, store.shares, sums))
                )
            case Publish():
                store.published, self.ended = job, True
                return Published(KEY)
            case AwaitPublished():
                self.ended = True
                return Published(KEY)
        raise AssertionError(job)


def sealed(job: SealShare) -> ShareSeal:
    return ShareSeal(
        attempt=KEY.attempt,
        step=KEY.step,
        host="kelp",
        write_id="w000001-a",
        index=job.share.index,
        count=max(2, job.share.shares.count),
        entry_crcs=job.sums.entry_crcs,
        layout_digest="0" * 64,
        first_chunk=job.share.chunks.start,
        chunk_crcs=job.sums.chunk_crcs,
        staged_at_unix=1.5,
    )


def run(flushers: list[Flusher], chance: random.Random) -> None:
    """Until nothing more can happen."""
    idle: set[int] = set()
    while len(idle) < len(flushers):
        number = chance.randrange(len(flushers))
        steps = [flushers[number].work_one, flushers[number].send_one]
        chance.shuffle(steps)
        if any(step() for step in steps):
            idle.clear()
        else:
            idle.add(number)


def made(
    seed: int, writers: int, part_chunks: int, ring_chunks: int
) -> tuple[Store, list[Flusher], random.Random]:
    chance = random.Random(seed)
    image = made_up(
        seed,
        entries=chance.randrange(1, 40),
        chunk_bytes=CHUNK_BYTES,
        ranks=2,
        entry_bytes_max=chance.choice([100, 9_000, 40_000]),
    )
    store = Store(image, Shares.of(image.layout, writers, part_chunks))
    flushers = [
        Flusher(store, index, ring_chunks=ring_chunks, chance=chance) for index in range(store.shares.count)
    ]
    return store, flushers, chance


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 3), st.integers(3, 12))
def test_any_split_in_any_order_makes_the_file(
    seed: int, writers: int, part_chunks: int, ring_chunks: int
) -> None:
    store, flushers, chance = made(seed, writers, part_chunks, ring_chunks)
    run(flushers, chance)
    assert store.published is not None, [job for flusher in flushers for job in flusher.jobs]
    assert store.file() == store.image.final
    image = store.published.image
    assert len(image.entry_crc32s) == len(store.image.layout.entries)
    for flusher in flushers:
        assert flusher.pipeline.idle
        assert flusher.slots == [None] * ring_chunks


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(0, 400))
def test_a_flusher_that_died_goes_on_from_what_it_had_written(seed: int, steps: int) -> None:
    store, flushers, chance = made(seed, 3, 1, 8)
    for _ in range(steps):
        one = chance.choice(flushers)
        one.work_one() or one.send_one()
    dead = chance.randrange(len(flushers))
    if any(flusher.ended for flusher in flushers) or store.shares.count == 1:
        return
    record = Resume(1, flushers[dead].written)
    flushers[dead] = Flusher(store, dead, ring_chunks=8, chance=chance, resume=record)
    if not flushers[dead].to_send:
        flushers[dead].tell(Staged(KEY))
    run(flushers, chance)
    assert store.published is not None
    assert store.file() == store.image.final


def split(writers: int = 3) -> tuple[Store, list[Flusher], random.Random]:
    store, flushers, chance = made(3, writers, 1, 8)
    assert store.shares.count == writers
    return store, flushers, chance


def test_a_share_that_is_not_sealed_can_be_given_up() -> None:
    store, flushers, chance = split()
    flushers[1].tell(Aborted(KEY, PeerLost("a rank is gone")))
    run(flushers, chance)
    assert isinstance(flushers[1].discarded, PeerLost)
    assert store.published is None
    assert set(store.seals) <= {0, 2}


def test_a_share_that_is_sealed_is_given_up_by_the_lead_alone() -> None:
    store, flushers, chance = split()
    run(flushers[:2], chance)
    assert set(store.seals) == {0, 1}
    for flusher in flushers[:2]:
        flusher.tell(Aborted(KEY, PeerLost("a rank is gone")))
    assert flushers[1].discarded is None
    awaited = flushers[0].jobs.pop()
    assert isinstance(awaited, ReadSeal)
    flushers[0].tell(JobFailed(KEY, (), PeerLost("given up")))
    assert isinstance(flushers[0].discarded, PeerLost)


def test_all_seals_are_asked_for_together() -> None:
    store, flushers, _ = split(5)
    lead = flushers[0]
    while lead.work_one() or lead.send_one():
        pass
    assert [job.share_index for job in lead.jobs if isinstance(job, ReadSeal)] == [1, 2, 3, 4]
    assert len(lead.jobs) == 4
    assert set(store.seals) == {0}


def test_once_the_nearest_share_is_there_the_crcs_of_all_others_are_asked_for_together() -> None:
    store, flushers, chance = split(5)
    last = flushers[4]
    while last.work_one() or last.send_one():
        pass
    assert [job.share_index for job in last.jobs if isinstance(job, ReadCrcs)] == [3]
    run(flushers[3:4], chance)
    while 3 not in store.crcs:
        run(flushers[:4], chance)
    last.work_one()
    assert [job.share_index for job in last.jobs if isinstance(job, ReadCrcs)] == [0, 1, 2]


def test_a_share_does_not_start_over_by_itself_when_the_upload_is_lost() -> None:
    _, flushers, _ = split()
    opened = flushers[1].jobs.pop()
    assert isinstance(opened, Open)
    flushers[1].tell(JobFailed(KEY, (), StoreError("swept", begin_anew=True)))
    assert isinstance(flushers[1].discarded, StoreError)


def test_a_chunk_of_another_share_costs_the_checkpoint() -> None:
    store, flushers, _ = split()
    flushers[1].to_send.insert(0, store.shares.chunks_of(2)[0])
    flushers[1].send_one()
    while flushers[1].work_one():
        pass
    assert isinstance(flushers[1].discarded, ProtocolError)
    assert "this flusher writes chunks" in str(flushers[1].discarded)


@pytest.mark.parametrize("answer", [Opened(KEY, 2), Opened(KEY, 1, resumable=False)])
def test_a_store_with_other_parts_than_computed_is_refused(answer: Opened) -> None:
    _, flushers, _ = split()
    flushers[1].jobs.clear()
    flushers[1].tell(answer)
    assert isinstance(flushers[1].discarded, ConfigError)


def test_slots_are_kept_for_the_parts_that_wait_for_others() -> None:
    store, flushers, _ = split(2)
    first, second = flushers
    for flusher in flushers:
        flusher.work_one()
    assert first.pipeline.chunks_together(KEY) == 1
    needs = store.index.needs
    border = store.shares.chunks_of(1).start
    late = [
        chunk
        for chunk in store.shares.chunks_of(1)
        if any(
            store.index.places[entry] and store.index.places[entry][0][0] < border for entry in needs[chunk]
        )
    ]
    assert late
    assert second.pipeline.chunks_together(KEY) == min(1 + len(late), len(store.shares.chunks_of(1)), 8)


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 3), st.integers(3, 12), st.integers(0, 100))
def test_a_share_that_the_next_stager_sends_again_makes_the_same_file(
    seed: int, writers: int, part_chunks: int, ring_chunks: int, steps: int
) -> None:
    store, flushers, chance = made(seed, writers, part_chunks, ring_chunks)
    if store.shares.count == 1:
        return
    for _ in range(steps):
        one = chance.choice(flushers)
        one.work_one() or one.send_one()
    again = chance.choice(flushers)
    if again.to_send:
        again.to_send = list(again.share.chunks)
    run(flushers, chance)
    assert store.published is not None, [job for flusher in flushers for job in flusher.jobs]
    assert store.file() == store.image.final
    for flusher in flushers:
        assert flusher.pipeline.idle
        assert flusher.slots == [None] * ring_chunks
