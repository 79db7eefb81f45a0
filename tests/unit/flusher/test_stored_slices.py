"""Which slices the flusher makes a file of, which it removes, and which it must not touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flusher.stored_slices import Slices
from flusher.writer_lease import WriterLease
from holdfast.checkpoints.lease import Lease
from holdfast.checkpoints.slice_sets import SliceName, find_sets
from holdfast.errors import FencedError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest
from holdfast.store.base import ObjectInfo
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore
from tests.support.store_slices import tier_of, write_frames, write_slices

IMAGE = made_up(2, entries=9, chunk_bytes=4096, ranks=2, entry_bytes_max=9000)


class Rig:
    """A run in memory whose claim is ours."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.write(1, 1)
        self.lease = WriterLease(self.store, 30.0)  # attempt 2
        self.slices = Slices(self.store, self.store, self.lease, None)

    def write(self, attempt: int, step: int, ranks: list[int] | None = None) -> None:
        write_slices(self.store, IMAGE, attempt=attempt, step=step, ranks=ranks)

    def make(self, *under_way: CheckpointId) -> Manifest | None:
        return self.slices.assemble_newest(lambda: under_way)

    def orders(self) -> list[tuple[int, int]]:
        return [found.order for found in find_sets(self.store.list())]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.lease.end()


def test_the_newest_complete_set_becomes_a_file_once(rig: Rig) -> None:
    rig.write(1, 5)
    rig.write(1, 6, ranks=[1])
    made = rig.make()
    assert made is not None
    assert made.order == (1, 5)
    assert rig.store.objects[made.file] == IMAGE.final
    assert rig.make() is None
    assert rig.orders() == [(1, 6), (1, 5), (1, 1)], "nothing is removed yet"


def test_a_step_under_way_from_the_ring_is_not_made_twice(rig: Rig) -> None:
    rig.write(1, 5)
    assert rig.make(CheckpointId(1, 5)) is None
    assert not any(name.startswith("step-") for name in rig.store.objects)


def test_a_damaged_set_is_passed_over_and_kept(rig: Rig) -> None:
    rig.write(1, 5)
    name = SliceName(1, 5, 1, 2).slice
    rig.store.objects[name] = b"\0" * len(rig.store.objects[name])
    made = rig.make()
    assert made is not None
    assert made.order == (1, 1)
    assert (1, 5) in rig.orders()
    assert rig.store.open_uploads == []


def test_a_set_that_goes_while_it_is_read_is_passed_over(rig: Rig) -> None:
    """As when its job lives, and has completed a newer one."""
    rig.write(1, 5)

    def before(act: str, name: str) -> None:
        if act == "read_into" and "step-000000005" in name:
            rig.store.objects.pop(SliceName(1, 5, 1, 2).slice, None)

    rig.store.before = before
    made = rig.make()
    assert made is not None
    assert made.order == (1, 1)


def test_only_sets_of_jobs_before_that_of_a_good_checkpoint_go(rig: Rig) -> None:
    rig.write(1, 5)
    rig.write(2, 3)
    rig.write(3, 1, ranks=[0])
    made = rig.make()
    assert made is not None
    assert made.order == (2, 3)
    rig.slices.published(made)
    assert rig.orders() == [(3, 1), (2, 3)], "a living job looks after its own"


def test_only_the_first_good_checkpoint_of_a_job_has_the_store_listed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it fails: then the next one does what was left."""
    made = rig.make()
    assert made is not None
    lists = []
    objects = rig.store.list

    def counted() -> list[ObjectInfo]:
        lists.append(1)
        return objects()

    def failing(name: str) -> None:
        raise StoreError(f"{name}: not now")

    monkeypatch.setattr(rig.store, "list", counted)
    with monkeypatch.context() as broken:
        broken.setattr(rig.store, "delete", failing)
        with pytest.raises(StoreError):
            rig.slices.published(made.model_copy(update={"attempt": 2}))
    for attempt, looks in ((2, True), (2, False), (3, True), (3, False)):
        lists.clear()
        rig.slices.published(made.model_copy(update={"attempt": attempt}))
        assert bool(lists) == looks
    assert find_sets(objects()) == []


def test_a_job_that_begins_ends_what_the_ones_before_had_begun(rig: Rig) -> None:
    rig.write(1, 5, ranks=[1])
    rig.write(2, 3, ranks=[1])
    writers = []
    for attempt in (1, 2):
        writer = tier_of(rig.store, IMAGE, 0).begin(attempt, 9)
        assert writer is not None
        write_frames(writer, IMAGE, 0, threads=1)
        writers.append(writer)
    rig.slices.attached(2)
    assert rig.orders() == [(2, 3), (1, 1)]
    assert rig.store.open_uploads == [SliceName(2, 9, 0, 2).slice]
    assert writers[1].seal({})
    with pytest.raises(StoreError):
        writers[0].seal({})


def test_at_the_end_only_what_became_a_good_file_goes(rig: Rig) -> None:
    rig.write(1, 5)
    assert rig.make() is not None
    rig.slices.ended(lambda order: False)
    assert (1, 5) in rig.orders()
    rig.slices.ended(lambda order: order == (1, 5))
    assert rig.orders() == [(1, 1)]


def test_a_run_that_is_anothers_is_not_touched(rig: Rig) -> None:
    rig.write(1, 5)
    made = rig.make()
    assert made is not None
    other = Lease.take(rig.store, takeover=True)
    before = dict(rig.store.objects)
    acts: list[Callable[[], None]] = [
        lambda: rig.slices.attached(3),
        lambda: rig.slices.published(made.model_copy(update={"attempt": 3})),
        lambda: rig.slices.ended(lambda order: True),
    ]
    for act in acts:
        with pytest.raises(FencedError):
            act()
    rig.write(2, 8)
    before |= {name: data for name, data in rig.store.objects.items() if name.startswith("slices/")}
    with pytest.raises(FencedError):
        rig.make()
    assert rig.store.objects == before
    other.release()
