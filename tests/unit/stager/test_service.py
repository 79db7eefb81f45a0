"""The stager's loop, from the ranks' messages to the end, which waits for the flusher."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.crc import crc32
from holdfast.errors import PeerLost
from holdfast.ring.journal import SlotState
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from stager import flusher_line
from tests.unit.stager.bench import IMAGE, LAYOUT, Bench


def test_sent_frames_lie_in_the_ring_with_their_sources(bench: Bench) -> None:
    bench.offer_all()
    assert bench.heard == ["begin"]
    checkpoint = bench.ring.checkpoint(3, 1)
    assert checkpoint is not None
    assert checkpoint.state == "receiving"
    granted = bench.port.credits()
    assert {(rank, chunk) for rank, chunk, _ in granted} == {(0, 0), (0, 1), (1, 2), (1, 3), (0, 3)}
    for credit in granted:
        bench.port.pay(*credit)
    for rank in range(2):
        bench.port.say(rank, Kind.DONE, step=1, body=wire.to_json({"crc_seconds": 0.1}))
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.turn()
    assert sorted(bench.heard) == ["begin", *["chunk"] * 4, "staged"]
    found = b""
    for record in sorted(bench.ring.records(), key=lambda record: record.chunk):
        if record.state is SlotState.FULL:
            found += bytes(bench.ring.slot_memory(record.slot)[: record.nbytes])
            assert [source.rank for source in record.sources] == list(LAYOUT.senders(record.chunk))
            for rank, crc in record.sources:
                sent = b"".join(IMAGE[e.offset : e.end] for e in LAYOUT.pieces(record.chunk, rank))
                assert crc == crc32(sent)
    assert found == IMAGE
    checkpoint = bench.ring.checkpoint(3, 1)
    assert checkpoint is not None
    assert checkpoint.state == "staged"
    assert checkpoint.record["ranks"]["1"] == {"saved_at_unix": 1.0, "crc_seconds": 0.1}
    assert [rank for rank, _ in bench.port.told(Kind.STAGED)] == [0, 1]


def test_slots_come_back_when_a_checkpoint_is_declined(bench: Bench) -> None:
    bench.offer_all()
    bench.port.say(1, Kind.DECLINE, step=1, body=b"copy failed")
    bench.turn()
    assert bench.heard == ["begin", "abort"]
    assert "rank 1: copy failed" in wire.json_body(bench.port.told(Kind.DECLINED)[0][1])["reason"]
    for rank, chunk, _ in bench.port.credits():
        bench.port.say(rank, Kind.RETURN, step=1, chunk=chunk)
    bench.turn()
    assert {record.state for record in bench.ring.records()} == {SlotState.FREE}
    assert len(bench.port.cancelled) == 5


def test_the_end_waits_for_the_flusher(bench: Bench) -> None:
    bench.runs = True
    for rank in range(2):
        bench.port.say(rank, Kind.BYE, attempt=0)
    bench.flusher.send("drained")
    bench.service.run()
    assert "finish" in [message.kind for message in bench.flusher.poll()]


@pytest.mark.parametrize(
    ("notice", "is_lost", "interrupted"),
    [("", False, False), ("terminate", False, True), ("rebalance", False, False), ("", True, True)],
)
def test_the_flusher_hears_whether_the_job_was_interrupted(
    bench: Bench, notice: str, is_lost: bool, interrupted: bool
) -> None:
    bench.runs = True
    if notice:
        body = {"kind": notice, "seconds_left": 100.0, "source": "aws", "said_by": "", "rank": -1}
        bench.port.say(1, Kind.NOTICE, body=wire.to_json(body))
    bench.turn()
    if is_lost:
        bench.port.seen.lost.append((1, "rank 1 was killed"))
    for rank in range(1 if is_lost else 2):
        bench.port.say(rank, Kind.BYE, attempt=0)
    bench.flusher.send("drained")
    bench.service.run()
    said = [message.fields for message in bench.flusher.poll() if message.kind == "finish"]
    assert [fields["interrupted"] for fields in said] == [interrupted]


def test_a_step_that_waits_only_for_the_flusher_is_staged_before_it_finishes(bench: Bench) -> None:
    """The ranks have sent everything and left, and the flusher, slow or stopped, never says `began`."""
    bench.runs = True
    bench.offer_all()
    bench.pay_all()
    for rank in range(2):
        bench.port.say(rank, Kind.BYE)
    ended = threading.Thread(target=bench.service.run)
    ended.start()
    deadline = time.monotonic() + 60
    while "finish" not in bench.heard and time.monotonic() < deadline:
        bench.heard += [message.kind for message in bench.flusher.poll()]
        time.sleep(0.01)
    assert bench.heard[-2:] == ["staged", "finish"]
    bench.flusher.send("drained")
    ended.join(60)
    assert not ended.is_alive()


def test_the_drain_goes_on_with_another_flusher(bench: Bench) -> None:
    bench.runs = True
    bench.offer_all()
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.pay_all()
    bench.flusher.close()
    bench.attach_error = None
    for rank in range(2):
        bench.port.say(rank, Kind.BYE, attempt=0)
    ended = threading.Thread(target=bench.service.run)
    ended.start()
    deadline = time.monotonic() + 60
    while "finish" not in bench.heard and time.monotonic() < deadline:
        if not bench.flusher.closed:
            bench.heard += [message.kind for message in bench.flusher.poll()]
        time.sleep(0.01)
    assert [kind for kind in bench.heard if kind != "chunk"][-3:] == ["begin", "staged", "finish"]
    bench.flusher.send("drained")
    ended.join(60)
    assert not ended.is_alive()


def test_told_to_stop_it_lets_in_what_is_under_way_and_declines_what_comes_later(bench: Bench) -> None:
    bench.offer_all(1)
    bench.stopping = True
    assert not bench.service._is_over(), "step 1 may still become staged"
    bench.port.say(0, Kind.OFFER, step=2, body=wire.to_json({"layout_digest": LAYOUT.digest}))
    bench.turn()
    declined = bench.port.told(Kind.DECLINED)
    assert [(rank, frame.step) for rank, frame in declined] == [(0, 2), (1, 2)]
    said = wire.json_body(declined[0][1])
    assert said["cause"] == "stager stopping"
    assert said["reason"].startswith("the stager is stopping")
    bench.pay_all(1)
    assert [rank for rank, _ in bench.port.told(Kind.STAGED)] == [0, 1]
    assert bench.service._is_over()
    bench.flusher.send("durable", attempt=3, step=1, pgt2_seconds=0.1, file="step-1.pt", record={})
    bench.flusher.send("drained")
    bench.runs = True
    bench.service.run()
    assert [rank for rank, _ in bench.port.told(Kind.DURABLE)] == [0, 1], "the ranks are there, and hear it"
    assert "finish" in [message.kind for message in bench.flusher.poll()]
    assert bench.service.lost_ranks == {0, 1}


def test_flushers_that_all_end_too_early_are_the_stagers_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.runs = True
    for rank in range(2):
        bench.port.say(rank, Kind.BYE, attempt=0)
    bench.flusher.close()
    monkeypatch.setattr(flusher_line, "_PAUSE_SECONDS_MAX", 0.01)
    with pytest.raises(PeerLost, match="8 flushers in a row") as caught:
        bench.service.run()
    assert bench.attach_calls == 7
    assert "another host has the run" in str(caught.value)
    assert str(bench.directory) in str(caught.value)


@pytest.mark.parametrize(
    ("state", "waited_seconds", "longest_seconds"),
    [
        ("idle", 0.0, 5e-3),
        ("waits for ranks", 0.01, 0.5e-3),
        ("waits for ranks", 0.1, 2e-3),
        ("waits for ranks", 60.0, 5e-3),
        ("streaming", 60.0, 0.5e-3),
    ],
)
def test_the_loop_looks_less_often_the_longer_nothing_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, state: str, waited_seconds: float, longest_seconds: float
) -> None:
    if state != "idle":  # credits are out, and the ranks have nothing sent
        bench.offer_all()
        bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.port.unsent = state == "streaming"
    assert bench.service._rank_handler.streaming == (state == "streaming")
    pauses: list[float] = []
    monkeypatch.setattr(bench.service._line, "wait", pauses.append)
    bench.now += waited_seconds
    for _ in range(40):
        bench.service._idle()
    assert pauses[0] == pytest.approx(50e-6)
    assert max(pauses) == pytest.approx(longest_seconds)
