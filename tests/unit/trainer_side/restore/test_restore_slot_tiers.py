"""Restore from the ranks' real tiers: slot files in memory and on disks, written by their protocol."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.image.proof_record import Digest
from holdfast.image.slices import frames_of
from holdfast.store.posix_io import OpenFile
from tests.support.restoring import CountingStore, Ranks, ThreadPeers
from tests.support.slices import Checkpoint, checkpoint, keep
from tests.unit.trainer_side.restore.test_restore import Run, assert_same
from tests.unit.trainer_side.tiered import assert_step, bring_back, saved
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore import read_plan
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import Restored
from trainer_side.state.per_rank import PerRank
from trainer_side.tiers import slot_tier
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.tier import Tier
from trainer_side.tiers.tier_inventory import take_inventory

_KINDS = ("memory", "nvme", "file", "pm")


class Machines:
    """Directories that outlive the processes that write there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: list[Tier] = []

    def place(self, number: int, kind: str) -> Path:
        return self._root / f"machine-{number}" / kind

    def open(self, number: int, kind: str = "nvme") -> Tier:
        """As a new process does it."""
        self.place(number, kind).parent.mkdir(parents=True, exist_ok=True)
        self._opened.append(open_tier(f"{kind}:{self.place(number, kind)}", str(self._root / "run")))
        return self._opened[-1]

    def save(
        self, made: Checkpoint, number: int, *ranks: int, kind: str = "nvme", proven: bool = False
    ) -> None:
        """Let these ranks, on this machine, keep their slices, and what the step after used; and end."""
        tiers = [self.open(number, kind) for _ in ranks]
        for rank, tier in zip(ranks, tiers, strict=True):
            keep(tier, made, rank, complete=False)
        for tier in tiers:
            tier.complete(made.attempt, made.step)
            if proven:
                tier.keep_proof(made.attempt, made.step, {"step": made.step + 1})
            tier.close()

    def close(self) -> None:
        for tier in self._opened:
            tier.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.close()


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "run")


@pytest.mark.parametrize(("before", "now"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_whole_state_comes_back_on_any_number_of_ranks(
    machines: Machines, store: CountingStore, before: int, now: int
) -> None:
    run = Run(1, steps=2)
    made = checkpoint(
        lambda rank: {**run.state, "own": PerRank({"rank": rank})}, ranks=before, step=7, attempt=3
    )
    tiers: list[list[Tier]] = [[] for _ in range(now)]
    for rank in range(before):
        kind = _KINDS[(rank + before + now) % len(_KINDS)]
        machines.save(made, rank, rank, kind=kind)
        tiers[rank % now].append(machines.open(rank, kind))
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


def test_ranks_of_one_machine_find_each_others_slices(machines: Machines, store: CountingStore) -> None:
    """One rank's own tier is enough for both, and with both each reads its half."""
    for step in (4, 5):
        machines.save(saved(step), 0, 0, 1)
    results = assert_step(*bring_back(store, [[machines.open(0)], [machines.open(0)]]), 5)
    made = saved(5)
    assert sum(result.bytes_read for result in results) == made.layout.image_bytes
    assert (
        max(result.bytes_read for result in results) <= made.layout.image_bytes / 2 + made.layout.chunk_bytes
    )
    assert_step(*bring_back(store, [[], [machines.open(0)]]), 5)
    assert_step(*bring_back(store, [[machines.open(0)]], step=4), 4)
    assert store.requests == []


def test_memory_is_read_before_a_disk(machines: Machines, store: CountingStore) -> None:
    made = saved(5)
    for kind in ("file", "memory"):
        machines.save(made, 0, 0, 1, kind=kind)
    tiers = [[machines.open(0, "file"), machines.open(0, "memory")] for _ in range(2)]
    for result, own in zip(assert_step(*bring_back(store, tiers), 5), tiers, strict=True):
        assert result.sources.keys() == {own[1].name}


def test_a_slot_in_memory_is_opened_once_for_each_reading(
    tmpfs: Path, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and tail, then all of it; nothing stays open: a slot that is removed must give its memory back."""
    machines = Machines(tmpfs)
    machines.save(saved(5), 0, 0, 1, kind="memory")
    paths: list[Path] = []

    class Counted(OpenFile):
        def __init__(self, path: Path) -> None:
            paths.append(path)
            super().__init__(path)

    monkeypatch.setattr(slot_tier, "OpenFile", Counted)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    results, targets = bring_back(store, [[machines.open(0, "memory")]], threads=1)
    assert_step(results, targets, 5)
    assert 2 <= len(paths) <= 4
    assert len({*paths}) == 2
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    machines.close()


@pytest.mark.parametrize(("cores", "readers"), [(1, 4), (2, 4), (8, 6), (16, 12), (64, 16)])
def test_cores_read_what_is_in_memory_and_few_requests_go_to_a_disk(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, cores: int, readers: int
) -> None:
    monkeypatch.setattr(read_plan, "cores_of_rank", lambda: cores)
    origins = {}
    for kind in ("memory", "nvme"):
        machines.save(saved(5), 0, 0, kind=kind)
        tier = machines.open(0, kind)
        origins[kind] = read_plan.KeptSlice(tier, tier.kept_slices()[0])
    assert read_plan.reader_count([origins["memory"]]) == readers
    assert read_plan.reader_count(origins.values()) == 4


def test_a_machine_that_is_lost_is_made_good_by_the_store(machines: Machines, store: CountingStore) -> None:
    made = saved(5)
    made.publish(Path(store.url))
    for rank in range(2):
        machines.save(made, rank, rank)
    shutil.rmtree(machines.place(1, "nvme"))
    results = assert_step(*bring_back(store, [[machines.open(0)], [machines.open(1)]]), 5)
    near_bytes = sum(result.sources[f"nvme:{machines.place(0, 'nvme')}"].nbytes for result in results[:1])
    assert near_bytes == made.layout.slice_bytes(0) - sum(
        sum(extent.nbytes for extent in made.layout.pieces(chunk, 0))
        for chunk in range(made.layout.chunks)
        if len(made.layout.senders(chunk)) > 1
    )
    assert store.bytes_read < made.layout.image_bytes


@pytest.mark.parametrize("with_store", [True, False])
def test_a_bit_that_flips_on_a_disk(machines: Machines, store: CountingStore, with_store: bool) -> None:
    for step in (4, 5):
        made = saved(step)
        for rank in range(2):
            machines.save(made, rank, rank)
    if with_store:
        made.publish(Path(store.url))
    frame = frames_of(made.layout, 1)[0]
    found = made.area(1)[frame.offset : frame.offset + frame.nbytes]
    flipped = 0
    for path in machines.place(1, "nvme").rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(found)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 700)
                file.write(b"\xff\xff")
            flipped += 1
    assert flipped == 1
    results = assert_step(
        *bring_back(store, [[machines.open(0)], [machines.open(1)]]), 5 if with_store else 4
    )
    for result in results:
        (named,) = result.mended if with_store else result.skipped
        assert "frame 0 " in named
        assert str(machines.place(1, "nvme")) in named
    chunks = made.layout.chunk_extent(frame.chunk)
    assert store.requests == ([(chunks.offset, chunks.nbytes)] if with_store else [])


def test_an_unfinished_step_gives_way_to_the_one_before(machines: Machines, store: CountingStore) -> None:
    for rank in range(2):
        machines.save(saved(5), rank, rank)
    tier = machines.open(0)
    keep(tier, saved(6), 0, complete=False)
    tier.close()
    results = assert_step(*bring_back(store, [[machines.open(0)], [machines.open(1)]]), 5)
    assert "step 6 (attempt 1)" in results[0].skipped[0]


def kept_proofs(results: Sequence[Restored | None]) -> list[list[tuple[int, Digest | None, str]]]:
    return [
        [(one.rank, one.digest, one.problem) for one in result.kept_proofs]
        for result in results
        if result is not None
    ]


def test_each_rank_gives_the_proofs_beside_its_slices(machines: Machines, store: CountingStore) -> None:
    for step in (4, 5):
        machines.save(saved(step), 0, 0, proven=True)
        machines.save(saved(step), 0, 0, kind="memory", proven=True)
        machines.save(saved(step), 1, 1, proven=step == 4)
    tiers = [[machines.open(0), machines.open(0, "memory")], [machines.open(1)]]
    results, _ = bring_back(store, tiers)
    assert kept_proofs(results) == [[(0, {"step": 6}, "")], [(1, None, "")]]
    results, _ = bring_back(store, tiers, step=4)
    assert kept_proofs(results) == [[(0, {"step": 5}, "")], [(1, {"step": 5}, "")]]


def test_a_checkpoint_from_the_store_has_the_proofs_of_its_slices_and_of_no_other_job(
    machines: Machines, store: CountingStore
) -> None:
    made = saved(5)
    made.publish(Path(store.url))
    for rank in range(2):
        machines.save(made, rank, rank, proven=True)
    shutil.rmtree(machines.place(1, "nvme"))
    results, _ = bring_back(store, [[machines.open(0)], [machines.open(1)]])
    assert kept_proofs(results) == [[(0, {"step": 6}, "")], []]
    machines.save(saved(5, attempt=2), 0, 0, proven=True)  # of which nobody has the other slice
    results, _ = bring_back(store, [[machines.open(0)], [machines.open(1)]])
    assert kept_proofs(results) == [[(0, {"step": 6}, "")], []]


def test_a_proof_of_another_job_of_the_same_attempt_is_left_out(
    machines: Machines, store: CountingStore
) -> None:
    for rank in range(2):
        machines.save(saved(5, job="one"), rank, rank)
    machines.save(saved(5, job="other"), 0, 0, kind="memory", proven=True)
    tiers = [[machines.open(0, "memory"), machines.open(0)], [machines.open(1)]]
    assert kept_proofs(bring_back(store, tiers)[0]) == [[(0, None, "")], [(1, None, "")]]


def test_a_torn_proof_costs_the_restore_nothing(machines: Machines, store: CountingStore) -> None:
    for rank in range(2):
        machines.save(saved(5), rank, rank, proven=True)
    (path,) = machines.place(1, "nvme").rglob("*.proof")
    path.write_bytes(path.read_bytes()[:-9])
    results, runs = bring_back(store, [[machines.open(0)], [machines.open(1)]])
    assert_step(results, runs, 5)
    (whole,), ((rank, digest, problem),) = kept_proofs(results)
    assert whole == (0, {"step": 6}, "")
    assert (rank, digest) == (1, None)
    assert f"{path}: the proof is cut short" in problem


def test_the_newest_attempt_is_found_in_a_tier(machines: Machines) -> None:
    machines.save(saved(5, attempt=7), 0, 0)
    assert take_inventory(LonePeers(), [machines.open(0)]).newest_attempt == 7
