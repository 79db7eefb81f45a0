"""After a rewind no rank restores the abandoned branch from any source, and each learns the skipped batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoints.branches import Rewind
from holdfast.config import TrainerConfig
from holdfast.errors import DamageError, StateError, StoreMissing
from holdfast.ring.ring import Ring
from tests.support.restoring import CountingStore
from tests.support.ring_checkpoint import LiveFetch, put_in_ring
from tests.support.slices import DictTier
from tests.unit.trainer_side.restore.named import publish_named
from tests.unit.trainer_side.test_checkpointer import FakeLink
from tests.unit.trainer_side.tiered import assert_step, bring_back, saved
from trainer_side import joining
from trainer_side.checkpointer import Checkpointer
from trainer_side.data.sampler import ResumableSampler
from trainer_side.link.job_state import JobState
from trainer_side.tiers.tier import Nearness

CHUNKS = 64


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "run")


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    with Ring.create(tmp_path / "ring", chunk_bytes=4096, ring_chunks=CHUNKS, attempt=1) as made:
        yield made


def published(store: CountingStore, *keys: tuple[int, int]) -> None:
    for attempt, step in keys:
        saved(step, attempt=attempt).publish(Path(store.url))


def rewind(root: Path, attempt: int, to: tuple[int, int], *skips: tuple[int, int]) -> None:
    made = Rewind(attempt=attempt, write_id="w", to=to, newest=(1, 9), skips=skips)
    (root / made.name).write_bytes(made.to_bytes())


def test_the_fork_is_restored_on_every_rank_until_the_branch_has_its_own(store: CountingStore) -> None:
    published(store, (1, 3), (1, 5), (1, 7))
    rewind(Path(store.url), 2, (1, 3))
    for result in assert_step(*bring_back(store, [[], [], []]), 3):
        assert result.rewound is not None
        assert (result.rewound.to_step, result.rewound.from_step, result.rewound.skipped) == (3, 9, ())
        assert result.skipped == [], "nobody is told of each older checkpoint at each restart"
    published(store, (3, 4))
    assert [result.rewound for result in assert_step(*bring_back(store, [[], []]), 4)] == [None, None]


def test_tiers_and_ring_do_not_bring_the_older_branch_back(ring: Ring, store: CountingStore) -> None:
    published(store, (1, 3))
    newer, fork = saved(5), saved(3)
    put_in_ring(ring, newer, range(CHUNKS), state="staged")
    tiers = [[DictTier().put(newer, rank), DictTier(Nearness.NVME).put(fork, rank)] for rank in range(2)]
    assert_step(*bring_back(store, tiers, fetch=LiveFetch(ring)), 5)
    rewind(Path(store.url), 2, (1, 3))
    for result in assert_step(*bring_back(store, tiers, fetch=LiveFetch(ring)), 3):
        assert set(result.sources) == {"nvme:test"}, "what is near is still read from there"
    rewind(Path(store.url), 4, (1, 5))
    assert_step(*bring_back(store, tiers, fetch=LiveFetch(ring)), 5)


def test_the_ring_has_the_fork_as_well(ring: Ring, store: CountingStore) -> None:
    published(store, (1, 3), (1, 5))
    put_in_ring(ring, saved(3), range(CHUNKS), state="durable")
    rewind(Path(store.url), 2, (1, 3))
    results = assert_step(*bring_back(store, [[], []], fetch=LiveFetch(ring)), 3)
    assert all("the stager's ring" in result.sources for result in results)


def test_a_run_whose_current_line_is_gone_does_not_begin_from_the_start(store: CountingStore) -> None:
    published(store, (1, 3), (1, 5))
    rewind(Path(store.url), 2, (1, 3))
    for path in Path(store.url).glob("step-000000003*"):
        path.unlink()
    with pytest.raises(DamageError, match=r"was rewound to step 3 \(attempt 1\), and checkpoints of older"):
        bring_back(store, [[], []])


def test_a_step_of_the_older_branch_is_not_restored_by_its_number(store: CountingStore) -> None:
    published(store, (1, 3), (1, 5))
    rewind(Path(store.url), 2, (1, 3))
    with pytest.raises(StoreMissing, match="checkpoints of older branches are not restored"):
        bring_back(store, [[], []], step=5)
    assert_step(*bring_back(store, [[], []], step=3), 3)


def test_a_damaged_record_ends_the_restore_on_every_rank(store: CountingStore) -> None:
    published(store, (1, 3), (1, 5))
    rewind(Path(store.url), 2, (1, 3))
    path = Path(store.url) / "rewind-a002.json"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DamageError, match="the record of a rewind cannot be read"):
        bring_back(store, [[], []])


def test_batches_that_nobody_can_leave_out_are_refused_before_a_byte_is_read(store: CountingStore) -> None:
    published(store, (1, 3), (1, 5))
    rewind(Path(store.url), 2, (1, 3), (4, 5))
    with pytest.raises(StateError, match="no object of the state can leave batches out"):
        bring_back(store, [[], []])
    assert store.requests == []
    (result, _) = assert_step(*bring_back(store, [[], []], can_skip=True), 3)
    assert result.rewound is not None
    assert result.rewound.skipped == ((4, 5),)


def test_a_checkpointer_has_its_samplers_leave_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link = FakeLink()
    link.job = JobState(0, 1, store_url=str(tmp_path), chunk_bytes=1 << 20, attempt=3)
    monkeypatch.setattr(joining, "connect_stager", link.meet)
    before = ResumableSampler(40, seed=1, rank=0, ranks=1)
    batches = before.batches(2)
    for step in range(3):
        next(batches)
        before.stepped(step)
    publish_named(tmp_path, 2, {"model": torch.nn.Linear(2, 2), "data": before})
    publish_named(tmp_path, 7, {"model": torch.nn.Linear(2, 2), "data": before})
    used = [next(batches) for _ in range(9)]
    rewind(tmp_path, 2, (1, 2), (4, 6))
    sampler = ResumableSampler(40, seed=1, rank=0, ranks=1)
    state = {"model": torch.nn.Linear(2, 2), "data": sampler}
    config = TrainerConfig(events=tmp_path / "events", on_not_durable="warn", close_seconds_max=0.1)
    with Checkpointer(state, config=config) as checkpointer:
        assert checkpointer.restore() == 3
        assert checkpointer.restored is not None
        assert checkpointer.restored.rewound is not None
        assert checkpointer.restored.rewound.skipped == ((4, 6),)
        branch = sampler.batches(2)
        assert [next(branch) for _ in range(4)] == [used[0], *used[4:7]]
    said = "the run was rewound from step 9 to step 2, without the batches of steps 4..6 (by data)"
    assert said in caplog.text
    assert '"event":"rewound"' in (tmp_path / "events").read_text().replace(": ", ":")
