"""A checkpoint that is set aside is skipped on all ranks and in all places; a later attempt's is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.ring import Ring
from tests.support.restoring import CountingStore
from tests.support.ring_checkpoint import LiveFetch, put_in_ring
from tests.support.slices import DictTier
from tests.unit.trainer_side.tiered import assert_step, bring_back, saved
from trainer_side.restore.choice import Candidate, SkippedCheckpoint, candidates, skip_set_aside
from trainer_side.restore.ring_slices import RingSlices
from trainer_side.tiers.tier import Nearness

CHUNKS = 64


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "run")


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    with Ring.create(tmp_path / "ring", chunk_bytes=4096, ring_chunks=CHUNKS, attempt=1) as made:
        yield made


def published(store: CountingStore, *keys: CheckpointId) -> None:
    for key in keys:
        saved(key.step, attempt=key.attempt).publish(Path(store.url))


def test_the_one_before_is_taken_on_every_rank_and_that_is_said_once(
    store: CountingStore, caplog: pytest.LogCaptureFixture
) -> None:
    published(store, CheckpointId(1, 3), CheckpointId(1, 5), CheckpointId(1, 7))
    with caplog.at_level(logging.WARNING, "holdfast.restore"):
        results = assert_step(*bring_back(store, [[], [], []], set_aside=[CheckpointId(1, 5)]), 3)
    said = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert said == [
        f"restore: step {step} (attempt 1) is set aside by the setting restore_set_aside; trying step 3 (attempt 1) "
        "instead"
        for step in (7, 5)
    ]
    assert [len(result.skipped) for result in results] == [2, 2, 2]
    assert [result.before for result in results] == [None] * 3


def test_tiers_and_ring_do_not_bring_a_set_aside_step_back(ring: Ring, store: CountingStore) -> None:
    published(store, CheckpointId(1, 3), CheckpointId(1, 5))
    poisoned, good = saved(5), saved(3)
    put_in_ring(ring, poisoned, range(CHUNKS), state="staged")
    tiers = [[DictTier().put(poisoned, rank), DictTier(Nearness.NVME).put(good, rank)] for rank in range(2)]
    results = assert_step(*bring_back(store, tiers, fetch=LiveFetch(ring)), 5)
    assert [result.before for result in results] == [CheckpointId(1, 3)] * 2
    results = assert_step(*bring_back(store, tiers, fetch=LiveFetch(ring), set_aside=[CheckpointId(1, 5)]), 3)
    assert all(set(result.sources) == {"nvme:test"} for result in results)
    assert [len(result.skipped) for result in results] == [1, 1], "wherever it lies, it is named once"


def test_the_ring_has_the_one_before_as_well(ring: Ring, store: CountingStore) -> None:
    published(store, CheckpointId(1, 3), CheckpointId(1, 5))
    put_in_ring(ring, saved(3), range(CHUNKS), state="durable")
    results = assert_step(
        *bring_back(store, [[], []], fetch=LiveFetch(ring), set_aside=[CheckpointId(1, 5)]), 3
    )
    assert all(set(result.sources) == {RingSlices.name} for result in results)


@pytest.mark.parametrize("newest", [CheckpointId(4, 4), CheckpointId(4, 5)])
def test_a_run_that_went_back_goes_on_from_its_newer_progress(
    store: CountingStore, newest: CheckpointId
) -> None:
    """On the next preemption, and even if nobody said any more what was set aside: a later attempt is newer."""
    published(store, CheckpointId(1, 3), CheckpointId(1, 5), newest)
    for set_aside in ([CheckpointId(1, 5)], []):
        (result,) = assert_step(*bring_back(store, [[]], set_aside=set_aside), newest.step)
        assert result.attempt == 4
        assert result.before == (CheckpointId(1, 3) if set_aside else CheckpointId(1, 5))


def test_when_all_are_set_aside_nothing_begins_anew(store: CountingStore) -> None:
    published(store, CheckpointId(1, 5))
    with pytest.raises(
        DamageError, match=r"none of 1 checkpoints.*\n.*step 5 \(attempt 1\) is set aside by the set"
    ):
        bring_back(store, [[], []], set_aside=[CheckpointId(1, 2)])


def test_a_step_that_the_script_names_is_set_aside_all_the_same(store: CountingStore) -> None:
    published(store, CheckpointId(1, 3), CheckpointId(1, 5))
    with pytest.raises(DamageError, match="restore_set_aside"):
        bring_back(store, [[]], step=5, set_aside=[CheckpointId(1, 5)])
    (result,) = assert_step(*bring_back(store, [[]], step=5), 5)
    assert result.before is None, "it would be asked for again: there is nothing to go back to"


def test_the_reason_of_one_that_is_damaged_stays() -> None:
    listed: list[Candidate | SkippedCheckpoint] = [
        SkippedCheckpoint(1, 5, "its file is missing", was_complete=True),
        Candidate(1, 3, 0),
        Candidate(1, 1, 1),
    ]
    assert skip_set_aside(listed, []) is listed
    assert skip_set_aside(listed, [CheckpointId(1, 3)]) == [
        listed[0],
        SkippedCheckpoint(
            1, 3, "step 3 (attempt 1) is set aside by the setting restore_set_aside", was_complete=True
        ),
        listed[2],
    ]
    assert candidates([], []) == skip_set_aside([], [CheckpointId(1, 3)])
