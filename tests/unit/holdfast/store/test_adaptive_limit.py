"""The number of connections found, against simulated stores: limited by connection, in total, or disturbed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from holdfast.store.concurrency import AdaptiveLimit

_PART_BYTES = 16 << 20
_MB = 1e6


def _play(
    found: AdaptiveLimit,
    speed_of: Callable[[int], float],
    *,
    requests: int = 3000,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[list[int], float]:
    """Requests one after the other in each lane; `speed_of`: bytes a second in all by how many run.

    Returns the width at each end, and the bytes a second of the last half.
    """
    dice, now = random.Random(seed), 0.0
    running: list[tuple[float, float, float]] = []  # bytes left, share of the speed, began
    widths: list[int] = []
    half_at, half_bytes = 0.0, 0
    while len(widths) < requests:
        while len(running) < found.width:
            running.append((_PART_BYTES, 1 + noise * dice.uniform(-1, 1), now))
        each = speed_of(len(running)) / len(running)
        seconds = min(left / (each * share) for left, share, _ in running)
        now += seconds
        running = [(left - each * share * seconds, share, began) for left, share, began in running]
        first = min(range(len(running)), key=lambda at: running[at][0])
        began = running[first][2]
        found.record_finished(began, now, _PART_BYTES, full=len(running) >= found.width)
        del running[first]
        widths.append(found.width)
        if len(widths) == requests // 2:
            half_at, half_bytes = now, 0
        half_bytes += _PART_BYTES
    return widths, half_bytes / max(now - half_at, 1e-9)


def _by_connection(each: float, in_all: float = float("inf")) -> Callable[[int], float]:
    return lambda width: min(width * each, in_all)


@pytest.mark.parametrize("in_all", [20, 45, 83, 100, 150, 300, 500, 640, 10_000])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_limit_reaches_nine_tenths_of_what_the_store_gives(in_all: float, noise: float) -> None:
    speed_of = _by_connection(5 * _MB, in_all * _MB)
    widths, speed = _play(AdaptiveLimit(8, minimum=2, maximum=128), speed_of, noise=noise)
    assert speed >= 0.9 * min(in_all, 640) * _MB
    assert max(widths) <= 128
    most = max(2, in_all / 5)
    kept = sorted(widths[len(widths) // 2 :])[len(widths) // 4]
    assert kept <= 2.2 * most, "no more than bring something"


def test_where_connections_are_the_limit_all_of_them_run_after_a_few_requests_each() -> None:
    widths, _ = _play(AdaptiveLimit(8, minimum=2, maximum=128), _by_connection(5 * _MB), requests=200)
    assert widths.index(128) <= 80
    assert widths[-1] == 128


def test_where_one_connection_takes_all_there_are_few() -> None:
    widths, speed = _play(AdaptiveLimit(8, minimum=2, maximum=128), _by_connection(1000 * _MB, 1000 * _MB))
    assert sorted(widths)[len(widths) // 2] == 2
    assert speed >= 0.9 * 1000 * _MB


def _crowded(width: int) -> float:
    """Best at 16."""
    return 400 * _MB * (width / 16) / (1 + (width / 16) ** 2)


def test_where_more_connections_make_it_slower_it_goes_back() -> None:
    widths, speed = _play(
        AdaptiveLimit(8, minimum=2, maximum=128),
        lambda width: 400 * _MB / (1 + (width / 16) ** 2) * width / 16,
    )
    assert speed >= 0.85 * 200 * _MB
    assert 8 <= sorted(widths)[len(widths) // 2] <= 32


def test_a_store_that_has_more_to_give_later_is_found_out() -> None:
    requests = 0

    def speed_of(width: int) -> float:
        nonlocal requests
        requests += 1
        return min(width * 5, 40 if requests < 2000 else 600) * _MB

    widths, speed = _play(AdaptiveLimit(8, minimum=2, maximum=128), speed_of, requests=8000)
    assert max(widths[1000:2000]) <= 16
    assert speed >= 0.9 * 600 * _MB


def test_requests_that_tell_nothing_of_the_width_leave_it() -> None:
    found = AdaptiveLimit(8, minimum=2, maximum=128)
    for number in range(1000):
        found.record_finished(float(number), number + 1.0, _PART_BYTES, full=False)
        found.record_finished(float(number), float(number), _PART_BYTES, full=True)
    assert found.width == 8


def test_a_request_that_began_beside_another_number_is_not_counted() -> None:
    found = AdaptiveLimit(4, minimum=2, maximum=128)
    for _ in range(4):
        found.record_finished(1.0, 2.0, _PART_BYTES, full=True)
    assert found.width == 16
    for _ in range(1000):
        found.record_finished(1.0, 9.0, _PART_BYTES, full=True)
    assert found.width == 16


def test_the_limit_stays_within_its_bounds() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        found = AdaptiveLimit(3, minimum=2, maximum=10)
        now = 0.0
        for _ in range(2000):
            now += 1
            found.record_finished(now - 0.5, now, dice.randrange(1, _PART_BYTES), full=True)
            assert 2 <= found.width <= 10


def test_bounds_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="minimum <= start"):
        AdaptiveLimit(1, minimum=2, maximum=4)
