"""A run of thousands of checkpoints: how much of it is read and kept in memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease, _claim_name, _LeaseRecord, claim_attempt, plain_names_are_first
from holdfast.checkpoints.lease import newest_attempt as newest_of_store
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import (
    EntryRecord,
    Manifest,
    State,
    TensorRecord,
    manifest_name,
    step_file_name,
)
from holdfast.store.base import SMALL_BYTES_MAX
from tests.support.checkpoints import add_small, manifest_of, small_image
from tests.support.memory_store import MemoryStore
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.choice import (
    Candidate,
    Holder,
    SliceKey,
    StoreCandidate,
    candidates,
    skip_set_aside,
)
from trainer_side.restore.inventory import CandidateListing, StoreListing

_STEPS = 300
_TENSORS = 500  # a manifest of more than 64 KiB, of which the beginning is read alone
_MANIFESTS_HELD_MAX = (
    24  # eight are read ahead, each as its bytes and its objects, and the ones before them go later
)


class CountedStore(MemoryStore):
    """Counts the reads of manifests."""

    def __init__(self) -> None:
        super().__init__()
        self.read_fully: list[str] = []
        self.read_begun: list[str] = []

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        if name.startswith("step-"):
            self.read_fully.append(name)
        return super().read(name, bytes_max)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        if name.startswith("step-"):
            self.read_begun.append(name)
        super().read_into(name, offset, buffer)


def _large(step: int, attempt: int = 1, state: State = State.VERIFIED, *, file: str = "") -> Manifest:
    """Return a manifest of a state with many tensors, without a file."""
    small = manifest_of(small_image(), step=step, attempt=attempt, state=state)
    entries = tuple(
        EntryRecord(name=f"archive/data/{number}", offset=0, nbytes=40, crc32=number * 7919)
        for number in range(_TENSORS)
    )
    tensors = tuple(
        TensorRecord(path=f"model/layers.{number}.weight", dtype="float32", shape=(10,), entry=number)
        for number in range(_TENSORS)
    )
    file = file or step_file_name(step, attempt=0 if attempt == 1 else attempt)
    return small.model_copy(update={"entries": entries, "tensors": tensors, "file": file})


@pytest.fixture
def store() -> CountedStore:
    """A run of the first attempt whose writer was of this version."""
    store = CountedStore()
    Lease.acquire(store).release()
    image = small_image()
    for step in range(1, _STEPS + 1):
        manifest = _large(step)
        store.objects[manifest_name(manifest.file)] = manifest.to_bytes()
        store.objects[manifest.file] = image
    return store


def _add(store: MemoryStore, manifest: Manifest) -> None:
    store.objects[manifest_name(manifest.file)] = manifest.to_bytes()
    store.objects[manifest.file] = small_image()


LOOKS: dict[str, Callable[[Catalog], object]] = {
    "get": lambda catalog: catalog.get().step,
    "newest_good": lambda catalog: getattr(catalog.newest_good(), "step", None),
    "highest_good_step": lambda catalog: catalog.highest_good_step(),
    "restore": lambda catalog: getattr(_restored_first(catalog), "step", None),
}


def _restored_first(catalog: Catalog) -> Candidate | None:
    store_listing, silent = StoreListing.open(catalog.store, LonePeers())
    assert silent is None
    return CandidateListing([], store_listing, LonePeers()).first()


@pytest.mark.parametrize("look", LOOKS)
def test_the_newest_good_one_costs_no_look_at_the_older_ones(store: CountedStore, look: str) -> None:
    Lease.acquire(store).release()  # the second attempt begins
    _add(store, _large(_STEPS + 1, 2, State.BAD))
    store.read_fully.clear()
    assert LOOKS[look](Catalog(store)) == _STEPS
    assert store.read_fully[0] == f"step-{_STEPS + 1:09d}-a002.json"
    assert len(store.read_fully) <= 4, "one, then two at once"
    assert store.read_begun == []


def test_manifests_are_never_all_held_at_once(store: CountedStore) -> None:
    one = Manifest.from_bytes(_large(1).to_bytes(), source="one")
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        kept = Manifest.from_bytes(one.to_bytes(), source="one")
        manifest_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
        del kept
        tracemalloc.reset_peak()
        before_bytes, _ = tracemalloc.get_traced_memory()
        steps = [item.step for item in Catalog(store).newest_first()]
        peak_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
    finally:
        tracemalloc.stop()
    assert steps == list(range(_STEPS, 0, -1))
    assert sorted(store.read_fully) == sorted(
        name for name in store.objects if name.endswith(".json") and "/" not in name
    )
    assert peak_bytes <= _MANIFESTS_HELD_MAX * manifest_bytes, f"{peak_bytes / manifest_bytes:.0f} manifests"


def test_attempts_of_a_run_of_older_versions_are_told_by_the_manifests_heads(store: CountedStore) -> None:
    """They gave later attempts the plain name where it was free."""
    for name in [name for name in store.objects if name.startswith(".holdfast/")]:
        del store.objects[name]
    _add(store, _large(50, 2, file=step_file_name(50)))
    assert Catalog(store).get().step == 50
    assert store.read_fully == [f"step-{50:09d}.json"], "whole only what is used"
    assert len(store.read_begun) == _STEPS
    store_listing, _ = StoreListing.open(store, LonePeers())
    first = CandidateListing([], store_listing, LonePeers()).first()
    assert first is not None
    assert (first.attempt, first.step) == (2, 50)


def test_a_manifest_that_another_tool_wrote_is_read_whole_for_its_attempt() -> None:
    store = MemoryStore()
    add_small(store, 1)
    add_small(store, 2)
    manifest = manifest_of(small_image(), step=1, attempt=3, run='a "quoted" run\\')
    _add(store, manifest)
    assert [item.step for item in Catalog(store).list()] == [1, 2]


def test_a_claim_says_that_names_tell_attempts_as_long_as_each_writer_did() -> None:
    store = MemoryStore()
    assert not plain_names_are_first(store, store.list()), "no claim"
    for _ in range(5):  # old claims are removed
        Lease.acquire(store).release()
        assert plain_names_are_first(store, store.list())
    assert claim_attempt(store, 6)
    assert plain_names_are_first(store, store.list())
    assert newest_of_store(store) == 6
    _claim_of_an_older_version(store, 7)
    assert not plain_names_are_first(store, store.list())
    Lease.acquire(store).release()
    assert not plain_names_are_first(store, store.list()), "what the older version wrote is still there"


def test_names_of_a_run_with_manifests_and_no_claim_do_not_tell_its_attempt() -> None:
    store = MemoryStore()
    add_small(store, 1, attempt=4)
    claim = Lease.acquire(store)
    assert claim.attempt == 5
    assert not plain_names_are_first(store, store.list())


def _claim_of_an_older_version(store: MemoryStore, attempt: int) -> None:
    mine = Identity.of_this_process()
    record = _LeaseRecord(
        attempt=attempt,
        write_id="w",
        host=mine.host,
        boot_id=mine.boot_id,
        pid_namespace=mine.pid_namespace,
        pid=mine.pid,
        started=mine.started,
        heartbeat_seconds=1.0,
        beat=0,
        released=True,
    )
    data = record.to_bytes()
    assert b'"named":false' in data, "an older version does not have the field, which means the same"
    store.objects[_claim_name(attempt)] = data


@pytest.mark.parametrize("seed", range(40))
def test_lazy_candidates_come_in_the_order_of_a_full_listing(seed: int) -> None:
    dice = random.Random(seed)
    store, stored = MemoryStore(), list[StoreCandidate]()
    for number in range(dice.randrange(12)):
        attempt, step = dice.randint(1, 3), dice.randrange(9)
        state = dice.choice([State.VERIFIED, State.DURABLE, State.BAD])
        drift = "rank 1 differs" if dice.random() < 0.4 and state is State.DURABLE else ""
        file = step_file_name(step, attempt=dice.choice([0, attempt]) if number % 2 else attempt)
        made = manifest_of(small_image(), step=step, attempt=attempt, file=file, state=state, drift=drift)
        if dice.random() < 0.2:
            store.objects[manifest_name(file)] = b"?"
        else:
            _add(store, made)
    for number, item in enumerate(Catalog(store).list()):
        said = ("", 0) if item.manifest is None else (item.manifest.layout_digest, item.manifest.ranks)
        stored.append(StoreCandidate(number, *item.order, said[1], said[0], item.fault, item.drift))
    holders = [
        Holder(
            SliceKey(dice.randint(1, 3), dice.randrange(9), 2, "0" * 64, "job"),
            rank,
            rank,
            rank,
            0,
            "tier",
            "here",
        )
        for rank in range(2)
        for _ in range(dice.randrange(3))
    ]
    set_aside = [CheckpointId(dice.randint(1, 3), dice.randrange(9))] if seed % 3 == 0 else []
    store_listing, _ = StoreListing.open(store, LonePeers())
    in_turn = [*CandidateListing(holders, store_listing, LonePeers(), set_aside)]
    assert in_turn == [*skip_set_aside(candidates(holders, stored), set_aside)]
