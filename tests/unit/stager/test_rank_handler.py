"""The stager's view of its ranks: protocol violations, silent ranks, and the time of each welcome."""

from __future__ import annotations

import pytest

from holdfast.ring.journal import SlotState
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.state_messages import Proposal
from holdfast.wire.welcome import Welcome
from tests.unit.stager.bench import LAYOUT, Bench


@pytest.mark.parametrize(
    "message",
    [
        b"x" * 100,
        wire.encode(Kind.CREDIT, attempt=3),
        wire.encode(Kind.SEALED, attempt=3, step=1),
        wire.encode(Kind.SENT, attempt=3, step=1, chunk=77),
        wire.encode(Kind.SENT, attempt=2, step=1),
        wire.encode(Kind.LAYOUT, attempt=3, body=LAYOUT.to_bytes()),
        wire.encode(Kind.OFFER, attempt=3, step=5, body=b"{}"),
    ],
    ids=["noise", "kind", "kind among ranks", "credit", "attempt", "layout of rank 1", "offer"],
)
def test_a_rank_that_breaks_the_protocol_is_dropped_and_told(bench: Bench, message: bytes) -> None:
    bench.offer_all()
    bench.port.seen.messages.append((1, message))
    bench.turn()
    ((rank, refused),) = bench.port.told(Kind.REFUSED)
    assert rank == 1
    assert wire.json_body(refused)["code"] == "protocol"
    failed = bench.port.told(Kind.FAILED)
    assert [rank for rank, _ in failed] == [0], "the other one is told that the checkpoint is lost"
    assert "rank 1 broke the protocol" in wire.json_body(failed[0][1])["message"]
    bench.port.say(1, Kind.OFFER, step=2, body=b"{}")
    bench.turn()
    assert len(bench.port.told(Kind.REFUSED)) == 1, "it is not listened to any more"


def test_a_proposal_that_cannot_be_read_is_refused_and_the_session_goes_on(bench: Bench) -> None:
    for _ in range(2):
        for rank in range(2):
            bench.port.seen.messages.append((rank, wire.encode(Kind.PROPOSE, attempt=3, body=b"zzz")))
        bench.turn()
    refused = bench.port.told(Kind.REFUSED)
    assert sorted(rank for rank, _ in refused) == [0, 0, 1, 1], "all hear it, each time"
    assert all("cannot be unpacked" in wire.json_body(frame)["message"] for _, frame in refused)
    bench.offer_all()
    assert bench.port.credits(), "checkpoints are taken"


def test_a_payload_of_another_size_drops_its_rank(bench: Bench) -> None:
    bench.offer_all()
    credit = next(credit for credit in bench.port.credits() if credit[0] == 1)
    bench.port.pay(*credit, short_bytes=1)
    bench.turn()
    assert "payload of" in wire.json_body(bench.port.told(Kind.REFUSED)[0][1])["message"]


def _say_hello(bench: Bench, *ranks: int) -> None:
    for rank in ranks or range(2):
        body = wire.to_json({"version": wire.VERSION, "pid": 100 + rank, "host": f"spot-{rank}"})
        bench.port.say(rank, Kind.HELLO, attempt=0, body=body)
    bench.turn()


def _pass(bench: Bench, seconds: int, *, alive: tuple[int, ...]) -> None:
    """Let time pass while only the `alive` ranks answer the stager's heartbeats."""
    for _ in range(2 * seconds):
        bench.now += 0.5
        for rank in alive:
            bench.port.say(rank, Kind.BEAT)
        bench.service._poll_once()


def _told_but_beats(bench: Bench, rank: int) -> list[Kind]:
    return [frame.kind for to, frame in bench.port.sent if to == rank and frame.kind is not Kind.BEAT]


def test_a_rank_that_comes_while_another_one_trains_hears_welcome_first(empty_bench: Bench) -> None:
    bench, port = empty_bench, empty_bench.port
    _say_hello(bench, 0)
    port.say(0, Kind.DECLINE, step=7, body=b"this rank had lost the stager")
    notice = {"kind": "terminate", "seconds_left": 60, "source": "aws", "said_by": "", "rank": -1}
    port.say(0, Kind.NOTICE, body=wire.to_json(notice))
    bench.turn()
    told = [Kind.WELCOME, Kind.DECLINED, Kind.SAVE_AT]
    assert _told_but_beats(bench, 0) == told
    assert _told_but_beats(bench, 1) == []
    _say_hello(bench, 1)
    assert _told_but_beats(bench, 1) == told
    port.say(0, Kind.DECLINE, step=9, body=b"busy")
    bench.turn()
    assert [rank for rank, frame in port.told(Kind.DECLINED) if frame.step == 9] == [0, 1]


def test_every_rank_gets_beats(bench: Bench) -> None:
    _say_hello(bench)
    _pass(bench, 21, alive=(0, 1))
    assert [rank for rank, _ in bench.port.told(Kind.BEAT)].count(1) >= 4
    assert Welcome.from_frame(bench.port.told(Kind.WELCOME)[0][1]).beat_seconds == 5.0
    assert not bench.happened("rank_silent")


def test_a_silent_rank_is_named_and_comes_back(bench: Bench) -> None:
    _say_hello(bench)
    bench.offer_all()
    granted = bench.port.credits()
    _pass(bench, 29, alive=(0,))
    assert not bench.happened("rank_silent")
    _pass(bench, 3, alive=(0,))
    (silent,) = bench.happened("rank_silent")
    assert (silent["silent_rank"], silent["name"]) == (1, "rank 1 on host spot-1 (process 101)")
    failed = bench.port.told(Kind.FAILED)
    assert [rank for rank, _ in failed] == [0, 1]
    assert (
        wire.json_body(failed[0][1])["message"]
        == "step 1: rank 1 on host spot-1 (process 101) has been silent for 30 s"
    )
    beats = len(bench.port.told(Kind.BEAT))
    _pass(bench, 11, alive=(0,))
    assert [rank for rank, _ in bench.port.told(Kind.BEAT)[beats:]] == [0, 0], "none are piled up for it"
    bench.port.say(0, Kind.OFFER, step=2, body=wire.to_json({"layout_digest": LAYOUT.digest}))
    bench.turn()
    declined = wire.json_body(bench.port.told(Kind.DECLINED)[0][1])
    assert "rank 1 on host spot-1 (process 101) has been silent for 43 s" in declined["reason"]
    for rank, chunk, _ in granted:
        if rank == 0:
            bench.port.say(rank, Kind.RETURN, step=1, chunk=chunk)
    bench.turn()
    states = [record.state for record in bench.ring.records()]
    assert states.count(SlotState.FILLING) == 2, "it may wake up in the middle of sending"
    for credit in granted:
        if credit[0] == 1:
            bench.port.pay(*credit)
    bench.turn()
    assert [line["silent_rank"] for line in bench.happened("rank_back")] == [1]
    assert {record.state for record in bench.ring.records()} == {SlotState.FREE}
    bench.offer_all(step=3)
    assert [frame.step for _, frame in bench.port.told(Kind.CREDIT)][-1] == 3


def test_a_stager_that_was_stopped_takes_nobody_for_silent(bench: Bench) -> None:
    _say_hello(bench)
    bench.now += 1000
    bench.turn()
    assert not bench.happened("rank_silent")


def test_a_rank_that_has_not_said_hello_is_not_silent(bench: Bench) -> None:
    _pass(bench, 60, alive=())
    assert not bench.happened("rank_silent")


def test_ranks_are_welcomed_when_what_an_earlier_job_staged_is_durable(bench: Bench) -> None:
    """Otherwise restore would take an older step. Waiting ranks do not count as silent."""
    bench.ring.write_checkpoint(2, 7, "staged", LAYOUT.digest, {})
    for rank in range(2):
        bench.port.say(rank, Kind.HELLO, attempt=0, body=b"{}")
    _pass(bench, 40, alive=())
    assert not bench.port.told(Kind.WELCOME)
    assert not bench.happened("rank_silent")
    bench.ring.remove_checkpoint(2, 7)
    bench.now += 1
    bench.turn()
    assert [rank for rank, _ in bench.port.told(Kind.WELCOME)] == [0, 1]


@pytest.mark.parametrize("kind", [Kind.OFFER, Kind.FITS])
def test_a_rank_whose_state_alone_has_changed_is_refused_and_the_step_fails_for_all(
    bench: Bench, kind: Kind
) -> None:
    bench.port.say(0, Kind.LAYOUT, body=LAYOUT.to_bytes())
    changed = Proposal("d", [], 0, {}, step=20, change="tensor a: [0:2] here before, [0:3] here now")
    bench.port.seen.messages.append((1, changed.to_frame(3)))
    bench.turn()
    assert not bench.port.told(Kind.REFUSED)
    offer = wire.to_json({"layout_digest": LAYOUT.digest})
    bench.port.say(0, kind, step=20, body=offer if kind is Kind.OFFER else b"")
    bench.turn()
    ((rank, refused),) = bench.port.told(Kind.REFUSED)
    assert rank == 1
    body = wire.json_body(refused)
    assert body["code"] == "state"
    assert "the state of rank 1 has changed, and that of rank 0 has not: tensor a: [0:2]" in body["message"]
    failed = [(rank, wire.json_body(frame)["message"]) for rank, frame in bench.port.told(Kind.FAILED)]
    assert failed == ([(0, body["message"]), (1, body["message"])] if kind is Kind.OFFER else [])
    assert bench.service.lost_ranks == set()
