"""A stager's service with a real ring and a real channel; the test simulates trainers, MPI and flusher."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.config import StagerConfig
from holdfast.crc import crc32
from holdfast.errors import FencedError, HoldfastError
from holdfast.image.entries import REPLICATED, Entry, Extent
from holdfast.image.layout import Layout
from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.ring.doorbell import Channel
from holdfast.ring.ring import Ring
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from stager import flusher_line
from stager.flusher_process import Flusher
from stager.service import StagerService

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
    """Simulates MPI for the service: payloads land where the posted receive says."""

    ranks = 2

    def fileno(self) -> None:
        """As under MPI."""

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

    def mark_left(self, rank: int) -> None:
        """As under MPI."""

    def post(self, rank: int, slot: int, memory: memoryview, pieces: tuple[Extent, ...]) -> None:
        self.posted[rank, slot] = (memory, pieces)

    def pop_received(self, rank: int, slot: int) -> int | None:
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
    """A service with simulated ranks and flusher. `now` is the time, set by the test unless the clock `runs`."""

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        share: ShareNumber = WHOLE,
        before: Callable[[Ring], None] = lambda _: None,
    ) -> None:
        self.port = FakePort()
        self.directory = tmp_path / "base" / "run"
        self.ring = Ring.create(self.directory, chunk_bytes=CHUNK, ring_chunks=8, attempt=3, room_chunks=32)
        before(self.ring)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.flusher = Channel(theirs)
        self.attached = Flusher(Channel(mine), Ring.attach(self.directory), 3, "file:///run", 1234)
        self.attach_error: HoldfastError | None = FencedError("another host has the run")
        self.attach_calls = 0
        self.resumes = True
        monkeypatch.setattr(flusher_line, "attach", self._attach)
        config = StagerConfig(
            store=str(tmp_path / "store"),
            chunk_bytes=CHUNK,
            ring_bytes=8 * CHUNK,
            share=share,
            listen=None if share == WHOLE else "127.0.0.1:0",
        )
        self._share = share
        port = cast("Any", self.port)
        self.events = tmp_path / "events.jsonl"
        self.now, self.runs, self.begun = 0.0, False, time.monotonic()
        self.stopping = False
        self.service = StagerService(
            config,
            port,
            self.attached,
            events=EventLog(self.events, role="stager"),
            is_stopping=lambda: self.stopping,
            clock=self._clock,
        )
        self.heard: list[str] = []

    def _clock(self) -> float:
        return self.now + (time.monotonic() - self.begun if self.runs else 0.0)

    def _attach(self, config: StagerConfig, *, previous: Flusher, lead_attempt: int) -> Flusher:
        """In the line's thread."""
        self.attach_calls += 1
        assert lead_attempt == (0 if self._share.is_lead else 3)
        assert config.ring_bytes == previous.ring.chunk_bytes * previous.ring.ring_chunks
        if self.attach_error is not None:
            raise self.attach_error
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self.resumes:
            found = Flusher(Channel(mine), previous.ring, 3, "file:///run", 5678, resumed=True)
        else:
            Ring.remove(self.directory)
            Ring.create(self.directory, chunk_bytes=CHUNK, ring_chunks=8, attempt=lead_attempt or 4).close()
            attempt = lead_attempt or 4
            found = Flusher(Channel(mine), Ring.attach(self.directory), attempt, "file:///run", 5678)
        self.flusher = Channel(theirs)
        return found

    def welcome_all(self) -> None:
        """The ranks have joined, and have not said who they are: no beat is awaited of them."""
        for rank in range(2):
            self.service._trainers.welcome(rank, wire.encode(Kind.WELCOME))
        self.port.sent.clear()

    def turn(self) -> None:
        for _ in range(3):
            self.service._poll_once()
            self.heard += [message.kind for message in self.flusher.poll()]

    def until(self, event: str) -> None:
        """Turn until the event log says so: another flusher is found in a thread of its own."""
        deadline = time.monotonic() + 60
        while not self.happened(event):
            assert time.monotonic() < deadline, event
            self.service._poll_once()
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
