"""Trainers are welcomed when checkpoints of earlier jobs are durable, complete in the ring, or timed out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from holdfast.ring.ring import Ring
from stager.previous_jobs import PreviousJobs, inherited_steps
from tests.support.images import made_up

DIGEST = "0" * 64


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    with Ring.create(directory, chunk_bytes=4096, ring_chunks=8, attempt=2) as ring:
        yield ring


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _left(ring: Ring, attempt: int, step: int, state: Literal["receiving", "staged"]) -> None:
    ring.write_checkpoint(attempt, step, state, DIGEST, {})


def test_a_staged_one_is_waited_for(ring: Ring) -> None:
    previous_jobs = PreviousJobs(10, clock=Clock())
    _left(ring, 1, 7, "staged")
    assert not previous_jobs.may_restore(ring, 2)
    assert not previous_jobs.may_restore(ring, 2)
    ring.remove_checkpoint(1, 7)
    assert previous_jobs.may_restore(ring, 2)


def test_a_partial_one_and_this_jobs_own_are_not(ring: Ring) -> None:
    _left(ring, 1, 7, "receiving")
    _left(ring, 2, 8, "staged")
    assert PreviousJobs(10, clock=Clock()).may_restore(ring, 2)


def test_steps_of_this_attempt_were_left_by_the_stager_before(ring: Ring) -> None:
    for attempt, step, state in ((1, 6, "staged"), (2, 7, "receiving"), (2, 8, "staged")):
        _left(ring, attempt, step, state)  # type: ignore[arg-type]
    assert inherited_steps(ring, 2) == {7: False, 8: True}


def test_an_unreadable_checkpoint_file_is_not_waited_for(ring: Ring) -> None:
    (ring.directory / "checkpoint-1-7.json").write_bytes(b"{")
    (ring.directory / "checkpoint-1-7.json").chmod(0o600)
    assert PreviousJobs(10, clock=Clock()).may_restore(ring, 2)


def test_the_wait_ends_and_says_what_was_not_waited_for(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    previous_jobs = PreviousJobs(10, clock=clock)
    _left(ring, 1, 7, "staged")
    assert not previous_jobs.may_restore(ring, 2)
    clock.now = 9.9
    assert not previous_jobs.may_restore(ring, 2)
    clock.now = 10.0
    with caplog.at_level(logging.ERROR):
        assert previous_jobs.may_restore(ring, 2)
    assert "step 7" in caplog.text
    assert previous_jobs.may_restore(ring, 2), "once is enough: what comes later is not held up again"


def test_a_step_whole_in_the_ring_is_not_waited_for(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    made = made_up(3, entries=10, chunk_bytes=4096, ranks=2, entry_bytes_max=6000)
    digest, chunks = ring.put_layout(made.layout), made.layout.chunks
    assert 1 < chunks < 8
    for chunk in range(chunks):
        ring.mark_filling(chunk, 1, 7, chunk)
        ring.mark_full(chunk, made.sources(chunk), made.layout.chunk_extent(chunk).nbytes)
    ring.write_checkpoint(1, 7, "staged", digest, {})
    ring.free(0)  # in the store already, and not filled again
    assert PreviousJobs(10, clock=Clock()).may_restore(ring, 2)
    _left(ring, 1, 8, "staged")
    assert not PreviousJobs(10, clock=Clock()).may_restore(ring, 2), "of another one there is nothing"
    ring.remove_checkpoint(1, 8)
    ring.mark_filling(0, 1, 9, 0)  # its room is taken: now the store must have it
    assert not PreviousJobs(10, clock=Clock()).may_restore(ring, 2)
    ring.remove_checkpoint(1, 9)
    share = PreviousJobs(10, share=lambda layout: range(1, layout.chunks), clock=Clock())
    caplog.clear()
    assert share.may_restore(ring, 2), "another stager has the first chunk"
    assert "this stager's share of step 7" in caplog.text
    assert "if the other stagers have staged theirs" in caplog.text
