"""MPI between the ranks and the stager of one job, as far as a program may rely on it.

    rank ── control (in order) ──────────► stager      a message takes any time; two tags overtake each other
         ── payload of tag 16+slot ──────► receive     matched in the order of posting; kept when none is posted
         ◄────────── control (in order) ──

Between living processes no message is lost, doubled or damaged, but for one bit of a payload when a fault says so. When
a process dies, messages under way from it may or may not arrive. Others notice its death after a while, or never (a
node that vanishes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import PeerLost
from holdfast.image.entries import Extent
from tests.simulation.scheduler import Process, Scheduler

if TYPE_CHECKING:
    from tests.simulation.world import World

_WAKES_MAX = 2

__all__ = ["Job", "RankPort", "Seen", "StagerPort"]


@dataclass
class Seen:
    """As `stager.trainers_port.PollResult`."""

    messages: list[tuple[int, bytes]] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class _Payload:
    """One frame under way. `what`: its step and chunk, for the checks."""

    view: memoryview
    handle: int
    what: tuple[int, int]


@dataclass
class _Receive:
    memory: memoryview
    pieces: tuple[Extent, ...]
    nbytes: int = 0
    over: bool = False


class Job:
    """The network of one MPI job."""

    def __init__(self, world: World, number: int, ranks: int, *, ulfm: bool) -> None:
        self.world, self.number, self.ranks, self.ulfm = world, number, ranks, ulfm
        self.scheduler: Scheduler = world.scheduler
        self.stager: Process | None = None
        self.living = 0
        self.steps = 1
        self.processes: dict[int, Process] = {}
        self.stager_port = StagerPort(self)
        self.rank_ports = [RankPort(self, rank) for rank in range(ranks)]
        self._clear_at: dict[tuple[str, int], float] = {}

    def is_over(self) -> bool:
        """Whether all its processes have ended."""
        return not self.living

    def delay_seconds(self) -> float:
        chance = self.scheduler.chance.random()
        if chance < 0.5:
            return 0.0
        if chance < 0.9:
            return self.scheduler.chance.random() * 0.02
        return self.scheduler.chance.random() * self.world.slowest_message_seconds

    def in_order(self, lane: tuple[str, int], deliver: Callable[[], None]) -> None:
        """Deliver after all earlier messages on the same lane."""
        at = max(self._clear_at.get(lane, 0.0), self.scheduler.now + self.delay_seconds())
        self._clear_at[lane] = at
        self.scheduler.call_at(at, deliver)

    def gone(self, rank: int | None) -> bool:
        process = self.stager if rank is None else self.processes.get(rank)
        return process is None or process.killed or not process.alive


class StagerPort:
    """As `stager.trainers_port.TrainersPort`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.ranks = job.ranks
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._newly_lost: list[tuple[int, str]] = []
        self._lost: set[int] = set()
        self._receives: dict[tuple[int, int], _Receive] = {}
        self._posted: dict[tuple[int, int], deque[_Receive]] = {}
        self._unexpected: dict[tuple[int, int], deque[_Payload]] = {}
        self.unsent = False
        self._news = False  # something has come since the last poll
        self.wakes = 0  # pauses that ended early since: a thread that does not poll must not spin

    def has_news(self) -> bool:
        return self._news and self.wakes < _WAKES_MAX

    # -- the stager's interface ----------------------------------------------------------------------------------

    def send(self, rank: int, message: bytes) -> None:
        self._job.scheduler.check_alive()
        if rank in self._lost:
            return
        port = self._job.rank_ports[rank]
        self._job.in_order(("down", rank), lambda: port.deliver(message))

    def unsent_to(self, rank: int) -> int:
        return 0

    def fileno(self) -> None:
        """Return None, as under MPI."""

    def mark_left(self, rank: int) -> None:
        """Do nothing: MPI tells a process that has left from one that died."""

    def poll(self) -> Seen:
        self._job.scheduler.check_alive()
        seen = Seen(list(self._inbox), self._newly_lost)
        self._inbox.clear()
        self._newly_lost = []
        self._news = False
        self.wakes = 0
        return seen

    def post(self, rank: int, slot: int, memory: memoryview, pieces: tuple[Extent, ...]) -> None:
        self._job.scheduler.check_alive()
        receive = _Receive(memory, pieces)
        self._job.world.receive_posted(rank, slot)
        self._receives[rank, slot] = receive
        self._posted.setdefault((rank, slot), deque()).append(receive)
        self._match(rank, slot)

    def pop_received(self, rank: int, slot: int) -> int | None:
        self._job.scheduler.check_alive()
        receive = self._receives.get((rank, slot))
        if receive is None or not receive.over:
            return None
        del self._receives[rank, slot]
        return receive.nbytes

    def cancel(self, rank: int, slot: int) -> None:
        self._job.scheduler.check_alive()
        receive = self._receives.pop((rank, slot), None)
        if receive is not None and not receive.over:
            self._posted[rank, slot].remove(receive)

    def drop(self, rank: int, reason: str) -> None:
        if rank not in self._lost:
            self._lost.add(rank)
            self._news = True
            self._newly_lost.append((rank, f"rank {rank} {reason}"))

    # -- called by the network -----------------------------------------------------------------------------------

    def deliver(self, rank: int, message: bytes) -> None:
        if not self._job.gone(None):
            self._inbox.append((rank, message))
            self._news = True

    def deliver_payload(self, rank: int, slot: int, payload: _Payload) -> None:
        if not self._job.gone(None):
            self._unexpected.setdefault((rank, slot), deque()).append(payload)
            self._match(rank, slot)

    def _match(self, rank: int, slot: int) -> None:
        posted, waiting = self._posted.get((rank, slot)), self._unexpected.get((rank, slot))
        while posted and waiting:
            receive, payload = posted.popleft(), waiting.popleft()
            self._job.world.payload_lands(rank, slot, payload.what)
            data = bytes(payload.view)
            at = 0
            for piece in receive.pieces:
                if at + piece.nbytes <= len(data):
                    receive.memory[piece.offset : piece.end] = data[at : at + piece.nbytes]
                at += piece.nbytes
            receive.nbytes, receive.over = len(data), True
            self._job.world.payload_landed(rank, slot, receive.memory, receive.pieces)
            self._news = True
            port = self._job.rank_ports[rank]
            port.completed.add(payload.handle)
            port.news = True


class RankPort:
    """As `trainer_side.ranks.ports.StagerPort`, the part that `Link` uses."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self.rank = job, rank
        self._inbox: list[bytes] = []
        self._handles = 0
        self.completed: set[int] = set()
        self.news = False
        self.stager_is_dead = False
        self.next_frame = (-1, -1)  # step and chunk of the frame that is sent next
        self.left = False
        self.one_machine = rank % 2 == 0
        self.processes_per_core = 1.0
        self.has_threads = False
        self.wakes = 0

    def has_news(self) -> bool:
        return self.news and self.wakes < _WAKES_MAX

    def _check(self) -> None:
        self._job.scheduler.check_alive()
        if self.stager_is_dead:
            raise PeerLost("the stager: its process is dead")

    def send(self, message: bytes) -> None:
        self._check()
        port = self._job.stager_port
        self._job.in_order(("up", self.rank), lambda: port.deliver(self.rank, message))

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        assert sum(pieces) == len(payload)
        self._check()
        self._handles += 1
        frame = _Payload(payload, self._handles, self.next_frame)
        port = self._job.stager_port
        # A lane of its own for each tag: it overtakes SENT, and SENT overtakes it.
        self._job.in_order((f"tag {slot}", self.rank), lambda: port.deliver_payload(self.rank, slot, frame))
        return self._handles

    def is_sent(self, handle: int) -> bool:
        self._check()
        return handle in self.completed

    def poll(self) -> list[bytes]:
        self._check()
        inbox, self._inbox = self._inbox, []
        self.news = False
        self.wakes = 0
        return inbox

    def disconnect(self, seconds_max: float, *, lost: bool = False) -> None:
        from holdfast.wire import frames as wire

        if not self.stager_is_dead and not self.left:
            self.left = True
            self.send(wire.encode(wire.Kind.BYE))

    def deliver(self, message: bytes) -> None:
        if not self._job.gone(self.rank):
            self._inbox.append(message)
            self.news = True


def notice_death(job: Job, dead: Process, seconds: float) -> None:
    """Notify the living processes of a death after a while (ULFM)."""

    def tell() -> None:
        if dead is job.stager:
            for port in job.rank_ports:
                port.stager_is_dead = port.news = True
        for rank, process in job.processes.items():
            if process is dead:
                job.stager_port.drop(rank, "is dead")

    job.scheduler.later(seconds, tell)
