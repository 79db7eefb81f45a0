"""Control messages and payloads between a rank and a standalone stager, over TCP connections that may be cut.

message connection ─ cut ─► reconnected within reconnect_seconds_max ─► resumes without loss
└── not ─► PeerLost            (payload connections: payload_sender.py)
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.config import TrainerConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.net.address import parse_address
from holdfast.net.handshake import CHANNELS_MAX, MESSAGES_CHANNEL, JobStart
from holdfast.net.message_line import MessageLine
from holdfast.net.payload_frame import PayloadHeader
from holdfast.net.tls import AnySocket, RankTls
from holdfast.wire.frames import Kind, encode
from trainer_side.background_thread import BackgroundThread, ThreadDied
from trainer_side.ranks.connecting import Connector, OpenedConnection
from trainer_side.ranks.payload_sender import PayloadSender

_log = logging.getLogger("holdfast.trainer.tcp")

_PAUSE_SECONDS = 1e-3
_READS_PER_POLL_MAX = 64


class TcpStagerPort:
    """The `StagerPort` over TCP. Get one by `connect_to_stager`."""

    has_threads = True

    def __init__(
        self,
        connector: Connector,
        opened: OpenedConnection,
        *,
        connections: int,
        reconnect_seconds_max: float,
    ) -> None:
        self._connector, self._reconnect_seconds_max = connector, reconnect_seconds_max
        self.one_machine = connector.address.is_loopback
        self.processes_per_core = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) / (os.cpu_count() or 1)
        self._line = MessageLine()
        self._sock: AnySocket | None = opened.sock
        self._reopened: queue.SimpleQueue[OpenedConnection | HoldfastError] = queue.SimpleQueue()
        self._cut_at = 0.0
        self._problem: HoldfastError | None = None
        self._sender_error: ThreadDied | None = None  # not raised yet
        self._has_disconnected = False
        self._last_number = 0
        # Numbers of payloads with a receipt; the senders' threads only call the atomic `add`.
        self._acknowledged: set[int] = set()
        self._payloads_in_flight = 0  # for which `is_sent` was not True yet
        self._senders = [
            PayloadSender(
                connector,
                channel,
                on_receipt=self._acknowledged.add,
                on_death=self._on_sender_death,
                stall_seconds=reconnect_seconds_max,
            )
            for channel in range(1, 1 + min(connections, CHANNELS_MAX - 1))
        ]

    def send(self, message: bytes) -> None:
        """As `StagerPort.send`; a cut connection loses no message."""
        self._raise_if_failed()
        try:
            self._line.put(message)
        except ProtocolError as error:
            self._fail(ProtocolError(f"the stager: {error}"))
            self._raise_if_failed()
        self._write()

    def poll(self) -> list[bytes]:
        self._raise_if_failed()
        if self._sock is None:
            self._resume_if_reopened()
        messages: list[bytes] = []
        for _ in range(_READS_PER_POLL_MAX):
            if self._sock is None:
                break
            try:
                nbytes = self._sock.recv_into(self._line.receive_buffer())
            except BlockingIOError:
                break
            except OSError as error:
                self._on_connection_cut(error)
                break
            if nbytes == 0:
                self._on_connection_cut(ConnectionResetError("the stager has hung up"))
                break
            try:
                messages += self._line.data_received(nbytes)
            except ProtocolError as error:
                self._fail(ProtocolError(f"the stager: {error}; install the same holdfast on all machines"))
                self._raise_if_failed()
        self._write()
        return messages

    def _write(self) -> None:
        while self._sock is not None and (data := self._line.next_outgoing()) is not None:
            try:
                self._line.mark_written(self._sock.send(data))
            except BlockingIOError:
                return
            except OSError as error:
                self._on_connection_cut(error)

    def _on_connection_cut(self, error: OSError) -> None:
        assert self._sock is not None
        self._sock.close()
        self._sock, self._cut_at = None, time.monotonic()
        _log.log(
            logging.DEBUG if self._has_disconnected else logging.WARNING,
            "the connection to the stager was cut (%s); it is made again within %g s",
            error.strerror or error,
            self._reconnect_seconds_max,
        )
        task = "makes the connection to the stager again"
        BackgroundThread(
            "holdfast-reconnect",
            self._reopen,
            rank=self._connector.rank,
            task=task,
            on_death=self._reopened.put,
        ).start()

    def _reopen(self) -> None:
        found: OpenedConnection | HoldfastError
        try:
            found = self._connector.open(
                MESSAGES_CHANNEL,
                seconds_max=self._reconnect_seconds_max,
                received=self._line.received,
                resuming=True,
            )
        except HoldfastError as error:
            found = error
        self._reopened.put(found)
        if self._problem is not None:  # `poll` will not take the connection
            self._close_reopened()

    def _close_reopened(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._reopened.get_nowait()
                if isinstance(found, OpenedConnection):
                    found.sock.close()

    def _resume_if_reopened(self) -> None:
        try:
            found = self._reopened.get_nowait()
        except queue.Empty:
            return
        if isinstance(found, HoldfastError):
            self._fail(found)
            self._raise_if_failed()
            return
        try:
            self._line.resume(found.received)
        except ProtocolError as error:
            found.sock.close()
            self._fail(ProtocolError(f"the stager: {error}"))
            self._raise_if_failed()
            return
        self._sock = found.sock
        _log.info("connected to the stager again after %.1f s", time.monotonic() - self._cut_at)
        for sender in self._senders:
            sender.reconnect()

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:  # noqa: ARG002
        """As `StagerPort.send_payload`. `pieces` is unused: the stager knows where each piece belongs."""
        self._raise_if_failed()
        self._last_number += 1
        self._payloads_in_flight += 1
        header = PayloadHeader(self._last_number, slot, payload.nbytes)
        min(self._senders, key=lambda sender: sender.load).send(header, payload)
        return self._last_number

    def is_sent(self, handle: int) -> bool:
        self._raise_if_failed()
        if handle not in self._acknowledged:
            return False
        self._acknowledged.discard(handle)
        self._payloads_in_flight -= 1
        return True

    def disconnect(self, seconds_max: float, *, lost: bool = False) -> None:
        if self._has_disconnected:
            return
        self._has_disconnected = True
        deadline = time.monotonic() + (0.0 if lost else seconds_max)
        try:
            self.send(encode(Kind.BYE))
            while time.monotonic() < deadline and (
                self._line.unacknowledged or self._payloads_in_flight > len(self._acknowledged)
            ):
                self.poll()
                time.sleep(_PAUSE_SECONDS)
        except HoldfastError as error:
            _log.debug("left without a good-bye: %s", error)
        self._fail(PeerLost("this rank has left the stager"))

    def _on_sender_death(self, error: ThreadDied) -> None:
        """Keep the error for the next call of the link's thread. Called in the sender's thread."""
        self._sender_error = error

    def _raise_if_failed(self) -> None:
        if self._sender_error is not None:
            died, self._sender_error = self._sender_error, None  # raise once: BYE to the stager may follow
            raise died
        if self._problem is not None:
            raise self._problem

    def _fail(self, problem: HoldfastError) -> None:
        """Close all connections; each later call raises `problem`, and the payloads' memory may be reused."""
        if self._problem is not None:
            return
        self._problem = problem
        for sender in self._senders:
            sender.close()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._close_reopened()


class StagerTarget(NamedTuple):
    """A stager to connect to."""

    address: str  # HOST:PORT
    key: bytes | None  # None: that of a stager of this user on this machine
    lead_attempt: int = 0  # as `Hello.lead_attempt`


def connect_to_stager(
    config: TrainerConfig, target: StagerTarget, *, rank: int, ranks: int, start: JobStart, seconds_max: float
) -> TcpStagerPort:
    """Connect to a stager and be admitted, with the settings of `config`; raises as `Connector.open`. Main thread."""
    connector = Connector(
        parse_address(target.address),
        target.key,
        rank=rank,
        ranks=ranks,
        start=start,
        tls=None if config.tls_ca is None else RankTls(config.tls_ca),
        lead_attempt=target.lead_attempt,
    )
    opened = connector.open(MESSAGES_CHANNEL, seconds_max=seconds_max)
    return TcpStagerPort(
        connector, opened, connections=config.connections, reconnect_seconds_max=config.reconnect_seconds_max
    )
