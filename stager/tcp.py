"""The training ranks of one job over TCP: for each a message connection and some payload connections; any may be cut.

    admitted ─► here ── connection ends ──► cut ── reconnects within reconnect_seconds_max ──► here
                 └── says BYE ─► gone         └── does not ──► lost

Only the message connection decides whether a rank is here; its rank simply reopens a payload connection. Messages are
counted, so that each arrives once even over several connections. One thread; no method blocks.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import ProtocolError
from holdfast.image.entries import Extent
from holdfast.net.handshake import MESSAGES_CHANNEL, Hello, Status, admission
from holdfast.net.message_line import SCRATCH_BYTES, MessageLine
from holdfast.net.payload_frame import PayloadHeader, ReceivedNumbers
from holdfast.net.tls import AnySocket
from stager.payload_line import PayloadConnection, PayloadTarget
from stager.reactor import Reactor
from stager.trainers_port import PollResult

_log = logging.getLogger("holdfast.stager.tcp")

_READS_PER_TURN_MAX = 64  # so that a rank that sends without pause does not delay payloads


@dataclass(slots=True)
class _Rank:
    line: MessageLine
    sock: AnySocket | None = None
    was_admitted: bool = False  # it was admitted here before
    disconnected_at: float | None = None  # since when it has no connection; None before the first
    blocked: bool = False
    left: bool = False
    lost: bool = False
    received_numbers: ReceivedNumbers = field(default_factory=ReceivedNumbers)
    payload_socks: dict[int, AnySocket] = field(default_factory=dict)


class TcpTrainersPort:
    """The `TrainersPort` of a job over TCP.

    Args:
        hello: The first HELLO of the job: its launch, its incarnation, the number of ranks.
        reconnect_seconds_max: How long a rank may take to reconnect after a cut.
        start_seconds_max: How long after the first rank the others may connect.

    Attributes:
        ranks: Number of ranks. `launch`, `incarnation`, `generation`, `lead_attempt`: identify the job, as in `Hello`;
            `lead_attempt` 0: that of its ranks may differ.
    """

    def __init__(
        self,
        reactor: Reactor,
        hello: Hello,
        *,
        reconnect_seconds_max: float,
        start_seconds_max: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reactor, self._clock = reactor, clock
        self.ranks, self.launch = hello.ranks, hello.launch
        self.incarnation, self.generation = hello.incarnation, hello.generation
        self.lead_attempt = hello.lead_attempt
        self._reconnect_seconds_max = reconnect_seconds_max
        self._start_deadline = clock() + start_seconds_max
        self._start_seconds_max = start_seconds_max
        # Filled on demand: the number of ranks is a claim of the first hello.
        self._ranks: defaultdict[int, _Rank] = defaultdict(self._new_rank)
        self._scratch = bytearray(SCRATCH_BYTES)
        self._start_pending = True  # ranks that have not connected yet may still do so
        self._targets: dict[tuple[int, int], PayloadTarget] = {}
        self._received: dict[tuple[int, int], int] = {}
        self._messages: list[tuple[int, bytes]] = []
        self._newly_lost: list[tuple[int, str]] = []

    def _new_rank(self) -> _Rank:
        return _Rank(MessageLine(self._scratch))

    # -- connections -------------------------------------------------------------------------------------------------

    def admit(self, sock: AnySocket, hello: Hello, received: int) -> None:
        """Accept a connection of this job; it replaces an older one on the same channel. `received`: how many of our
        messages the rank has received.
        """
        rank = self._ranks[hello.rank]
        if rank.lost or rank.left:
            refuse(self._reactor, sock, Status.LOST, "this rank was given up: its job goes on without it")
            return
        if hello.resuming and not rank.was_admitted:
            # Another stager has counted this rank's messages; other ranks of its job were admitted here first.
            refuse(self._reactor, sock, Status.LOST, "this stager has not admitted this rank before")
            return
        own = rank.line.received if hello.channel == MESSAGES_CHANNEL else 0
        try:
            if hello.channel == MESSAGES_CHANNEL:
                rank.line.resume(received)
            _send_answer(sock, admission(Status.ADMITTED, own))
        except (ProtocolError, OSError) as error:
            _log.warning("rank %d: its connection is refused: %s", hello.rank, error)
            self._reactor.close(sock)
            return
        if hello.channel == MESSAGES_CHANNEL:
            self._attach_messages(hello.rank, rank, sock)
        else:
            self._attach_payloads(hello.rank, rank, hello.channel, sock)

    def _attach_messages(self, number: int, rank: _Rank, sock: AnySocket) -> None:
        if rank.sock is not None:
            self._reactor.close(rank.sock)
        if rank.disconnected_at is not None:
            _log.info("rank %d is connected again after %.1f s", number, self._clock() - rank.disconnected_at)
        rank.sock, rank.disconnected_at, rank.blocked, rank.was_admitted = sock, None, False, True
        self._reactor.watch(sock, functools.partial(self._messages_ready, number))
        self._write(number)

    def _attach_payloads(self, number: int, rank: _Rank, channel: int, sock: AnySocket) -> None:
        old = rank.payload_socks.pop(channel, None)
        if old is not None:
            self._reactor.close(old)
        rank.payload_socks[channel] = sock
        line = PayloadConnection(
            sock,
            open_target=functools.partial(self._open_target, number),
            on_received=functools.partial(self._on_payload_received, number),
        )
        self._reactor.watch(sock, functools.partial(self._payload_ready, number, channel, sock, line))

    @property
    def is_alive(self) -> bool:
        """Whether a rank of the job is connected; keepalive ends the connection of a dead machine in about 10 s."""
        return any(rank.sock is not None for rank in self._ranks.values())

    @property
    def connected(self) -> set[int]:
        """The connected ranks that have not said BYE."""
        return {number for number, rank in self._ranks.items() if rank.sock is not None and not rank.left}

    def drop_all(self, reason: str) -> None:
        """Drop every rank that has not left."""
        for number in range(self.ranks):
            self.drop(number, reason)

    def close(self) -> None:
        for number in self._ranks:
            self._close_connections(number)

    def fileno(self) -> int:
        return self._reactor.fileno()

    # -- control messages --------------------------------------------------------------------------------------------

    def send(self, rank: int, message: bytes) -> None:
        """Send a control message; ignored for a lost rank. A rank that does not acknowledge messages is dropped."""
        if self._ranks[rank].lost:
            return
        try:
            self._ranks[rank].line.put(message)
        except ProtocolError as error:
            self.drop(rank, str(error))
        else:
            self._write(rank)

    @property
    def unsent(self) -> bool:
        """False: messages in flight move without being polled."""
        return False

    def unsent_to(self, rank: int) -> int:
        """How many control messages this rank has not received yet."""
        return 0 if self._ranks[rank].lost else self._ranks[rank].line.unacknowledged

    def poll(self) -> PollResult:
        self._reactor.run_once()
        now = self._clock()
        for number, rank in self._ranks.items():
            if rank.lost or rank.left or rank.disconnected_at is None:
                continue
            if now > rank.disconnected_at + self._reconnect_seconds_max:
                self.drop(
                    number,
                    f"has had no connection for {self._reconnect_seconds_max:g} s: its process is dead, or cut off",
                )
        if self._start_pending and now > self._start_deadline:
            self._start_pending = False
            for number in range(self.ranks):
                rank = self._ranks[number]
                if rank.sock is None and rank.disconnected_at is None:
                    self.drop(
                        number, f"did not come within {self._start_seconds_max:g} s after the first rank"
                    )
        result = PollResult(self._messages, self._newly_lost)
        self._messages, self._newly_lost = [], []
        return result

    def _messages_ready(self, number: int, readable: bool, writable: bool) -> None:
        if writable:
            self._ranks[number].blocked = False
            self._write(number)
        if readable:
            self._read(number)

    def _read(self, number: int) -> None:
        rank = self._ranks[number]
        for _ in range(_READS_PER_TURN_MAX):
            if rank.sock is None:
                return
            try:
                nbytes = rank.sock.recv_into(rank.line.receive_buffer())
                if nbytes == 0:
                    self._close_messages(number)
                    return
                self._messages.extend((number, message) for message in rank.line.data_received(nbytes))
            except BlockingIOError:
                break
            except OSError as error:
                _log.debug("rank %d: %s", number, error)
                self._close_messages(number)
                return
            except ProtocolError as error:
                self.drop(number, f"broke the protocol: {error}")
                return
        self._write(number)  # acknowledges the messages

    def _write(self, number: int) -> None:
        rank = self._ranks[number]
        while rank.sock is not None and not rank.blocked:
            data = rank.line.next_outgoing()
            if data is None:
                break
            try:
                rank.line.mark_written(rank.sock.send(data))
            except BlockingIOError:
                rank.blocked = True
            except OSError as error:
                _log.debug("rank %d: %s", number, error)
                self._close_messages(number)
                return
        if rank.sock is not None:
            self._reactor.watch_writable(rank.sock, rank.blocked)

    def _close_messages(self, number: int) -> None:
        rank = self._ranks[number]
        if rank.sock is not None:
            self._reactor.close(rank.sock)
            rank.sock, rank.disconnected_at = None, self._clock()
            if not rank.left:
                _log.debug("rank %d: its connection has ended", number)

    # -- payloads ----------------------------------------------------------------------------------------------------

    def post(self, rank: int, slot: int, memory: memoryview, pieces: tuple[Extent, ...]) -> None:
        self.cancel(rank, slot)
        self._targets[rank, slot] = PayloadTarget(memory, pieces, sum(piece.nbytes for piece in pieces))

    def pop_received(self, rank: int, slot: int) -> int | None:
        return self._received.pop((rank, slot), None)

    def cancel(self, rank: int, slot: int) -> None:
        target = self._targets.pop((rank, slot), None)
        if target is not None:
            target.wanted = False
        self._received.pop((rank, slot), None)

    def _open_target(self, number: int, header: PayloadHeader) -> PayloadTarget | None:
        if header.number in self._ranks[number].received_numbers:
            return None
        self._ranks[number].received_numbers.check(header.number)
        return self._targets.get((number, header.slot))

    def _on_payload_received(self, number: int, header: PayloadHeader, target: PayloadTarget | None) -> None:
        rank = self._ranks[number]
        if header.number in rank.received_numbers:
            return
        rank.received_numbers.add(header.number)
        # A wrong size is reported as it is: the loop then drops the rank.
        if target is not None:
            # Otherwise a duplicate on another connection would still write to the slot, and into its next chunk.
            self.cancel(number, header.slot)
            self._received[number, header.slot] = header.nbytes

    def _payload_ready(
        self,
        number: int,
        channel: int,
        sock: AnySocket,
        line: PayloadConnection,
        readable: bool,
        writable: bool,
    ) -> None:
        try:
            if writable:
                line.write()
            if readable:
                line.read()
            self._reactor.watch_writable(sock, line.has_pending_receipts)
        except (OSError, ProtocolError) as error:
            _log.debug("rank %d, channel %d: %s", number, channel, error)
            self._reactor.close(sock)
            if self._ranks[number].payload_socks.get(channel) is sock:
                del self._ranks[number].payload_socks[channel]
            if isinstance(error, ProtocolError):
                self.drop(number, f"broke the protocol: {error}")

    # -- lost ranks --------------------------------------------------------------------------------------------------

    def mark_left(self, rank: int) -> None:
        """The rank has said BYE, or its messages are ignored: the end of its connection is no loss."""
        self._ranks[rank].left = True

    def drop(self, rank: int, reason: str) -> None:
        """Count a rank as lost: `poll` reports it once, and no more messages are sent to it."""
        of_rank = self._ranks[rank]
        if not (of_rank.lost or of_rank.left):
            of_rank.lost = True
            self._newly_lost.append((rank, f"rank {rank} {reason}"))
            self._close_connections(rank)
            of_rank.line = MessageLine(self._scratch)  # frees its unacknowledged messages

    def _close_connections(self, number: int) -> None:
        rank = self._ranks[number]
        self._close_messages(number)
        for sock in rank.payload_socks.values():
            self._reactor.close(sock)
        rank.payload_socks.clear()


def refuse(reactor: Reactor, sock: AnySocket, status: Status, text: str) -> None:
    """Send the reason of the refusal, and close the connection."""
    try:
        _send_answer(sock, admission(status, text=text))
    except OSError as error:
        _log.debug("a refused connection was not told why: %s", error)
    reactor.close(sock)


def _send_answer(sock: AnySocket, data: bytes) -> None:
    # A few hundred bytes always fit into the buffer of a new connection.
    if sock.send(data) != len(data):
        raise OSError("the connection takes no answer")
