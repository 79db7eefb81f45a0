"""Notices: all ranks save at one step, whichever rank got the notice."""

from __future__ import annotations

import time

import pytest

from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from tests.unit.stager.bench import Bench


def _notice(seconds_left: float | None, kind: str = "terminate") -> bytes:
    return wire.to_json(
        {"kind": kind, "seconds_left": seconds_left, "source": "aws", "said_by": "", "rank": -1}
    )


def _answer_all(bench: Bench, *next_steps: int) -> Frame:
    """Every rank answers the newest SAVE_AT with the step it comes to next; what is said then."""
    said = bench.port.told(Kind.SAVE_AT)[-1][1]
    for rank, step in enumerate(next_steps):
        bench.port.say(rank, Kind.AT, step=step, arg=said.arg, body=wire.to_json({"step_seconds": 0.05}))
    bench.turn()
    return bench.port.told(Kind.SAVE_AT)[-1][1]


def test_a_notice_brings_all_ranks_to_one_step_and_says_when_it_is_staged(bench: Bench) -> None:
    told_at = time.time()
    bench.port.say(1, Kind.NOTICE, body=_notice(100.0))
    bench.turn()
    assert [(rank, frame.step, frame.flags) for rank, frame in bench.port.told(Kind.SAVE_AT)] == [
        (0, 0, 0),
        (1, 0, 0),
    ]
    proposed = _answer_all(bench, 40, 41)
    assert proposed.step > 41
    assert proposed.flags == 0
    appointed = _answer_all(bench, 41, 42)
    body = wire.json_body(appointed)
    assert (appointed.step, appointed.arg, appointed.flags, body["save"]) == (
        proposed.step,
        proposed.arg,
        1,
        True,
    )
    assert (body["notice"]["rank"], body["factor"]) == (1, 1)
    assert told_at + 100 <= time.time() + body["notice"]["seconds_left"]
    assert body["notice"]["seconds_left"] <= 100
    bench.offer_all(step=appointed.step)
    bench.flusher.send("began", attempt=3, step=appointed.step, part_chunks=1)
    bench.turn()
    bench.pay_all(step=appointed.step)
    (staged,) = bench.happened("emergency_staged")
    assert staged["saved_step"] == appointed.step
    assert 0 < staged["seconds_left"] < 100
    assert [line["told_rank"] for line in bench.happened("notice")] == [1]


def test_a_rank_that_declines_the_step_is_asked_for_another(bench: Bench) -> None:
    bench.port.say(0, Kind.NOTICE, body=_notice(None, "rebalance"))
    bench.turn()
    _answer_all(bench, 5, 5)
    appointed = _answer_all(bench, 5, 5)
    bench.port.say(0, Kind.DECLINE, step=appointed.step, body=b"busy: still being sent")
    bench.turn()
    asked = bench.port.told(Kind.SAVE_AT)[-1][1]
    assert (asked.flags, asked.arg) == (0, appointed.arg + 1)
    assert _answer_all(bench, appointed.step + 1, appointed.step).step > appointed.step


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.NOTICE, b"{}"),
        (Kind.NOTICE, b'{"kind": "dance"}'),
        (Kind.AT, b'{"step_seconds": "x"}'),
        (Kind.AT, b'{"step_seconds": -1}'),
        (Kind.AT, b'{"step_seconds": NaN}'),
        (Kind.AT, b"[]"),
    ],
)
def test_a_notice_that_is_none_drops_its_sender_alone(bench: Bench, kind: Kind, body: bytes) -> None:
    bench.port.say(1, kind, body=body)
    bench.turn()
    assert [rank for rank, _ in bench.port.told(Kind.REFUSED)] == [1]
    assert bench.service.lost_ranks == {1}


def test_an_answer_that_nobody_asked_for_changes_nothing(bench: Bench) -> None:
    bench.port.say(1, Kind.AT, step=7, arg=3, body=b"{}")
    bench.turn()
    assert not bench.port.told(Kind.SAVE_AT)
    assert not bench.service.lost_ranks
