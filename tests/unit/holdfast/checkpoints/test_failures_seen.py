"""The failures of a run, counted from its claims: each attempt once, in any order of kills and wakes."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease, claim_attempt, read_failure_count
from holdfast.errors import FencedError
from holdfast.wire.failure_count import FailureCount
from tests.support.memory_store import MemoryStore

_DEAD = dataclasses.replace(Identity.of_this_process(), started=1)  # another process had this pid


class Run:
    """Attempts one after the other; each ends as the test says."""

    def __init__(self) -> None:
        self.store, self.now = MemoryStore(), 100.0

    def take(self) -> Lease:
        return Lease.acquire(self.store, identity=_DEAD, clock=lambda: self.now)

    def work(self, seconds: float) -> Lease:
        """An attempt that works for so long and shows it with a heartbeat."""
        lease = self.take()
        self.now += 1000.0  # starting, which does not count
        lease.begin_work()
        self.now += seconds
        lease.begin_work()
        lease.beat()
        return lease

    def seen(self) -> FailureCount:
        """By the next attempt."""
        return self.take().prior_failures


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_new_run_has_seen_nothing(run: Run) -> None:
    assert run.take().prior_failures == FailureCount()
    assert read_failure_count(run.store) == FailureCount()


def test_an_attempt_that_left_counts_with_its_time_alone(run: Run) -> None:
    lease = run.work(60.0)
    lease.end_work(lost=False)
    run.now += 500.0  # what is staged becomes durable
    lease.end_work(lost=True)
    lease.release()
    assert read_failure_count(run.store) == FailureCount(0, 60.0)
    assert run.seen() == FailureCount(0, 60.0)


def test_an_attempt_that_lost_a_rank_is_a_failure(run: Run) -> None:
    lease = run.work(60.0)
    lease.end_work(lost=True)
    lease.release()
    assert read_failure_count(run.store) == FailureCount(1, 60.0)
    assert run.seen() == FailureCount(1, 60.0)


def test_an_attempt_whose_writer_says_no_more_is_a_failure_for_the_next_only(run: Run) -> None:
    run.work(60.0)
    assert read_failure_count(run.store) == FailureCount(0, 60.0), "as far as anybody knows it runs"
    assert run.seen() == FailureCount(1, 60.0)


def test_a_claim_without_a_checkpoint_counts_as_nothing(run: Run) -> None:
    lease = run.take()
    run.now += 60.0
    lease.end_work(lost=True)
    lease.release()
    assert run.seen() == FailureCount()


def test_each_attempt_counts_once_however_many_claims_follow(run: Run) -> None:
    for number in range(6):  # more than claims are kept
        lease = run.work(10.0)
        lease.end_work(lost=number % 2 == 0)
        lease.release()
        run.take()  # who has died right after it had the claim
    assert run.seen() == FailureCount(3, 60.0)
    assert len([name for name in run.store.objects if "writer-" in name]) == 3


def test_a_writer_that_wakes_after_the_next_attempt_changes_nothing(run: Run) -> None:
    asleep = run.work(60.0)
    following = run.take()
    assert following.prior_failures == FailureCount(1, 60.0)
    run.now += 5000.0
    asleep.end_work(lost=False)
    with pytest.raises(FencedError):
        asleep.beat()
    asleep.release()
    assert run.seen() == FailureCount(1, 60.0)


def test_a_job_that_goes_on_under_the_next_flusher_was_not_lost(run: Run) -> None:
    run.work(60.0)
    lease = run.take()
    assert lease.prior_failures == FailureCount(1, 60.0)
    lease.resume_work()
    assert lease.prior_failures == FailureCount(0, 60.0)
    run.now += 30.0
    lease.beat()
    assert read_failure_count(run.store) == FailureCount(0, 90.0)
    lease.end_work(lost=True)
    lease.release()
    assert run.seen() == FailureCount(1, 90.0)


def test_only_a_job_that_was_counted_can_be_taken_back(run: Run) -> None:
    lease = run.work(60.0)
    lease.end_work(lost=True)
    lease.release()
    following = run.take()
    following.resume_work()
    assert following.prior_failures == FailureCount(1, 60.0)


def test_a_damaged_claim_loses_what_it_had_counted_and_no_more(run: Run) -> None:
    for _ in range(2):
        run.work(60.0)
    run.store.objects[".holdfast/writer-000002.json"] = b"torn"
    assert run.seen() == FailureCount(1, 60.0), "of the first; the second is not known"


def test_a_job_without_a_stager_keeps_the_count(run: Run) -> None:
    run.work(60.0)
    assert claim_attempt(run.store, 2)
    assert run.seen() == FailureCount(1, 60.0)


def test_the_count_waits_for_the_next_heartbeat(run: Run) -> None:
    lease, acts = run.work(60.0), list[str]()
    run.store.before = lambda act, _: acts.append(act)
    lease.begin_work()
    lease.end_work(lost=True)
    lease.resume_work()
    assert acts == [], "the store may not answer, and the flusher's loop must not wait for it"
    lease.beat()
    assert acts.count("write") == 1
