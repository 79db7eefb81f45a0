"""Every visible change, and every retry of one, first checks the claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease
from holdfast.crc import crc32
from holdfast.errors import FencedError, StoreError
from holdfast.store.base import Store
from holdfast.store.guarded import guarded
from holdfast.store.retrying import RetryBudget, Retrying
from tests.support.memory_store import MemoryStore

DATA = b"x" * 100
NAME = "step-000000001.pt"


def published(store: Store) -> None:
    upload = store.begin(NAME, nbytes=len(DATA), chunk_bytes=128, write_id="w")
    upload.write_part(0, [memoryview(DATA)], crc32(DATA))
    upload.publish()


ACTS: dict[str, Callable[[Store], object]] = {
    "publish": published,
    "create": lambda store: store.create("step-000000001.json", DATA),
    "write": lambda store: store.write("step-000000001.json", DATA),
    "delete": lambda store: store.delete("step-000000001.json"),
}


def taken_over(store: MemoryStore) -> None:
    Lease.acquire(store, takeover=True, identity=Identity("other", "b", "n", 7, 1))


@pytest.mark.parametrize("act", ACTS)
def test_a_fenced_writer_does_nothing_that_others_see(act: str) -> None:
    store = MemoryStore()
    claim = Lease.acquire(store)
    ours = guarded(Retrying(store), lambda: claim.check(without_retries=True))
    taken_over(store)
    before = dict(store.objects)
    with pytest.raises(FencedError, match="took the run over"):
        ACTS[act](ours)
    assert store.objects == before


@pytest.mark.parametrize("act", ACTS)
def test_a_writer_that_is_replaced_between_two_tries_makes_no_further_one(act: str) -> None:
    """The store fails for a while, the call is repeated; meanwhile another writer takes the run over."""
    store = MemoryStore()
    claim = Lease.acquire(store)
    tries = 0

    def fail(what: str, name: str) -> None:
        nonlocal tries
        if what == act and name.startswith("step-"):
            tries += 1
            raise StoreError("the link is cut", retriable=True)

    store.before = fail

    def wait(_seconds: float) -> None:
        if tries == 2:
            store.before = lambda what, name: None  # the link is back, and would take the write
            taken_over(store)

    retrying = Retrying(store, budget=RetryBudget(attempts_max=9), sleep=wait)
    ours = guarded(retrying, lambda: claim.check(without_retries=True))
    store.objects["step-000000001.json"] = b"as it was"
    if act == "create":
        del store.objects["step-000000001.json"]
    with pytest.raises(FencedError):
        ACTS[act](ours)
    assert tries == 2
    assert NAME not in store.objects
    assert store.objects.get("step-000000001.json") == (None if act == "create" else b"as it was")
    assert retrying.failures(), "both count together"


def test_a_store_that_fails_in_the_look_is_tried_again_like_any_other_failure() -> None:
    store = MemoryStore()
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise StoreError("no answer", retriable=True)

    ours = guarded(Retrying(store, sleep=lambda _: None), check)
    ours.write("step-000000001.json", DATA)
    assert looks == 3
    assert store.objects["step-000000001.json"] == DATA


def test_names_that_only_their_writer_uses_need_no_look() -> None:
    def check() -> None:
        raise AssertionError

    store = MemoryStore()
    ours = guarded(store, check)
    ours.write(".holdfast/intent-w.json", DATA)
    ours.delete(".holdfast/intent-w.json")
    ours.begin(NAME, nbytes=10, chunk_bytes=10, write_id="w").abort()
    with pytest.raises(AssertionError):
        ours.sweep()
