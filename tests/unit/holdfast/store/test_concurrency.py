"""ConcurrencyLimit: never more requests at once than allowed, and a user's setting is obeyed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flusher.workers import Workers
from holdfast.store.concurrency import REQUESTS_MAX, AdaptiveLimit, ConcurrencyLimit, read_limit, write_limit


def test_never_more_at_once_than_there_are_lanes() -> None:
    limit, lock = ConcurrencyLimit(3), threading.Lock()
    running, most = 0, 0

    def request(_: int) -> None:
        nonlocal running, most
        with limit.request():
            with lock:
                running += 1
                most = max(most, running)
            with lock:
                running -= 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(request, range(500)))
    assert 1 <= most <= 3


def test_a_set_width_is_kept_and_only_s3_is_measured() -> None:
    for way in (write_limit, read_limit):
        assert [way(url, 7).width for url in ("/run", "s3://bucket/run")] == [7, 7]
        assert way("/run").maximum == way("/run").width == 2
        assert way("s3://bucket/run").maximum == REQUESTS_MAX
        assert way("gs://bucket/run").maximum <= 4


def test_a_request_that_failed_counts_nothing() -> None:
    found, time = AdaptiveLimit(2, minimum=1, maximum=8), [0.0]

    def clock() -> float:
        time[0] += 1
        return time[0]

    limit = ConcurrencyLimit(8, found, clock)
    for _ in range(100):
        with pytest.raises(OSError, match="lost"), limit.request():
            raise OSError("lost")
    assert limit.width == 2


def test_workers_run_the_most_urgent_first_in_as_many_lanes_as_there_are() -> None:
    go, done, order = threading.Event(), threading.Event(), list[int]()
    workers = Workers("test", 4, ConcurrencyLimit(1))

    def first() -> None:
        go.wait(10)

    def job(number: int) -> int:
        order.append(number)
        if len(order) == 9:
            done.set()
        return 1

    workers.submit((0,), first)
    for number in (5, 3, 8, 1, 7, 2, 9, 4, 6):
        workers.submit((number,), lambda number=number: job(number))  # type: ignore[misc]
    go.set()
    assert done.wait(10)
    workers.stop()
    assert order == list(range(1, 10))


def test_workers_that_wait_for_a_lane_end_when_they_are_stopped() -> None:
    begun, go = threading.Event(), threading.Event()
    workers = Workers("test", 16, ConcurrencyLimit(2))

    def wait() -> None:
        begun.set()
        go.wait(10)

    for _ in range(40):
        workers.submit((0,), wait)
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    workers.stop()
    workers.submit((0,), wait)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]
