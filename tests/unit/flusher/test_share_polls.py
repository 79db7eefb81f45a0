"""The times at which a flusher polls for the work of others, and when polling stops, on a simulated clock."""

from __future__ import annotations

import pytest

from flusher.share_polls import PollAgain, SharePolls, pause_seconds
from flusher.steps import AwaitPublished, Open
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.shares import ShareNumber
from tests.support.images import made_up

KEY = CheckpointId(2, 5)
LEAD, MEMBER = ShareNumber(0, 2), ShareNumber(1, 2)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def times(seconds: float, near: float | None) -> list[float]:
    """When a job looks that began at 0, until `seconds`."""
    found = [0.0]
    while found[-1] < seconds:
        found.append(found[-1] + pause_seconds(found[-1], 0.0, near))
    return found


@pytest.mark.parametrize("waited", [1.0, 3.0, 60.0])
def test_a_record_of_a_share_that_is_all_there_is_seen_a_tenth_late_at_most(waited: float) -> None:
    seen = times(waited, 0.0)[-1]
    assert seen - waited <= max(0.05, 0.1 * waited)


def test_looks_of_a_long_wait_are_few() -> None:
    assert len(times(3.0, None)) <= 12
    assert len(times(3.0, 0.0)) <= 31
    assert len(times(600.0, 0.0)) <= 120


def test_a_look_before_the_own_share_is_there_does_not_make_the_next_one_late() -> None:
    assert pause_seconds(30.0, 0.0, None) == 2.0
    assert pause_seconds(30.0, 0.0, 30.0) == 0.05
    assert pause_seconds(30.0, 29.0, 20.0) == pytest.approx(0.1), "counted from its own first look"


def test_a_share_that_is_all_there_is_looked_for_at_once() -> None:
    clock = Clock()
    looks = SharePolls(MEMBER, clock)
    looked: list[float] = []
    looks.put(PollAgain(AwaitPublished(KEY), "", 70.0), lambda: looked.append(clock.now))
    looks.put(PollAgain(AwaitPublished(CheckpointId(2, 6)), "", 70.0), lambda: looked.append(-1.0))
    assert looks.wait_seconds == 2.0
    looks.on_share_complete(KEY)
    looks.run_due()
    assert looked == [100.0]
    looks.put(PollAgain(AwaitPublished(KEY), "", 70.0), lambda: None)
    assert looks.wait_seconds == pytest.approx(0.05)
    looks.forget(KEY)
    looks.put(PollAgain(AwaitPublished(KEY), "", 70.0), lambda: None)
    assert looks.wait_seconds == pytest.approx(0.05), "the one before is due first"


@pytest.mark.parametrize(("share", "seconds"), [(LEAD, 600.0), (MEMBER, 900.0)])
def test_the_lead_gives_up_before_those_that_wait_for_it(share: ShareNumber, seconds: float) -> None:
    clock = Clock()
    looks, item = SharePolls(share, clock), PollAgain(AwaitPublished(KEY), "the first stager", 100.0)
    clock.now = 99.0 + seconds
    assert looks.timeout_error(item, 2) is None
    clock.now += 1.0
    assert f"has waited {seconds:.0f} s for the first stager" in str(looks.timeout_error(item, 2))


def test_an_upload_of_an_earlier_job_is_waited_for_from_the_next_job_on() -> None:
    clock = Clock()
    index = LayoutIndex(made_up(1, entries=2, chunk_bytes=4096, ranks=1, entry_bytes_max=9).layout)
    looks, item = SharePolls(MEMBER, clock), PollAgain(Open(KEY, index), "the first stager", 100.0)
    clock.now = 200.0
    assert looks.timeout_error(item, 2) is None
    looks.begin_attempt()
    clock.now = 229.0
    assert looks.timeout_error(item, 3) is None
    clock.now = 230.0
    assert looks.timeout_error(item, 3) is not None
