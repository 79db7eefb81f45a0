"""The interval: rank 0's wish becomes the interval of all ranks."""

from __future__ import annotations

import pytest

from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from tests.unit.stager.bench import Bench

_WISH = wire.to_json({"every": 41, "after": 19, "why": "every 41 steps: because"})


def _all_here(bench: Bench, next_step: int) -> Frame:
    """Every rank answers the newest SAVE_EVERY with the step it comes to next; what is said then."""
    said = bench.port.told(Kind.SAVE_EVERY)[-1][1]
    for rank in range(2):
        bench.port.say(rank, Kind.HERE, step=next_step, arg=said.arg, body=b'{"step_seconds": 0.1}')
    bench.turn()
    return bench.port.told(Kind.SAVE_EVERY)[-1][1]


def test_a_wish_of_rank_0_becomes_an_interval_of_all(bench: Bench) -> None:
    bench.port.say(0, Kind.WISH, body=_WISH)
    bench.turn()
    assert [(rank, frame.step, frame.flags) for rank, frame in bench.port.told(Kind.SAVE_EVERY)] == [
        (0, 0, 0),
        (1, 0, 0),
    ]
    proposed = _all_here(bench, 21)
    assert (proposed.step, proposed.flags) == (26, 0), "half a second of steps ahead"
    appointed = _all_here(bench, 22)
    assert (appointed.step, appointed.flags, appointed.arg) == (26, 1, proposed.arg)
    assert wire.json_body(appointed) == {"first": 60, "every": 41}
    (event,) = bench.happened("interval")
    assert (event["at_step"], event["first_step"], event["every"], event["every_before"]) == (
        26,
        60,
        41,
        None,
    )


def test_a_lost_rank_makes_the_interval_loose(bench: Bench) -> None:
    bench.port.say(0, Kind.WISH, body=_WISH)
    bench.turn()
    _all_here(bench, 21)
    _all_here(bench, 22)
    bench.port.seen.lost.append((1, "rank 1: its process is dead"))
    bench.turn()
    assert [(rank, frame.flags) for rank, frame in bench.port.told(Kind.SAVE_EVERY)][-1] == (0, 3)
    assert bench.happened("interval_loose")


@pytest.mark.parametrize(
    ("rank", "kind", "body"),
    [
        (1, Kind.WISH, _WISH),
        (0, Kind.WISH, b"{}"),
        (0, Kind.WISH, b"[]"),
        (0, Kind.HERE, b'{"step_seconds": "x"}'),
        (0, Kind.HERE, b'{"step_seconds": -1}'),
        (0, Kind.HERE, b'{"refusal": 7}'),
    ],
)
def test_an_invalid_wish_drops_its_sender(bench: Bench, rank: int, kind: Kind, body: bytes) -> None:
    bench.port.say(rank, kind, body=body)
    bench.turn()
    assert bench.port.told(Kind.REFUSED)
    assert not bench.port.told(Kind.SAVE_EVERY)
