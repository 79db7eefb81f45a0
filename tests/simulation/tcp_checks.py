"""Invariants of the two ends of a connection, whatever happens to the connection itself.

messages   each message from one end reaches the other once, in order, over any number of connections
payloads   each lies in the place that its credit names, once, as it was sent; nothing else is written
replaced   a replaced start of a job is not served any more, however late it wakes
cut        a rank whose connections were only cut is not lost
"""

from __future__ import annotations

import select
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.net.payload_frame import PayloadHeader
from stager.job_listener import JobListener
from stager.payload_line import PayloadConnection, PayloadTarget
from stager.service import StagerService
from stager.tcp import TcpTrainersPort
from tests.simulation.checks import UNSEEN_FAULTS
from tests.simulation.runtime import SIM
from trainer_side.ranks.tcp_stager_port import TcpStagerPort

if TYPE_CHECKING:
    from tests.simulation.tcp_world import TcpWorld

__all__ = ["PlayedTcpPort", "TcpChecks", "start_of", "watch_ports"]

_WAKES_MAX = 2

Who = tuple[bytes, int]  # `start_of`, rank


def start_of(incarnation: bytes, generation: int) -> bytes:
    """Key for one start of a job and the number of its ranks' restarts."""
    return incarnation + generation.to_bytes(2, "big")


class _Sent:
    """A payload with the bytes that it had when it was sent."""

    def __init__(self, header: tuple[int, int], payload: memoryview, what: tuple[int, int]) -> None:
        self.slot, self.nbytes = header
        self.crc32, self.what = zlib.crc32(payload), what
        self.landed = False


class TcpChecks:
    """The checks of one world.

    Attributes:
        joined: The jobs in the order in which they were first served.
    """

    def __init__(self, world: TcpWorld) -> None:
        self.joined: list[int] = []
        self._world = world
        self._to_stager: dict[Who, list[bytes]] = defaultdict(list)
        # A stager that dies may have sent a rank messages that the next stager does not know of.
        self._to_rank: dict[Who, dict[int, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        self._hears: dict[
            Who, list[int]
        ] = {}  # the stagers that may have sent the messages that the rank has received so far
        self._heard_by_stager: dict[Who, int] = defaultdict(int)
        self._heard_by_rank: dict[Who, int] = defaultdict(int)
        self._payloads: dict[tuple[bytes, int, int], _Sent] = {}
        self._seen: dict[int, list[bytes]] = defaultdict(list)  # stager's process → starts, in order of proof

    # -- messages ------------------------------------------------------------------------------------------------

    def rank_says(self, who: Who, message: bytes) -> None:
        self._to_stager[who].append(message)

    def stager_says(self, who: Who, message: bytes) -> None:
        self._to_rank[who][SIM.now.here.number].append(message)

    def stager_hears(self, who: Who, message: bytes) -> None:
        number, sent = self._heard_by_stager[who], self._to_stager[who]
        self._heard_by_stager[who] += 1
        if sent[number : number + 1] != [message]:
            self._heard_wrong("the stager", who, number, again=message in sent[:number])

    def rank_hears(self, who: Who, messages: Sequence[bytes]) -> None:
        for message in messages:
            number, said = self._heard_by_rank[who], self._to_rank[who]
            self._heard_by_rank[who] += 1
            possible = self._hears.get(who, list(said))
            self._hears[who] = [one for one in possible if said[one][number : number + 1] == [message]]
            if not self._hears[who]:
                again = any(message in said[one][:number] for one in possible)
                self._heard_wrong("it", who, number, again=again)

    def _heard_wrong(self, whom: str, who: Who, number: int, *, again: bool) -> None:
        self._world.checks.broken(
            f"rank {who[1]} of job {int.from_bytes(who[0][:-2], 'big')}: message {number + 1} that {whom} hears is "
            f"{'one from before' if again else 'another one than was sent'}"
        )

    # -- payloads ------------------------------------------------------------------------------------------------

    def payload_sent(
        self, who: Who, number: int, slot: int, payload: memoryview, what: tuple[int, int]
    ) -> None:
        self._payloads[*who, number] = _Sent((slot, payload.nbytes), payload, what)

    def payload_begins(self, port: TcpTrainersPort, rank: int, header: PayloadHeader) -> None:
        """The payload is about to be written into a slot."""
        sent = self._sent(port, rank, header)
        if sent.landed:
            self._world.checks.broken(
                f"payload {header.number} of rank {rank} is written into the ring twice"
            )
        self._world.payload_lands(rank, header.slot, sent.what)

    def payload_landed(
        self, port: TcpTrainersPort, rank: int, header: PayloadHeader, target: PayloadTarget
    ) -> None:
        """The whole payload was written."""
        sent = self._sent(port, rank, header)
        sent.landed = True
        crc32 = 0
        for piece in target.pieces:
            crc32 = zlib.crc32(target.memory[piece.offset : piece.end], crc32)
        if crc32 != sent.crc32:
            self._world.checks.broken(
                f"payload {header.number} of rank {rank} lies in its slot with other bytes"
            )
        self._world.payload_landed(rank, header.slot, target.memory, target.pieces)

    def _sent(self, port: TcpTrainersPort, rank: int, header: PayloadHeader) -> _Sent:
        sent = self._payloads.get((start_of(port.incarnation, port.generation), rank, header.number))
        if sent is None or (sent.slot, sent.nbytes) != (header.slot, header.nbytes):
            self._world.checks.broken(f"rank {rank} has sent no payload {header}")
        assert sent is not None
        return sent

    # -- who is served -------------------------------------------------------------------------------------------

    def proved(self, incarnation: bytes) -> None:
        """A rank of this start has proved the key to the current stager process."""
        seen = self._seen[SIM.now.here.number]
        if incarnation not in seen:
            seen.append(incarnation)

    def served(self, port: TcpTrainersPort) -> None:
        """This start of a job is served from now on."""
        world, seen = self._world, self._seen[SIM.now.here.number]
        job = world.job_of(port.incarnation)
        if job.number not in self.joined:
            self.joined.append(job.number)
        SIM.now.here.notes["job"] = job
        later = [world.job_of(one) for one in seen[seen.index(port.incarnation) + 1 :]]
        for other in later:
            if other.launch == job.launch and other.number > job.number:
                world.checks.broken(
                    f"job {job.number} is served, and was replaced by job {other.number} before"
                )

    def lost(self, rank: int, reason: str) -> None:
        """The stager declares a rank lost."""
        plan = self._world.plan
        if all(fault.what in UNSEEN_FAULTS for fault in plan.faults) and not plan.torn_share:
            self._world.checks.broken(
                f"connections were cut, and no more than that, and rank {rank} {reason}"
            )


class PlayedTcpPort(TcpStagerPort):
    """The real port; records the messages that it sends and receives."""

    def play(self, checks: TcpChecks, who: Who) -> None:
        """Set up the recording, before anything is sent."""
        self._checks, self._who = checks, who
        self.next_frame = (-1, -1)
        self.wakes = self._over_seen = 0

    @property
    def has_left(self) -> bool:
        return self._has_disconnected

    def has_news(self) -> bool:
        if self.wakes >= _WAKES_MAX:
            return False
        sock: Any = self._sock
        is_readable = sock is not None and sock.mask() & select.POLLIN
        return bool(is_readable or len(self._acknowledged) > self._over_seen or not self._reopened.empty())

    def send(self, message: bytes) -> None:
        self._raise_if_failed()
        self._checks.rank_says(self._who, message)
        super().send(message)

    def poll(self) -> list[bytes]:
        messages = super().poll()
        self.wakes, self._over_seen = 0, len(self._acknowledged)
        self._checks.rank_hears(self._who, messages)
        return messages

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        self._raise_if_failed()
        self._checks.payload_sent(self._who, self._last_number + 1, slot, payload, self.next_frame)
        return super().send_payload(payload, slot, pieces)


class _NotedService(StagerService):
    """The real service; registers with the checks while it serves."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        SIM.now.here.notes["service"] = self

    def close(self) -> None:
        SIM.now.here.notes.pop("service", None)
        super().close()


def watch_ports() -> None:
    """Make the stager's ports report to the checks. Call once per process."""
    import stager.service

    setattr(stager.service, "StagerService", _NotedService)  # noqa: B010
    _watch_messages()
    _watch_payloads()
    _watch_listener()


def _checks() -> TcpChecks:
    made: TcpChecks = SIM.world.tcp_checks
    return made


def _watch_messages() -> None:
    send, poll, drop = TcpTrainersPort.send, TcpTrainersPort.poll, TcpTrainersPort.drop

    def noted_send(self: TcpTrainersPort, rank: int, message: bytes) -> None:
        if not self._ranks[rank].lost:
            _checks().stager_says((start_of(self.incarnation, self.generation), rank), message)
        send(self, rank, message)

    def noted_poll(self: TcpTrainersPort) -> Any:
        result = poll(self)
        for rank, message in result.messages:
            _checks().stager_hears((start_of(self.incarnation, self.generation), rank), message)
        return result

    def noted_drop(self: TcpTrainersPort, rank: int, reason: str) -> None:
        if not (self._ranks[rank].lost or self._ranks[rank].left):
            _checks().lost(rank, reason)
        drop(self, rank, reason)

    _replace(TcpTrainersPort, send=noted_send, poll=noted_poll, drop=noted_drop)


def _watch_payloads() -> None:
    open_target, on_received = TcpTrainersPort._open_target, TcpTrainersPort._on_payload_received
    post = TcpTrainersPort.post
    read_into_target = PayloadConnection._read_into_target

    def noted_open_target(self: TcpTrainersPort, number: int, header: PayloadHeader) -> PayloadTarget | None:
        found = open_target(self, number, header)
        if found is not None and found.nbytes == header.nbytes:
            _checks().payload_begins(self, number, header)
        return found

    def noted_received(
        self: TcpTrainersPort, number: int, header: PayloadHeader, target: PayloadTarget | None
    ) -> None:
        if target is not None and header.number not in self._ranks[number].received_numbers:
            if target is self._targets.get((number, header.slot)):
                _checks().payload_landed(self, number, header, target)
            else:
                SIM.world.checks.broken("a payload is taken for a place that was withdrawn")
        on_received(self, number, header, target)

    def noted_post(self: TcpTrainersPort, rank: int, slot: int, memory: memoryview, pieces: Any) -> None:
        SIM.world.receive_posted(rank, slot)
        post(self, rank, slot, memory, pieces)

    def noted_read_into_target(self: PayloadConnection) -> int:
        port: TcpTrainersPort = self._open_target.func.__self__  # type: ignore[attr-defined]
        if not any(target is self._target for target in port._targets.values()):
            SIM.world.checks.broken("a payload is written into a place that was withdrawn")
        return read_into_target(self)

    _replace(
        TcpTrainersPort, _open_target=noted_open_target, _on_payload_received=noted_received, post=noted_post
    )
    _replace(PayloadConnection, _read_into_target=noted_read_into_target)


def _watch_listener() -> None:
    assign, open_job = JobListener._assign, JobListener.open_job

    def noted_proof(self: JobListener, sock: Any, hello: Any, received: int) -> None:
        _checks().proved(hello.incarnation)
        assign(self, sock, hello, received)

    def noted_job(self: JobListener, port: TcpTrainersPort, *refusal: Any) -> None:
        _checks().served(port)
        open_job(self, port, *refusal)

    _replace(JobListener, _assign=noted_proof, open_job=noted_job)


def _replace(owner: type, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(owner, name, method)
