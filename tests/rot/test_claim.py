"""A byte of a claim flips: no process trusts the damaged claim. The owner stops with a named error; others skip it."""

from __future__ import annotations

import logging

import pytest

from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease
from holdfast.errors import FencedError
from tests.rot.flips import COUNT, flips
from tests.support.memory_store import MemoryStore

NAME = ".holdfast/writer-000001.json"


def _no_sleep(_: float) -> None:
    raise AssertionError("nothing to wait for in the same place")


def test_every_flip_is_seen_by_owner_and_successor(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    owner = Lease.acquire(store)
    owner.check()
    whole = store.objects[NAME]
    seen = 0
    for flip in flips("claim", len(whole)):
        store.objects = {NAME: flip.applied(whole)}
        with pytest.raises(FencedError, match=r"attempt|claim"):
            owner.check()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="holdfast.claim"):
            # This process is the living owner, so only unreadable claims are skipped.
            successor = Lease.acquire(store, sleep=_no_sleep, identity=Identity.of_this_process())
        assert successor.attempt == 2
        assert "writer-000001.json: damaged claim" in caplog.text
        seen += 1
    assert seen == COUNT
    store.objects = {NAME: whole}
    with pytest.raises(FencedError, match="owns this run"):
        Lease.acquire(store, sleep=_no_sleep)
