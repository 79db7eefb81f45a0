"""The number of stagers for an interval, computed from constants: made up here, measured in docs/scaling.md."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.stagers_by_interval import StagerLimits, checkpoint_seconds, stagers_by_interval

GIB = float(1 << 30)
# A card of 10 GiB/s, a thread of 4 GiB/s that receives half of the time, connections of 8 GiB/s in total.
ONE = StagerLimits(10 * GIB, 0.125 / GIB, 2.0**-11, float(1 << 22), 128, GIB / 16)
IMAGE = 400 * GIB


def test_the_slowest_part_of_a_stager_is_its_rate() -> None:
    assert ONE.rates == {"card": 10 * GIB, "stager's thread": 4 * GIB, "connections to the store": 8 * GIB}
    assert (ONE.slowest, ONE.rate) == ("stager's thread", 4 * GIB)
    narrow, few = replace(ONE, card_rate=GIB), replace(ONE, connections=8)
    assert (narrow.slowest, narrow.rate) == ("card", GIB)
    assert (few.slowest, few.rate) == ("connections to the store", GIB / 2)


def test_small_frames_cost_the_thread_more() -> None:
    assert replace(ONE, frame_bytes=ONE.frame_bytes / 3).rate == 2 * GIB


def test_shares_divide_the_bytes_and_not_the_commit() -> None:
    assert [checkpoint_seconds(IMAGE, count, ONE, 5) for count in (1, 2, 4)] == [105, 55, 30]


def test_the_fewest_stagers_that_are_done_within_the_interval() -> None:
    assert stagers_by_interval(IMAGE, 105, ONE, 5) == 1
    assert stagers_by_interval(IMAGE, 104.9, ONE, 5) == 2
    assert stagers_by_interval(IMAGE, 30, ONE, 5) == 4
    assert stagers_by_interval(IMAGE, 30, ONE, 0) == 4
    assert stagers_by_interval(IMAGE, 25, ONE, 0) == 4, "without the commit's seconds"


def test_an_interval_that_no_number_of_stagers_reaches() -> None:
    assert stagers_by_interval(IMAGE, 5, ONE, 5) is None, "the commit alone takes as long"
    assert stagers_by_interval(IMAGE, 1, ONE, 0) is None, "64 stagers need 1.56 s"
