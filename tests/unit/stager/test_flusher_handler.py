"""A flusher fails, dies and comes back: the cost of that, and the messages to the next one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.log_files import log_path
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from tests.unit.stager.bench import CHUNK, IMAGE, LAYOUT, Bench


def test_a_dead_flusher_costs_nothing_while_there_is_room(bench: Bench) -> None:
    """Killed in mid-receive: the ranks hear nothing of it, the step becomes staged, the next flusher is told all."""
    bench.offer_all()
    granted = bench.port.credits()
    bench.port.pay(*granted[0])
    bench.turn()
    bench.kill_flusher()
    for credit in granted[1:]:
        bench.port.pay(*credit)
    bench.pay_all()
    assert [rank for rank, _ in bench.port.told(Kind.STAGED)] == [0, 1]
    assert not bench.port.told(Kind.FAILED) + bench.port.told(Kind.DECLINED)
    assert [line["pid"] for line in bench.happened("flusher_lost")] == [1234]
    assert bench.heard == [], "nobody was there to be told"
    bench.next_flusher()
    assert bench.heard == ["begin", *["chunk"] * 4, "staged"]
    (replaced,) = bench.happened("flusher_replaced")
    assert replaced["resumed"] is True
    assert replaced["seconds"] >= 60
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.flusher.send("durable", attempt=3, step=1, file="step-1.pt", pgt2_seconds=1.0, record={})
    bench.flusher.send("durable", attempt=3, step=1, file="step-1.pt", pgt2_seconds=1.0, record={})
    bench.turn()
    assert [rank for rank, _ in bench.port.told(Kind.DURABLE)] == [0, 1], "once, however often it is said"


@pytest.mark.parametrize("recorded", [True, False])
def test_chunks_that_died_with_an_upload_end_their_step_before_it_is_called_staged(
    bench: Bench, recorded: bool
) -> None:
    bench.offer_all()
    rank, chunk, slot = next(
        credit for credit in bench.port.credits() if LAYOUT.senders(credit[1]) == (credit[0],)
    )
    bench.port.pay(rank, chunk, slot)
    bench.turn()
    bench.ring.free(slot)  # the flusher has written it, and dies before it says so
    if recorded:
        (bench.directory / "flush-3-1").touch()
    bench.kill_flusher()
    failed = bench.port.told(Kind.FAILED)
    assert [rank for rank, _ in failed] == ([] if recorded else [0, 1])
    if not recorded:
        assert "ended with 1 chunks of it in an upload" in wire.json_body(failed[0][1])["message"]
        return
    bench.pay_all()
    assert [rank for rank, _ in bench.port.told(Kind.STAGED)] == [0, 1]


def test_slots_free_by_the_journal_are_taken_before_the_flusher_says_so(bench: Bench) -> None:
    bench.offer_all()
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.pay_all()
    slots = [record.slot for record in bench.ring.records() if record.state is SlotState.FULL]
    bench.kill_flusher()
    for slot in slots[:3]:
        bench.ring.free(slot)  # its last act, of which nobody was told
    bench.next_flusher()
    assert bench.heard == ["begin", "chunk", "staged"]
    for step in (2, 3):  # one in slots that were never used, which come first
        bench.offer_all(step=step)
    filled = {record.slot for record in bench.ring.records() if record.state is SlotState.FILLING}
    assert filled & set(slots[:3]), "they serve again"
    bench.flusher.send("freed", slots=slots[:3])  # of before: says nothing about what is in them now
    bench.turn()
    assert not bench.happened("flusher_lost")[1:]
    bench.flusher.send("began", attempt=3, step=2, part_chunks=1)
    bench.pay_all(step=2)
    bench.flusher.send("freed", slots=slots[:3])
    bench.turn()
    free, held = set(bench.service._session._slots.free), bench.service._session.flusher_slots
    assert held == {record.slot for record in bench.ring.records() if record.state is SlotState.FULL}
    assert not free & held


def test_slots_that_the_flusher_has_added_take_payloads(bench: Bench) -> None:
    grow(bench, 12)
    bench.offer_all()
    assert {record.slot for record in bench.ring.records() if record.state is SlotState.FILLING} <= set(
        range(8)
    )
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.pay_all()
    bench.flusher.send("grown", note="")
    bench.turn()
    bench.offer_all(step=2)
    bench.pay_all(step=2)
    records = [record for record in bench.ring.records()[8:] if record.state is SlotState.FULL]
    assert len(records) == min(4, LAYOUT.chunks), "they come before slots that have been used"
    for record in records:
        start = record.chunk * CHUNK
        assert record.step == 2
        assert (
            bytes(bench.ring.slot_memory(record.slot)[: record.nbytes])
            == IMAGE[start : start + record.nbytes]
        )


@pytest.mark.parametrize("said", [False, True])
def test_slots_are_found_whose_flusher_died_before_it_spoke_of_them(bench: Bench, said: bool) -> None:
    bench.offer_all()
    grow(bench, 12)
    bench.kill_flusher()
    bench.next_flusher()
    if said:
        bench.flusher.send("grown", note="the ring has 0.1 GiB now")
        bench.turn()
    free = bench.service._session._slots.free
    assert set(range(8, 12)) <= set(free)
    assert len(set(free)) == len(free), "each once"
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.pay_all()
    assert [rank for rank, _ in bench.port.told(Kind.STAGED)] == [0, 1]


def grow(bench: Bench, ring_chunks: int) -> None:
    """As the flusher does it, which has the ring mapped by itself."""
    with Ring.attach(bench.directory) as ring:
        ring.allocate(ring_chunks)
        ring.add_slots(ring_chunks)
    bench.ring.refresh_slots()


def test_a_flusher_that_comes_back_hears_what_was_given_up_meanwhile(bench: Bench) -> None:
    bench.offer_all()
    bench.kill_flusher()
    bench.port.say(1, Kind.DECLINE, step=1, body=b"copy failed")
    bench.turn()
    bench.next_flusher()
    assert bench.heard == ["abort"]
    bench.flusher.send("failed", attempt=3, step=1, code="peer_lost", message="aborted by the stager")
    bench.turn()
    assert len(bench.port.told(Kind.DECLINED)) == 2
    assert not bench.port.told(Kind.FAILED)


def test_a_staged_step_that_the_next_flusher_does_not_know_is_named(bench: Bench) -> None:
    bench.offer_all()
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.pay_all()
    bench.kill_flusher()
    bench.next_flusher()
    bench.flusher.send("failed", attempt=3, step=1, code="damage", message="step 1: chunk 2 is gone")
    bench.turn()
    assert [rank for rank, _ in bench.port.told(Kind.FAILED)] == [0, 1]
    assert not bench.service._session.known(), "it does not stay staged for ever"


def test_without_a_flusher_a_full_ring_ends_at_the_deadline_by_name(bench: Bench) -> None:
    bench.offer_all()
    bench.pay_all()
    bench.kill_flusher()
    for step in (2, 3):  # one fits beside step 1
        bench.offer_all(step=step)
        bench.pay_all(step=step)
    assert {frame.step for _, frame in bench.port.told(Kind.STAGED)} == {1, 2}
    bench.now += 121
    bench.turn()
    ((_, failed), _) = bench.port.told(Kind.FAILED)
    message = wire.json_body(failed)["message"]
    assert message.startswith("step 3: the stager waited 120 s for another flusher")
    assert "another host has the run" in message


def test_a_ring_that_could_not_be_kept_starts_over_when_credits_are_settled(bench: Bench) -> None:
    bench.offer_all()
    bench.kill_flusher()
    bench.resumes, bench.attach_error = False, None
    bench.now += 60
    bench.until("failed")
    assert not bench.happened("flusher_replaced"), "payloads may still come into the ring before"
    for rank, chunk, _ in bench.port.credits():
        bench.port.say(rank, Kind.RETURN, step=1, chunk=chunk)
    bench.until("flusher_replaced")
    assert bench.happened("flusher_replaced")[0]["resumed"] is False
    assert "its ring could not be kept" in wire.json_body(bench.port.told(Kind.FAILED)[0][1])["message"]
    bench.port.sent.clear()
    bench.offer_all(step=2)
    bench.flusher.send("began", attempt=4, step=2, part_chunks=1)
    bench.pay_all(step=2)
    assert [rank for rank, _ in bench.port.told(Kind.STAGED)] == [0, 1]
    with Ring.attach(bench.directory) as ring:
        assert ring.checkpoint_ids() == [(4, 2)]


def test_a_crash_loop_is_slow_and_says_where_to_look(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.kill_flusher()
    while bench.attach_calls < 6:
        calls = bench.attach_calls
        for _ in range(20):
            bench.turn()
            time.sleep(0.001)
        assert bench.attach_calls <= calls + 1, "one at a time, and not at once again"
        bench.now += 20
    bench.turn()
    said = [record.getMessage() for record in caplog.records if "says why" in record.getMessage()]
    assert said
    assert str(log_path("flusher", bench.service._config.store)) in said[0]


def test_a_store_that_fails_is_told(bench: Bench) -> None:
    bench.offer_all()
    bench.flusher.send("failed", attempt=3, step=1, code="store", message="disk full")
    bench.flusher.send("failed", attempt=2, step=1, code="store", message="of the job before")
    bench.turn()
    assert wire.json_body(bench.port.told(Kind.FAILED)[0][1]) == {"code": "store", "message": "disk full"}
    assert len(bench.port.told(Kind.FAILED)) == 2


def test_a_store_that_takes_nothing_is_named_in_the_jobs_log_with_each_decline(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once when it begins, with the flusher's log; with what is declined for it; and when it is over."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bench.flusher.send("held", message="/mnt/run: no space left on device")
    bench.turn()
    (said,) = [line for line in caplog.messages if "store unavailable" in line]
    assert "no space left on device" in said
    assert str(log_path("flusher", str(tmp_path / "store"))) in said
    bench.port.say(0, Kind.DECLINE, step=1, body=b"busy: all staging areas are still being sent")
    bench.turn()
    (declined,) = [line for line in caplog.messages if "step 1 is declined" in line]
    assert declined.endswith("the store takes nothing: /mnt/run: no space left on device")
    bench.flusher.send("held", message="")
    bench.turn()
    assert "the store takes checkpoints again" in caplog.messages


def test_the_end_says_until_when_it_waits_for_the_store(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bench.flusher.send("held", message="/mnt/run: no space left on device")
    for rank in range(2):
        bench.port.say(rank, Kind.BYE)
    bench.flusher.send("drained")
    bench.service.run()
    (waiting,) = [line for line in caplog.messages if line.startswith("waiting for the store until ")]
    assert "no space left on device" in waiting
