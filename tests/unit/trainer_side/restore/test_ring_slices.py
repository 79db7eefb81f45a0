"""Restore from the stager's ring: what was staged, nearer than the store, and nothing that is damaged or another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import PeerLost
from holdfast.ring.remains import Asked
from holdfast.ring.ring import Ring
from tests.support.restoring import CountingStore
from tests.support.ring_checkpoint import LiveFetch, put_in_ring
from tests.support.slices import Checkpoint, DictTier
from tests.unit.trainer_side.tiered import assert_step, bring_back, saved
from trainer_side.restore.candidate import Restored
from trainer_side.restore.ring_slices import RingSlices
from trainer_side.tiers.tier import Tier

RING, CHUNKS = RingSlices.name, 64


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    with Ring.create(tmp_path / "ring", chunk_bytes=4096, ring_chunks=CHUNKS, attempt=1) as made:
        yield made


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
def test_what_the_ring_has_costs_no_byte_of_the_store(
    ring: Ring, store: CountingStore, ranks: int, state: str
) -> None:
    _published(store, *((3, 5) if state == "durable" else (3,)))
    put_in_ring(ring, saved(5), range(CHUNKS), state="staged" if state == "staged" else "durable")
    results = _bring_back(store, LiveFetch(ring), 5, [[] for _ in range(ranks)])
    assert RING not in results[0].whole_in, "it keeps nothing for long"
    assert store.requests == []
    assert all((one.manifest is not None) == (state == "durable") for one in results)
    assert all(set(one.sources) <= {RING} and not one.mended for one in results)
    assert sum(one.bytes_read for one in results) == saved(5).layout.image_bytes


def test_what_was_never_staged_is_nobodys(ring: Ring, store: CountingStore) -> None:
    _published(store, 3)
    put_in_ring(
        ring, saved(5), range(CHUNKS), state="durable"
    )  # free, and the store does not have it: given up
    assert [one.sources.keys() for one in _bring_back(store, LiveFetch(ring), 3)] == [{store.url}] * 2


def test_a_staged_one_that_is_not_whole_is_not_taken(ring: Ring, store: CountingStore) -> None:
    _published(store, 3)
    put_in_ring(ring, saved(5), range(saved(5).layout.chunks - 1), state="staged")
    _bring_back(store, LiveFetch(ring), 3)


def test_what_the_ring_lacks_comes_from_the_store_without_a_word_of_damage(
    ring: Ring, store: CountingStore
) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(4), state="durable")
    results = _bring_back(store, LiveFetch(ring), 5)
    assert sum(one.sources[RING].nbytes for one in results) == 4 * 4096
    assert store.bytes_read >= made.layout.image_bytes - 4 * 4096
    assert not any(one.mended for one in results)


def test_own_tiers_are_nearer_and_each_fills_the_others_gaps(ring: Ring, store: CountingStore) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(CHUNKS), state="durable")
    tier = DictTier().put(made, 0)
    results = _bring_back(store, LiveFetch(ring), 5, [[tier], []])
    assert results[0].sources[tier.name].nbytes == made.layout.slice_bytes(0)
    assert sum(one.sources[RING].nbytes for one in results if RING in one.sources) == made.layout.slice_bytes(
        1
    )
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


@pytest.mark.parametrize("answers", [0, 1, 2, 6])
def test_a_stager_that_says_nothing_is_no_reason_to_fail(
    ring: Ring, store: CountingStore, answers: int
) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(CHUNKS), state="durable")
    fetch = LiveFetch(ring)
    fetch.error, fetch.errors_from = PeerLost("no answer within 30 s"), answers
    _bring_back(store, fetch, 5)
    assert store.bytes_read > 0


def test_a_chunk_whose_slot_is_filled_meanwhile_comes_from_the_store(
    ring: Ring, store: CountingStore
) -> None:
    (made,) = _published(store, 5)
    put_in_ring(ring, made, range(CHUNKS), state="durable")
    fetch = LiveFetch(ring)

    def filled_after_the_look(asked: Asked, **question: object) -> bytes | None:
        if asked is Asked.LAYOUT:
            ring.mark_filling(3, 2, 6, 3)
            ring.slot_memory(3)[:] = bytes(4096)
        return fetch(asked, **question)  # type: ignore[arg-type]

    results = assert_step(*bring_back(store, [[], []], fetch=filled_after_the_look), 5)
    assert "no longer in the ring" in results[0].mended[0]
