"""The store's tier where the suite of all tiers cannot look: orders of acts, and what happens in between."""

from __future__ import annotations

import pytest

from holdfast.checkpoints.assembly import assemble
from holdfast.checkpoints.slice_sets import SliceName, find_sets, layout_name, load_set
from holdfast.errors import ConfigError, StoreError
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore
from tests.support.store_slices import tier_of, write_frames, write_slices
from trainer_side.tiers.store_tier import StoreTier

IMAGE = made_up(2, entries=9, chunk_bytes=4096, ranks=1, entry_bytes_max=9000)
DIGEST = IMAGE.layout.digest


def name_of(attempt: int, step: int) -> SliceName:
    return SliceName(attempt, step, 0, 1)


def save(store: MemoryStore, tier: StoreTier, attempt: int, step: int) -> bool:
    writer = tier.begin(attempt, step)
    assert writer is not None
    write_frames(writer, IMAGE, 0, threads=1)
    return writer.seal({})


def steps(store: MemoryStore) -> list[int]:
    return [found.step for found in find_sets(store.list())]


def test_slice_and_layout_are_there_before_the_seal() -> None:
    store, seen = MemoryStore(), []

    def before(act: str, name: str) -> None:
        if act == "write" and name.endswith(".seal.json"):
            seen.append({name_of(1, 3).slice, layout_name(1, DIGEST)} <= store.objects.keys())

    store.before = before
    tier = tier_of(store, IMAGE, 0)
    assert save(store, tier, 1, 3)
    assert seen == [True]


def test_room_is_made_with_the_first_byte() -> None:
    store = MemoryStore()
    tier = tier_of(store, IMAGE, 0)
    for step in (1, 2):
        assert save(store, tier, 1, step)
        tier.complete(1, step)
    writer = tier.begin(1, 3)
    assert writer is not None
    assert steps(store) == [2, 1], "begin asks the store nothing"
    writer.abandon()
    assert steps(store) == [2, 1]
    writer = tier.begin(1, 3)
    assert writer is not None
    at_begin: list[list[int]] = []
    store.before = lambda act, name: at_begin.append(steps(store)) if act == "begin" else None
    write_frames(writer, IMAGE, 0, threads=1)
    assert at_begin == [[2]]
    assert writer.seal({})
    assert name_of(1, 1).seal not in store.objects
    assert name_of(1, 1).slice not in store.objects


def test_a_step_that_is_late_when_its_seal_is_there_is_taken_back() -> None:
    store = MemoryStore()
    tier = tier_of(store, IMAGE, 0, slots=3)

    def before(act: str, name: str) -> None:
        if act == "write" and name == name_of(1, 3).seal:
            store.before = lambda act, name: None
            assert save(store, tier, 1, 4)
            tier.complete(1, 4)

    store.before = before
    assert not save(store, tier, 1, 3)
    assert steps(store) == [4]


def test_the_newest_complete_step_of_a_dead_job_is_no_slot_to_take() -> None:
    store = MemoryStore()
    write_slices(store, IMAGE, attempt=1, step=5)
    tier = tier_of(store, IMAGE, 0)
    assert tier.begin(2, 6) is not None
    assert tier.begin(2, 7) is None
    assert steps(store) == [5]


def test_a_failed_seal_leaves_nothing_but_the_layout() -> None:
    store = MemoryStore()

    def before(act: str, name: str) -> None:
        if act == "write" and name.endswith(".seal.json"):
            raise StoreError("full")

    store.before = before
    tier = tier_of(store, IMAGE, 0)
    with pytest.raises(StoreError, match="full"):
        save(store, tier, 1, 3)
    assert set(store.objects) == {layout_name(1, DIGEST)}
    assert store.open_uploads == []
    assert tier.begin(1, 4) is not None


@pytest.mark.parametrize("retriable", [True, False])
def test_a_store_that_is_away_for_now_does_not_cost_the_tier(retriable: bool) -> None:
    store = MemoryStore()

    def before(act: str, name: str) -> None:
        if act == "check":
            raise StoreError("away", retriable=retriable)

    store.before = before
    tier = StoreTier(store, run="run", rank=0)
    if not retriable:
        with pytest.raises(StoreError, match="away"):
            tier.prepare(IMAGE.layout, 0)
        return
    tier.prepare(IMAGE.layout, 0)
    assert save(store, tier, 1, 3)
    assert steps(store) == [3]


def test_a_single_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        StoreTier(MemoryStore(), run="run", rank=0, slots=1)


def test_a_rank_with_nothing_to_send_has_a_seal_alone() -> None:
    image = made_up(2, entries=1, chunk_bytes=4096, ranks=9, entry_bytes_max=3000)
    assert image.layout.chunks < 9
    store = MemoryStore()
    write_slices(store, image, attempt=1, step=1)
    (found,) = find_sets(store.list())
    assert found.complete
    assert len(found.slices) < 9
    kept = tier_of(store, image, 0).kept()
    assert len(kept) == 9
    assert (
        store.objects[assemble(store, load_set(store, found), attempt=9, check=lambda: None).file]
        == image.final
    )
