"""A link against a simulated stager: every message is serialized, the transport is a pair of lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.config import TrainerConfig
from holdfast.errors import PeerLost
from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import area_bytes, frames_of
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.welcome import Welcome
from trainer_side.link.greeting import GreetedStager
from trainer_side.link.inbox import ShareInbox, StagerInbox
from trainer_side.link.link import Link
from trainer_side.link.rejoining import Reconnect
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.pace.schedule import Schedule
from trainer_side.transfer import Transfer

CHUNK = 4096
LAYOUT = Layout(
    4 * CHUNK,
    CHUNK,
    2,
    (Entry("a", 64, 3 * CHUNK, REPLICATED, ()), Entry("rng", 4 * CHUNK - 200, 100, 0, ())),
)
SECONDS_MAX = 60.0


class FakePort:
    """Simulates MPI for the link. `hold` keeps payloads in flight; `dead` raises as MPI does for a dead stager."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inbox: list[bytes] = []
        self.messages: list[Frame] = []
        self.payloads: list[tuple[int, bytes]] = []
        self.hold = False
        self.dead = False
        self.left = False
        self.polls = 0
        self.one_machine = True
        self.has_threads = False
        self.processes_per_core = 1.0

    def _check(self) -> None:
        if self.dead:
            raise PeerLost("the stager: its process is dead")

    def send(self, message: bytes) -> None:
        self._check()
        with self.lock:
            self.messages.append(wire.decode(message))

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        self._check()
        assert sum(pieces) == len(payload)
        with self.lock:
            self.payloads.append((slot, bytes(payload)))
            return len(self.payloads)

    def is_sent(self, handle: int) -> bool:
        self._check()
        return not self.hold

    def poll(self) -> list[bytes]:
        self._check()
        self.polls += 1
        with self.lock:
            inbox, self.inbox = self.inbox, []
        return inbox

    def disconnect(self, seconds_max: float, *, lost: bool = False) -> None:
        self.left = True

    # -- the test's side

    def say(
        self, kind: Kind, *, step: int = 0, chunk: int = 0, arg: int = 0, body: dict[str, Any] | None = None
    ) -> None:
        message = wire.encode(kind, attempt=1, step=step, chunk=chunk, arg=arg, body=wire.to_json(body or {}))
        with self.lock:
            self.inbox.append(message)

    def of(self, kind: Kind) -> list[Frame]:
        with self.lock:
            return [frame for frame in self.messages if frame.kind is kind]


class Source:
    """Bytes of one rank's slice. `ready`: how many are in place; -1: an empty slice is not complete either."""

    def __init__(self, rank: int, layout: Layout = LAYOUT) -> None:
        self.nbytes = area_bytes(layout, rank)
        self.data = bytes(range(256)) * (self.nbytes // 256 + 1)
        self.ready = self.nbytes
        self.views = 0
        self.frames = {frame.offset: frame.nbytes for frame in frames_of(layout, rank)}

    def view(self, offset: int, nbytes: int) -> memoryview:
        self.views += 1
        return memoryview(self.data)[offset : offset + nbytes]

    def is_ready(self, offset: int) -> bool:
        end = offset + self.frames[offset]
        return end <= self.ready

    def is_complete(self) -> bool:
        return self.nbytes <= self.ready


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def make(
    port: FakePort,
    *,
    rank: int = 0,
    auto: bool = False,
    member: bool = False,
    reconnect: Reconnect | None = None,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Link:
    welcome = Welcome("file:///run", 1, CHUNK, 8, 2, 60.0, 5.0, ring="a")
    config = TrainerConfig(**settings)
    agreed = AgreedSteps(wait_seconds_max=config.stager_seconds_max)
    inbox = (
        ShareInbox(rank, lambda: -1)
        if member
        else StagerInbox(rank, agreed, Schedule(auto=auto, wait_seconds_max=config.stager_seconds_max))
    )
    events = EventLog(config.events, role="trainer", rank=rank)
    return Link(
        config, GreetedStager(port, welcome), inbox, events, rank=rank, reconnect=reconnect, clock=clock
    )


def agreed_steps(link: Link) -> AgreedSteps:
    assert isinstance(link._inbox, StagerInbox)
    return link._inbox._agreed_steps


def schedule(link: Link) -> Schedule:
    assert isinstance(link._inbox, StagerInbox)
    return link._inbox._schedule


def offer(link: Link, step: int = 1, source: Source | None = None) -> Transfer:
    return link.offer(step, source or Source(link.job.rank), SaveRecord(saved_at_unix=time.time()), LAYOUT)
