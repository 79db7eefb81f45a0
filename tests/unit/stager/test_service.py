"""The stager's loop with a real ring and a real channel; the test plays trainers, MPI and flusher."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast import wire
from holdfast.config import StagerConfig
from holdfast.crc import crc32
from holdfast.errors import FencedError, HoldfastError, PeerLost
from holdfast.events import EventLog
from holdfast.ipc import Channel
from holdfast.layout import REPLICATED, Entry, Extent, Layout
from holdfast.ring import Ring, SlotState
from holdfast.wire import Frame, Kind
from stager import flusher_line
from stager.flusher_process import Flusher, log_path
from stager.refusal import refuse_start
from stager.service import Service

CHUNK = 4096
LAYOUT = Layout(
    3 * CHUNK + 500, CHUNK, 2, (Entry("a", 64, 2 * CHUNK, REPLICATED, ()), Entry("b", 3 * CHUNK, 100, 0, ()))
)
IMAGE = bytes(index * 7 % 251 for index in range(LAYOUT.image_bytes))


class Seen:
    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes]] = []
        self.lost: list[tuple[int, str]] = []


class FakePort:
    """MPI as the service sees it: payloads land where the posted receive says."""

    ranks = 2

    def __init__(self) -> None:
        self.seen = Seen()
        self.sent: list[tuple[int, Frame]] = []
        self.posted: dict[tuple[int, int], tuple[memoryview, tuple[Extent, ...]]] = {}
        self.arrived: dict[tuple[int, int], int] = {}
        self.cancelled: list[tuple[int, int]] = []

    def poll(self) -> Seen:
        seen, self.seen = self.seen, Seen()
        return seen

    def send(self, rank: int, message: bytes) -> None:
        self.sent.append((rank, wire.decode(message)))

    unsent = False

    def unsent_to(self, rank: int) -> int:
        return 0

    def post(self, rank: int, slot: int, memory: memoryview, pieces: tuple[Extent, ...]) -> None:
        self.posted[rank, slot] = (memory, pieces)

    def received(self, rank: int, slot: int) -> int | None:
        return self.arrived.pop((rank, slot), None)

    def cancel(self, rank: int, slot: int) -> None:
        self.cancelled.append((rank, slot))

    # -- the test's side

    def say(self, rank: int, kind: Kind, *, attempt: int = 3, **fields: Any) -> None:
        self.seen.messages.append((rank, wire.encode(kind, attempt=attempt, **fields)))

    def credits(self) -> list[tuple[int, int, int]]:
        return [(rank, frame.chunk, frame.arg) for rank, frame in self.sent if frame.kind is Kind.CREDIT]

    def told(self, kind: Kind) -> list[tuple[int, Frame]]:
        return [(rank, frame) for rank, frame in self.sent if frame.kind is kind]

    def pay(self, rank: int, chunk: int, slot: int, *, step: int = 1, short_bytes: int = 0) -> None:
        memory, pieces = self.posted.pop((rank, slot))
        payload = b""
        for extent, piece in zip(LAYOUT.pieces(chunk, rank), pieces, strict=True):
            payload += IMAGE[extent.offset : extent.end]
            memory[piece.offset : piece.end] = IMAGE[extent.offset : extent.end]
        self.arrived[rank, slot] = len(payload) - short_bytes
        self.say(rank, Kind.SENT, step=step, chunk=chunk, arg=len(payload), flags=crc32(payload))


class Bench:
    """A service with both its neighbours. `now` is the time: it passes when the test says so, or `runs` by itself."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = FakePort()
        self.directory = tmp_path / "base" / "run"
        self.ring = Ring.create(self.directory, chunk_bytes=CHUNK, ring_chunks=8, attempt=3)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.flusher = Channel(theirs)
        self.attached = Flusher(Channel(mine), Ring.attach(self.directory), 3, "file:///run", 1234)
        self.attach_error: HoldfastError | None = FencedError("another host has the run")
        self.attach_calls = 0
        self.resumes = True
        monkeypatch.setattr(flusher_line, "attach", self._attach)
        config = StagerConfig(store=str(tmp_path / "store"), chunk_bytes=CHUNK, ring_bytes=8 * CHUNK)
        port = cast("Any", self.port)
        self.events = tmp_path / "events.jsonl"
        self.now, self.runs, self.begun = 0.0, False, time.monotonic()
        self.service = Service(
            config, port, self.attached, events=EventLog(self.events, role="stager"), clock=self._clock
        )
        self.heard: list[str] = []

    def _clock(self) -> float:
        return self.now + (time.monotonic() - self.begun if self.runs else 0.0)

    def _attach(self, config: StagerConfig, *, held: Flusher) -> Flusher:
        """In the line's thread."""
        self.attach_calls += 1
        assert config.ring_bytes == held.ring.chunk_bytes * held.ring.ring_chunks
        if self.attach_error is not None:
            raise self.attach_error
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self.resumes:
            found = Flusher(Channel(mine), held.ring, 3, "file:///run", 5678, resumed=True)
        else:
            Ring.remove(self.directory)
            Ring.create(self.directory, chunk_bytes=CHUNK, ring_chunks=8, attempt=4).close()
            found = Flusher(Channel(mine), Ring.attach(self.directory), 4, "file:///run", 5678)
        self.flusher = Channel(theirs)
        return found

    def turn(self) -> None:
        for _ in range(3):
            self.service._turn()
            self.heard += [message.kind for message in self.flusher.poll()]

    def until(self, event: str) -> None:
        """Turn until the event log says so: another flusher is found in a thread of its own."""
        deadline = time.monotonic() + 60
        while not self.happened(event):
            assert time.monotonic() < deadline, event
            self.service._turn()
            time.sleep(0.001)
        self.turn()

    def happened(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def kill_flusher(self) -> None:
        """It is gone, and for now no other one comes."""
        self.flusher.close()
        self.turn()
        self.heard.clear()

    def next_flusher(self, *, resumes: bool = True) -> None:
        """From now on another one can be found."""
        self.resumes, self.attach_error = resumes, None
        self.now += 60  # whatever pause there is
        self.until("flusher_replaced")

    def pay_all(self, step: int = 1) -> None:
        """The ranks send what they have credits for, and say that this was all."""
        while self.port.posted:
            latest = {(rank, slot): chunk for rank, chunk, slot in self.port.credits()}
            for rank, slot in list(self.port.posted):
                self.port.pay(rank, latest[rank, slot], slot, step=step)
            self.turn()
        for rank in range(2):
            self.port.say(rank, Kind.DONE, step=step, body=b"{}")
        self.turn()

    def offer_all(self, step: int = 1) -> None:
        self.port.say(0, Kind.LAYOUT, body=LAYOUT.to_bytes())
        for rank in range(2):
            body = wire.to_json({"layout_digest": LAYOUT.digest, "saved_at_unix": 1.0})
            self.port.say(rank, Kind.OFFER, step=step, body=body)
        self.turn()

    def close(self) -> None:
        self.service.close()
        self.flusher.close()
        self.ring.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.close()


def test_what_is_sent_lies_in_the_ring_with_its_sources(bench: Bench) -> None:
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


@pytest.mark.parametrize(
    "message",
    [
        b"x" * 100,
        wire.encode(Kind.CREDIT, attempt=3),
        wire.encode(Kind.SENT, attempt=3, step=1, chunk=77),
        wire.encode(Kind.SENT, attempt=2, step=1),
        wire.encode(Kind.LAYOUT, attempt=3, body=LAYOUT.to_bytes()),
        wire.encode(Kind.OFFER, attempt=3, step=5, body=b"{}"),
        wire.encode(Kind.PROPOSE, attempt=3, body=b"zzz"),
    ],
    ids=["noise", "kind", "credit", "attempt", "layout of rank 1", "offer", "propose"],
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


def test_a_payload_of_another_size_drops_its_rank(bench: Bench) -> None:
    bench.offer_all()
    credit = next(credit for credit in bench.port.credits() if credit[0] == 1)
    bench.port.pay(*credit, short_bytes=1)
    bench.turn()
    assert "payload of" in wire.json_body(bench.port.told(Kind.REFUSED)[0][1])["message"]


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


def test_what_the_journal_says_is_free_is_taken_and_word_of_it_may_come_late(bench: Bench) -> None:
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
        assert ring.checkpoint_names() == [(4, 2)]


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
    assert str(log_path(bench.service._config.store)) in said[0]


# -- ranks that say nothing ------------------------------------------------------------------------------------------


def _say_hello(bench: Bench) -> None:
    for rank in range(2):
        body = wire.to_json({"version": wire.VERSION, "pid": 100 + rank, "host": f"spot-{rank}"})
        bench.port.say(rank, Kind.HELLO, attempt=0, body=body)
    bench.turn()


def _pass(bench: Bench, seconds: int, *, alive: tuple[int, ...]) -> None:
    """Time in which the stager listens, and only the `alive` ranks answer its beats."""
    for _ in range(2 * seconds):
        bench.now += 0.5
        for rank in alive:
            bench.port.say(rank, Kind.BEAT)
        bench.service._turn()


def test_every_rank_gets_beats(bench: Bench) -> None:
    _say_hello(bench)
    _pass(bench, 21, alive=(0, 1))
    assert [rank for rank, _ in bench.port.told(Kind.BEAT)].count(1) >= 4
    assert wire.Welcome.from_frame(bench.port.told(Kind.WELCOME)[0][1]).beat_seconds == 5.0
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


# -- failures and ends -----------------------------------------------------------------------------------------------


def test_a_store_that_fails_is_told(bench: Bench) -> None:
    bench.offer_all()
    bench.flusher.send("failed", attempt=3, step=1, code="store", message="disk full")
    bench.flusher.send("failed", attempt=2, step=1, code="store", message="of the job before")
    bench.turn()
    assert wire.json_body(bench.port.told(Kind.FAILED)[0][1]) == {"code": "store", "message": "disk full"}
    assert len(bench.port.told(Kind.FAILED)) == 2


def test_the_end_waits_for_the_flusher(bench: Bench) -> None:
    bench.runs = True
    for rank in range(2):
        bench.port.say(rank, Kind.BYE, attempt=0)
    bench.flusher.send("drained")
    bench.service.run()
    assert "finish" in [message.kind for message in bench.flusher.poll()]


def test_what_only_waits_for_the_flusher_is_staged_before_it_is_told_to_finish(bench: Bench) -> None:
    """The ranks have sent everything and left, and the flusher, slow or stopped, has not yet said `began`."""
    bench.runs = True
    bench.offer_all()
    bench.pay_all()
    for rank in range(2):
        bench.port.say(rank, Kind.BYE)
    ended = threading.Thread(target=bench.service.run)
    ended.start()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and "finish" not in bench.heard:
        bench.heard += [message.kind for message in bench.flusher.poll()]
        time.sleep(0.01)
    assert "finish" not in bench.heard
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
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


def test_a_refused_start_reaches_every_trainer() -> None:
    port = FakePort()
    for rank in range(2):
        port.say(rank, Kind.HELLO, attempt=0, body=b"{}")
        port.say(rank, Kind.BYE, attempt=0)
    refuse_start(cast("Any", port), FencedError("host a has the run"))
    for _, frame in port.told(Kind.WELCOME):
        with pytest.raises(FencedError, match="host a has the run"):
            wire.Welcome.from_frame(frame)
    assert [rank for rank, _ in port.told(Kind.WELCOME)] == [0, 1]


def test_ranks_are_welcomed_when_what_an_earlier_job_staged_is_durable(bench: Bench) -> None:
    """Restore would go on from an older step otherwise. They are not silent meanwhile: they wait for this stager."""
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


# -- the interval ----------------------------------------------------------------------------------------------------

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
def test_what_is_no_wish_drops_its_sender(bench: Bench, rank: int, kind: Kind, body: bytes) -> None:
    bench.port.say(rank, kind, body=body)
    bench.turn()
    assert bench.port.told(Kind.REFUSED)
    assert not bench.port.told(Kind.SAVE_EVERY)
