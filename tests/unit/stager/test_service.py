"""The stager's loop with a real ring and a real channel; the test plays trainers, MPI and flusher."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast import wire
from holdfast.config import StagerConfig
from holdfast.crc import crc32
from holdfast.errors import FencedError, PeerLost
from holdfast.events import EventLog
from holdfast.ipc import Channel
from holdfast.layout import REPLICATED, Entry, Extent, Layout
from holdfast.ring import Ring, SlotState
from holdfast.wire import Frame, Kind
from stager import service as service_module
from stager.flusher_process import Flusher
from stager.service import Service, refuse_start

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

    def pay(self, rank: int, chunk: int, slot: int, *, short_bytes: int = 0) -> None:
        memory, pieces = self.posted.pop((rank, slot))
        payload = b""
        for extent, piece in zip(LAYOUT.pieces(chunk, rank), pieces, strict=True):
            payload += IMAGE[extent.offset : extent.end]
            memory[piece.offset : piece.end] = IMAGE[extent.offset : extent.end]
        self.arrived[rank, slot] = len(payload) - short_bytes
        self.say(rank, Kind.SENT, step=1, chunk=chunk, arg=len(payload), flags=crc32(payload))


class Bench:
    """A service with both its neighbours."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = FakePort()
        self.ring = Ring.create(tmp_path / "base" / "run", chunk_bytes=CHUNK, ring_chunks=8, attempt=3)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.flusher = Channel(theirs)
        attached = Flusher(Channel(mine), Ring.attach(tmp_path / "base" / "run"), 3, "file:///run", 1234)
        self.attached = attached
        self.attach_error: Exception = FencedError("another host has the run")
        monkeypatch.setattr(service_module, "attach", self._attach)
        config = StagerConfig(store=str(tmp_path / "store"), chunk_bytes=CHUNK, ring_bytes=8 * CHUNK)
        port = cast("Any", self.port)
        self.service = Service(config, port, attached, events=EventLog(None, role="stager"))
        self.heard: list[str] = []

    def _attach(self, config: StagerConfig) -> Flusher:
        raise self.attach_error

    def turn(self) -> None:
        for _ in range(3):
            self.service._turn()
            self.heard += [message.kind for message in self.flusher.poll()]

    def offer_all(self) -> None:
        self.port.say(0, Kind.LAYOUT, body=LAYOUT.to_bytes())
        for rank in range(2):
            body = wire.to_json({"layout_digest": LAYOUT.digest, "saved_at_unix": 1.0})
            self.port.say(rank, Kind.OFFER, step=1, body=body)
        self.turn()

    def close(self) -> None:
        self.service._slots = []
        self.attached.close()
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


def test_a_lost_flusher_ends_the_checkpoint_and_the_trainers_hear_it(bench: Bench) -> None:
    bench.offer_all()
    bench.flusher.close()
    bench.service._turn()
    message = wire.json_body(bench.port.told(Kind.FAILED)[0][1])["message"]
    assert "flusher (process 1234) ended" in message
    bench.port.say(0, Kind.OFFER, step=2, body=wire.to_json({"layout_digest": LAYOUT.digest}))
    bench.service._turn()
    assert bench.port.told(Kind.DECLINED)


def test_a_store_that_fails_is_told(bench: Bench) -> None:
    bench.offer_all()
    bench.flusher.send("failed", attempt=3, step=1, code="store", message="disk full")
    bench.flusher.send("failed", attempt=2, step=1, code="store", message="of the job before")
    bench.turn()
    assert wire.json_body(bench.port.told(Kind.FAILED)[0][1]) == {"code": "store", "message": "disk full"}
    assert len(bench.port.told(Kind.FAILED)) == 2


def test_the_end_waits_for_the_flusher(bench: Bench) -> None:
    for rank in range(2):
        bench.port.say(rank, Kind.BYE, attempt=0)
    bench.flusher.send("drained")
    bench.service.run()
    assert "finish" in [message.kind for message in bench.flusher.poll()]


def test_a_flusher_that_ends_too_early_is_the_stagers_error(bench: Bench) -> None:
    for rank in range(2):
        bench.port.say(rank, Kind.BYE, attempt=0)
    bench.flusher.close()
    with pytest.raises(PeerLost, match="before all was durable"):
        bench.service.run()


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
