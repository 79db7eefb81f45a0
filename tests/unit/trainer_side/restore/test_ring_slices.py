"""Restore from the stager's ring: staged checkpoints, nearer than the store; no damaged or foreign bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import PeerLost
from holdfast.ring.near_ring import NearRing, open_near_ring
from holdfast.ring.remains import FetchKind
from holdfast.ring.ring import Ring
from tests.support.restoring import CountingStore
from tests.support.ring_checkpoint import LiveFetch, put_in_ring
from tests.support.slices import Checkpoint, DictTier
from tests.unit.trainer_side.tiered import assert_step, bring_back, saved
from trainer_side.restore.restore_attempt import Restored
from trainer_side.restore.ring_slices import RingSlices
from trainer_side.tiers.tier import Tier

RING, CHUNKS = RingSlices.name, 64


@pytest.fixture(params=["far", "near"])
def ring(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ring]:
    """Near: the ranks are on the stager's machine, and read the shared memory themselves."""
    with Ring.create(tmp_path / "ring", chunk_bytes=4096, ring_chunks=CHUNKS, attempt=1) as made:
        if request.param == "near":
            made.hold(LiveFetch.attempt)
        yield made


def _times(ring: Ring, results: Sequence[Restored]) -> int:
    """How often each byte of the ring is read: by every rank, or by one that passes it on."""
    return len(results) if ring.token else 1


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "run")


def _published(store: CountingStore, *steps: int) -> list[Checkpoint]:
    made = [saved(step) for step in steps]
    for one in made:
        one.publish(Path(store.url))
    return made


def _bring_back(
    store: CountingStore | None, fetch: LiveFetch, step: int, tiers: list[list[Tier]] | None = None
) -> list[Restored]:
    return assert_step(*bring_back(store, tiers or [[], []], fetch=fetch), step)


@pytest.mark.parametrize("state", ["staged", "durable"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_in_the_ring_costs_no_byte_of_the_store(
    ring: Ring, store: CountingStore, ranks: int, state: str
) -> None:
    _published(store, *((3, 5) if state == "durable" else (3,)))
    put_in_ring(ring, saved(5), range(CHUNKS), state="staged" if state == "staged" else "durable")
    results = _bring_back(store, LiveFetch(ring), 5, [[] for _ in range(ranks)])
    assert RING not in results[0].whole_in, "it keeps nothing for long"
    assert store.requests == []
    assert all((one.manifest is not None) == (state == "durable") for one in results)
    assert all(set(one.sources) <= {RING} and not one.mended for one in results)
    image_bytes = saved(5).layout.image_bytes
    assert sum(one.bytes_read for one in results) == image_bytes * _times(ring, results)


def test_a_step_that_was_never_staged_is_not_restored(ring: Ring, store: CountingStore) -> None:
    _published(store, 3)
    put_in_ring(
        ring, saved(5), range(CHUNKS), state="durable"
    )  # free, and the store does not have it: given up
    assert [one.sources.keys() for one in _bring_back(store, LiveFetch(ring), 3)] == [{store.url}] * 2


def test_a_staged_one_that_is_not_whole_is_not_taken(ring: Ring, store: CountingStore) -> None:
    _published(store, 3)
    put_in_ring(ring, saved(5), range(saved(5).layout.chunks - 1), state="staged")
    _bring_back(store, LiveFetch(ring), 3)


def test_chunks_missing_in_the_ring_come_from_the_store_without_a_damage_message(
    ring: Ring, store: CountingStore
) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(4), state="durable")
    results = _bring_back(store, LiveFetch(ring), 5)
    assert sum(one.sources[RING].nbytes for one in results) == 4 * 4096 * _times(ring, results)
    assert store.bytes_read >= made.layout.image_bytes - 4 * 4096
    assert not any(one.mended for one in results)


def test_own_tiers_are_nearer_and_each_fills_the_others_gaps(ring: Ring, store: CountingStore) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(CHUNKS), state="durable")
    tier = DictTier().put(made, 0)
    results = _bring_back(store, LiveFetch(ring), 5, [[tier], []])
    assert results[0].sources[tier.name].nbytes == made.layout.slice_bytes(0)
    from_ring = sum(one.sources[RING].nbytes for one in results if RING in one.sources)
    assert from_ring == made.layout.slice_bytes(1) * _times(ring, results)
    assert store.requests == []


def test_a_bit_that_flipped_is_named_and_made_good_from_the_store(ring: Ring, store: CountingStore) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(CHUNKS), state="durable")
    ring.slot_memory(2)[99] ^= 4
    results = _bring_back(store, LiveFetch(ring), 5)
    assert RING in results[0].mended[0]
    assert sum(one.sources[store.url].nbytes for one in results if store.url in one.sources) == 4096


def test_a_bit_that_flipped_in_what_is_only_staged_leads_to_the_one_before(
    ring: Ring, store: CountingStore
) -> None:
    _published(store, 3)
    put_in_ring(ring, saved(5), range(CHUNKS), state="staged")
    ring.slot_memory(2)[99] ^= 4
    results = _bring_back(store, LiveFetch(ring), 3)
    assert "step 5" in results[0].skipped[0]


@pytest.mark.parametrize("answers", [0, 1, 2, 3, 6])
def test_a_stager_that_says_nothing_is_no_reason_to_fail(
    ring: Ring, store: CountingStore, answers: int
) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(CHUNKS), state="durable")
    fetch = LiveFetch(ring)
    fetch.error, fetch.errors_from = PeerLost("no answer within 30 s"), answers
    _bring_back(store, fetch, 5)
    # Who has been told what is in the ring, and where it lies, needs the stager no more.
    assert (store.bytes_read == 0) == bool(ring.token and answers >= 3)


def test_a_chunk_whose_slot_is_filled_meanwhile_comes_from_the_store(
    ring: Ring, store: CountingStore
) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(CHUNKS), state="durable")
    fetch = LiveFetch(ring)

    def filled_after_the_look(asked: FetchKind, **question: object) -> bytes | None:
        if asked is FetchKind.LAYOUT:
            ring.mark_filling(3, 2, 6, 3)
            ring.slot_memory(3)[:] = bytes(4096)
        return fetch(asked, **question)  # type: ignore[arg-type]

    results = assert_step(*bring_back(store, [[], []], fetch=filled_after_the_look), 5)
    assert "no longer in the ring" in results[0].mended[0]


def test_a_slot_that_is_filled_under_the_second_reader_is_made_good_for_both(
    store: CountingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = _published(store, 5)
    shared = Ring.create(tmp_path / "ring", chunk_bytes=4096, ring_chunks=CHUNKS, attempt=1)
    read, readers = NearRing.read, list[NearRing]()
    one_at_a_time = threading.Lock()  # or both may read before the slot is filled, or after it

    def filled_between(near: NearRing, attempt: int, step: int, chunk: int, wanted: Any) -> bool:
        if chunk != 3:
            return read(near, attempt, step, chunk, wanted)
        with one_at_a_time:
            readers.append(near)
            if len({*map(id, readers)}) == 2 and shared.remains_in(3) is not None:
                shared.mark_filling(3, 2, 6, 3)
                shared.slot_memory(3)[:] = bytes(4096)
            return read(near, attempt, step, chunk, wanted)

    monkeypatch.setattr(NearRing, "read", filled_between)
    with shared:
        shared.hold(LiveFetch.attempt)
        put_in_ring(shared, made, range(CHUNKS), state="durable")
        results = _bring_back(store, LiveFetch(shared), 5)
    assert ["no longer in the ring" in reason for reason in results[0].mended] == [True]
    assert sum(one.sources[store.url].nbytes for one in results if store.url in one.sources) == 4096


def test_a_rank_that_cannot_see_the_ring_gets_its_bytes_from_the_others(
    store: CountingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = _published(store, 5)
    seen: list[bytes] = []

    def first_alone(said: bytes) -> NearRing | None:
        seen.append(said)
        return open_near_ring(said) if len(seen) == 1 else None

    monkeypatch.setattr("trainer_side.restore.ring_slices.open_near_ring", first_alone)
    with Ring.create(tmp_path / "ring", chunk_bytes=4096, ring_chunks=CHUNKS, attempt=1) as ring:
        ring.hold(LiveFetch.attempt)
        put_in_ring(ring, made, range(CHUNKS), state="durable")
        fetch = LiveFetch(ring)
        results = _bring_back(store, fetch, 5)
    assert len(seen) == 2
    assert sum(one.sources[RING].nbytes for one in results) == made.layout.image_bytes
    assert FetchKind.BYTES in fetch.asked
    assert store.requests == []


def test_a_checkpoint_in_the_ring_names_the_runs_of_its_trackers_on_every_rank(
    ring: Ring, store: CountingStore
) -> None:
    made = saved(5)
    put_in_ring(ring, made, range(CHUNKS), state="staged")
    record = {"ranks": {"0": {"trackers": {"wandb": "run-7"}}, "1": {"trackers": {"wandb": "no"}}}}
    ring.write_checkpoint(made.attempt, 5, "staged", made.layout.digest, record)
    assert [one.trackers for one in _bring_back(store, LiveFetch(ring), 5)] == [{"wandb": "run-7"}] * 2
