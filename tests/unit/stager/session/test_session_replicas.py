"""The session when the ranks' replicas differ: it reports that and stages the step, or fails the step."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.entries import REPLICATED, Entry, TensorInfo
from holdfast.image.layout import Layout
from holdfast.image.replicas import OnDivergence, encode
from holdfast.image.save_record import SaveRecord
from holdfast.wire.frames import Kind
from stager.session.session import Session
from stager.session.session_messages import (
    Abort,
    Action,
    Began,
    Diverged,
    Done,
    Event,
    GrantCredit,
    MarkStaged,
    NewLayout,
    Offer,
    Received,
    SendMessage,
    Sent,
)

CHUNK = 4096
LAYOUT = Layout(
    4 * CHUNK,
    CHUNK,
    3,
    (Entry("w", 64, 8192, REPLICATED, ()), Entry("b", 9000, 400, REPLICATED, ())),
    (TensorInfo("model/w", "float32", (2048,), 0), TensorInfo("model/b", "float32", (100,), 1)),
)


class Driver:
    """Takes checkpoints through a session one by one, with given fingerprints for each rank."""

    def __init__(self, on_divergence: OnDivergence) -> None:
        self.session = Session(
            ranks=3,
            free_slots=range(16),
            offer_seconds_max=60,
            chunk_seconds_max=120,
            on_divergence=on_divergence,
        )
        self.take(NewLayout(LAYOUT))

    def take(self, event: Event) -> list[Action]:
        return self.session.handle(event, 0.0)

    def checkpoint(self, step: int, fingerprints: list[Any], *, early: int = -1) -> list[Action]:
        """Rank `early` is done before the others have offered."""
        granted: list[GrantCredit] = []
        for rank in sorted(range(3), key=lambda rank: rank != early):
            actions = self.take(Offer(rank, step, LAYOUT.digest, SaveRecord(saved_at_unix=1.0)))
            if rank == early:
                self.take(Done(rank, step, fingerprints=fingerprints[rank]))
            granted += [action for action in actions if isinstance(action, GrantCredit)]
        granted += [action for action in self.take(Began(step, 1)) if isinstance(action, GrantCredit)]
        for credit in granted:
            nbytes = sum(extent.nbytes for extent in LAYOUT.pieces(credit.chunk, credit.rank))
            self.take(Sent(credit.rank, step, credit.chunk, nbytes, 0))
            self.take(Received(credit.rank, step, credit.chunk))
        actions = []
        for rank, crcs in enumerate(fingerprints):
            if rank == early:
                continue
            actions += self.take(Done(rank, step, SaveRecord(copy_seconds=1.0), crcs))
        return actions


SAME, OTHER = encode([1, 2]), encode([1, 3])


def test_warn_says_it_once_and_stages() -> None:
    driver = Driver("warn")
    said, staged = driver.checkpoint(1, [SAME, OTHER, SAME])
    assert isinstance(said, Diverged)
    assert (said.step, said.body["drifted"]) == (1, {"1": ["model/b"]})
    assert isinstance(staged, MarkStaged)
    assert all("replicas" not in record.to_json() for record in staged.records.values()), (
        "it is not for the manifest"
    )
    assert [type(action) for action in driver.checkpoint(2, [SAME, OTHER, SAME])] == [MarkStaged]


def test_refuse_fails_the_step_for_all_and_the_next_one_is_looked_at_again() -> None:
    driver = Driver("refuse")
    for step in (1, 2):
        abort, tell = driver.checkpoint(step, [SAME, SAME, OTHER])
        assert isinstance(abort, Abort)
        assert isinstance(tell, SendMessage)
        assert (tell.kind, tell.rank, tell.body["code"]) == (Kind.FAILED, None, "state")
        assert "rank 2 differs from most ranks in model/b" in tell.body["message"]
    assert [type(action) for action in driver.checkpoint(3, [SAME, SAME, SAME])] == [MarkStaged]


@pytest.mark.parametrize("policy", ["warn", "refuse", "off"])
def test_no_difference_no_word(policy: OnDivergence) -> None:
    assert [type(action) for action in Driver(policy).checkpoint(1, [SAME] * 3)] == [MarkStaged]


def test_off_does_not_even_read_them() -> None:
    assert [type(action) for action in Driver("off").checkpoint(1, [SAME, OTHER, "noise"])] == [MarkStaged]


def test_ranks_that_send_none_are_not_compared() -> None:
    assert [type(action) for action in Driver("refuse").checkpoint(1, [None, OTHER, None])] == [MarkStaged]
    assert [type(action) for action in Driver("warn").checkpoint(1, [SAME, OTHER, None])] == [
        Diverged,
        MarkStaged,
    ]


def test_noise_is_the_ranks_fault_and_changes_nothing() -> None:
    driver = Driver("warn")
    with pytest.raises(ProtocolError, match="DONE: replicas"):
        driver.checkpoint(1, [SAME, "AAAA"])
    driver.take(Done(1, 1, fingerprints=SAME))
    assert [type(action) for action in driver.take(Done(2, 1, fingerprints=SAME))] == [MarkStaged]


def test_fingerprints_that_come_before_the_layout_is_known_are_compared() -> None:
    driver = Driver("refuse")
    abort, tell = driver.checkpoint(1, [SAME, SAME, OTHER], early=2)
    assert isinstance(abort, Abort)
    assert isinstance(tell, SendMessage)
    assert "rank 2 differs from most ranks in model/b" in tell.body["message"]


def test_noise_that_comes_before_the_layout_is_known_fails_the_step() -> None:
    driver = Driver("warn")
    driver.take(Offer(2, 1, LAYOUT.digest, SaveRecord()))
    driver.take(Done(2, 1, fingerprints="AAAA"))
    driver.take(Offer(0, 1, LAYOUT.digest, SaveRecord()))
    (*_, tell) = driver.take(Offer(1, 1, LAYOUT.digest, SaveRecord()))
    assert isinstance(tell, SendMessage)
    assert tell.kind is Kind.FAILED
