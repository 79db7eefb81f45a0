"""Restore from local tiers: any number of ranks, the nearest complete source, and no damaged bytes."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import StateError, StoreError, StoreMissing
from tests.support.restoring import CountingStore, Ranks, ThreadPeers
from tests.support.slices import DictTier, checkpoint
from tests.unit.trainer_side.restore.test_restore import Run, assert_same
from tests.unit.trainer_side.tiered import Vector, assert_step, bring_back, saved
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.inventory import newest_attempt
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import Restored
from trainer_side.state.per_rank import PerRank
from trainer_side.tiers.tier import Nearness, Tier
from trainer_side.tiers.tier_inventory import take_inventory


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "run")


# -- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "now"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_a_whole_state_comes_back_on_any_number_of_ranks(store: CountingStore, before: int, now: int) -> None:
    run = Run(1, steps=2)
    made = checkpoint(
        lambda rank: {**run.state, "own": PerRank({"rank": rank})}, ranks=before, step=7, attempt=3
    )
    # Each machine that is still there has what one rank saved; a rank that is new finds nothing.
    tiers: list[list[Tier]] = [[] for _ in range(now)]
    for rank in range(before):
        tiers[rank % now].append(DictTier(name=f"memory:{rank}").put(made, rank))
    runs = [Run(10 + rank, steps=rank) for rank in range(now)]
    own = [PerRank({"rank": -1}) for _ in range(now)]

    def work(peers: ThreadPeers) -> Restored | None:
        state = {**runs[peers.rank].state, "own": own[peers.rank]}
        return restore(state, store, peers, events=None, tiers=tiers[peers.rank])

    results = Ranks(now).run(work)
    assert [(result.step, result.attempt) for result in results if result] == [(7, 3)] * now
    assert [value.value["rank"] for value in own] == [*range(before), -1, -1][:now]
    expected_tree, expected_loss = copy.deepcopy(run.tree()), run.loss()
    for one in runs:
        assert_same(one.tree(), expected_tree)
        assert one.loss() == expected_loss
    assert store.requests == []
    read_bytes = sum(result.bytes_read for result in results if result)
    assert read_bytes == sum(made.layout.slice_bytes(rank) for rank in range(before))


def test_a_slice_of_rank_0_in_a_tier_names_the_runs_of_its_trackers_on_every_rank(
    store: CountingStore,
) -> None:
    made = saved(2)
    tiers = [[DictTier().put(made, 1)], [DictTier().put(made, 0)]]
    for tier in (tiers[0][0], tiers[1][0]):
        (kept,) = tier._kept
        record = {"trackers": {"wandb": f"run-of-{kept.seal.rank}"}} | kept.seal.record
        tier._kept = [replace(kept, seal=kept.seal.model_copy(update={"record": record}))]
    assert [one.trackers for one in assert_step(*bring_back(store, tiers), 2)] == [{"wandb": "run-of-0"}] * 2


def test_a_restart_on_the_same_machine_touches_no_byte_of_the_store(store: CountingStore) -> None:
    for step in (1, 2):
        made = saved(step)
        made.publish(Path(store.url))
    tiers = [[DictTier().put(made, rank)] for rank in range(2)]
    results = assert_step(*bring_back(store, tiers), 2)
    assert store.requests == []
    assert store.bytes_read == 0
    for result, (tier,) in zip(results, tiers, strict=True):
        assert result is not None
        assert result.manifest is not None
        assert result.sources.keys() == {tier.name}
        assert result.sources[tier.name].nbytes == result.bytes_read > 0


def test_without_any_store(caplog: pytest.LogCaptureFixture) -> None:
    made = saved(5)
    with caplog.at_level(logging.INFO, "holdfast.restore"):
        results, targets = bring_back(
            None, [[DictTier().put(made, 0)], [DictTier(Nearness.NVME).put(made, 1)]]
        )
    assert_step(results, targets, 5)
    said = next(record.getMessage() for record in caplog.records if "restored" in record.getMessage())
    sizes = [made.layout.slice_bytes(rank) for rank in range(2)]
    assert f"rank 0 {sizes[0]} bytes from memory:test in " in said
    assert f"rank 1 {sizes[1]} bytes from nvme:test in " in said


def test_frames_that_every_rank_finds_are_divided_and_read_once(store: CountingStore) -> None:
    made = saved(5)
    shared = [DictTier(name=f"nvme:{rank}").put(made, 0, 1) for rank in range(2)]
    results = assert_step(*bring_back(store, [[tier] for tier in shared]), 5)
    read_bytes = [result.bytes_read for result in results]
    assert sum(read_bytes) == made.layout.image_bytes
    assert abs(read_bytes[0] - read_bytes[1]) <= made.layout.chunk_bytes


def test_the_nearest_tier_of_any_rank_is_read(store: CountingStore) -> None:
    made = saved(5)
    made.publish(Path(store.url))
    far = [DictTier(Nearness.NVME).put(made, 0, 1), DictTier(Nearness.FILE).put(made, 0, 1)]
    near = DictTier(Nearness.PM).put(made, 0, 1)
    assert_step(*bring_back(store, [[far[0]], [far[1], near]]), 5)
    assert near.bytes_read > made.layout.image_bytes  # and the structure
    assert [tier.bytes_read for tier in far] == [0, 0]
    assert store.requests == []


# -- which one -------------------------------------------------------------------------------------------------------


def test_the_newest_wins_wherever_it_is(store: CountingStore) -> None:
    saved(4).publish(Path(store.url))
    newer = [[DictTier().put(saved(6), rank)] for rank in range(2)]
    assert_step(*bring_back(store, newer), 6)
    assert store.requests == []
    older = [[DictTier().put(saved(3), rank)] for rank in range(2)]
    assert_step(*bring_back(store, older), 4)
    assert [tier.bytes_read for (tier,) in older] == [0, 0]


def test_a_later_attempt_is_newer_than_a_higher_step(store: CountingStore) -> None:
    saved(9).publish(Path(store.url))
    tiers = [[DictTier().put(saved(8, attempt=2), rank).put(saved(30, attempt=1), rank)] for rank in range(2)]
    results = assert_step(*bring_back(store, tiers), 8)
    assert (results[0].attempt, results[0].manifest) == (2, None)
    saved(1, attempt=3).publish(Path(store.url))
    assert_step(*bring_back(store, tiers), 1)


def test_slices_of_other_jobs_with_the_same_numbers_are_never_mixed(store: CountingStore) -> None:
    """A machine that comes back may hold an attempt whose number was given again."""
    one, other = saved(5, job="a"), saved(5, job="b")
    tiers = [[DictTier().put(one, 0)], [DictTier().put(other, 1)]]
    results, _ = bring_back(store, tiers)
    assert results == [None, None]
    tiers[0][0].put(other, 0)
    assert_step(*bring_back(store, tiers), 5)


def test_slices_that_are_not_what_the_store_has_of_that_step_give_way_to_it(store: CountingStore) -> None:
    made = saved(5)
    made.publish(Path(store.url))
    other = checkpoint(
        lambda rank: {"model": Vector(1.0), "y": torch.arange(7), "own": PerRank({"rank": rank})},
        ranks=2,
        step=5,
    )
    assert other.layout.digest == made.layout.digest
    results = assert_step(*bring_back(store, [[DictTier().put(other, rank)] for rank in range(2)]), 5)
    assert "another checkpoint with the same numbers" in results[0].skipped[0]
    assert store.bytes_read > 0


def test_an_unfinished_step_is_passed_over_and_said(store: CountingStore) -> None:
    before, newest = saved(5), saved(6)
    tiers = [[DictTier().put(before, 0).put(newest, 0)], [DictTier().put(before, 1)]]
    results = assert_step(*bring_back(store, tiers), 5)
    assert all("step 6 (attempt 1)" in r.skipped[0] and "of ranks 1" in r.skipped[0] for r in results)


def test_only_an_unfinished_step_anywhere_is_a_new_run(
    store: CountingStore, caplog: pytest.LogCaptureFixture
) -> None:
    results, targets = bring_back(store, [[DictTier().put(saved(6), 0)], []])
    assert results == [None, None]
    assert all(torch.equal(target.x, torch.zeros_like(target.x)) for target in targets)
    assert "the run starts at step 0" in caplog.text


def test_a_restore_without_any_checkpoint_is_a_new_run(store: CountingStore) -> None:
    assert bring_back(store, [[DictTier()], []])[0] == [None, None]
    assert bring_back(None, [[], []])[0] == [None, None]


def test_a_certain_step(store: CountingStore) -> None:
    saved(4).publish(Path(store.url))
    tiers = [[DictTier().put(saved(5), rank).put(saved(6), rank)] for rank in range(2)]
    for step in (4, 5, 6):
        assert_step(*bring_back(store, tiers, step=step), step)
    with pytest.raises(StoreMissing, match="no checkpoint of step 9; the newest is 6"):
        bring_back(store, tiers, step=9)
    tiers[0][0].put(saved(7), 0)
    with pytest.raises(StoreMissing, match=r"step 7 is whole: .* of ranks 1"):
        bring_back(store, tiers, step=7)


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_a_state_of_other_shapes_is_refused_and_left_alone(store: CountingStore) -> None:
    made = saved(5)
    target = Vector(0.0, 9)
    with pytest.raises(StateError, match=r"expected \[9\], the checkpoint has \[20000\]"):
        restore({"model": target}, store, LonePeers(), events=None, tiers=[DictTier().put(made, 0, 1)])
    assert torch.equal(target.x, torch.zeros(9))


def test_a_store_that_does_not_answer_is_believed_to_hold_something_newer(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent() -> Any:
        raise StoreError("no route to store", retriable=True)

    monkeypatch.setattr(store, "list", silent)
    tiers = [[DictTier().put(saved(5), rank)] for rank in range(2)]
    with pytest.raises(StoreError, match=r"(?s)no route.*step 5 \(attempt 1\) whole.*restore_without_store"):
        bring_back(store, tiers)
    assert_step(*bring_back(store, tiers, without_store=True), 5)
    assert "the store does not answer" in caplog.text
    for own in ([], [DictTier().put(saved(5), 0)]):
        with pytest.raises(StoreError, match="no route"):
            bring_back(store, [own, []], without_store=True)
    with pytest.raises(StoreError, match="no route"):
        Ranks(2).run(lambda peers: newest_attempt(1, store, peers))
    assert Ranks(2).run(lambda peers: newest_attempt(1, store, peers, without_store=True)) == [1, 1]


def test_the_newest_attempt_is_that_of_any_tier_of_any_rank_or_of_the_store(store: CountingStore) -> None:
    tiers: list[list[Any]] = [
        [DictTier().put(saved(5, attempt=4), 0)],
        [DictTier().put(saved(9, attempt=2), 1)],
    ]

    def ask(peers: ThreadPeers) -> int:
        return newest_attempt(take_inventory(peers, tiers[peers.rank]).newest_attempt, store, peers)

    assert Ranks(2).run(ask) == [4, 4]
    saved(1, attempt=6).publish(Path(store.url))
    assert Ranks(2).run(ask) == [6, 6]
    assert newest_attempt(0, None, LonePeers()) == 0
