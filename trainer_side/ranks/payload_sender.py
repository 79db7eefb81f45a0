"""A thread that sends payloads over one connection to the stager, and reconnects if that is cut.

    send ─► waiting ─► in flight ── receipt ─► over
                          └── the connection ends: reconnect, and resend every payload without a receipt

The thread releases the GIL during system calls: training continues while the kernel copies.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.net.payload_frame import RECEIPT, PayloadHeader
from holdfast.net.tls import AnySocket
from trainer_side.background_thread import BackgroundThread, ThreadDied
from trainer_side.ranks.connecting import Connector

_log = logging.getLogger("holdfast.trainer.tcp")

_TRY_SECONDS_MAX = 5.0  # of one try to connect; then the thread checks whether the sender was closed
_PAUSE_SECONDS = 0.2
_POLL_SECONDS = 1.0
_IDLE_WAIT_SECONDS_MAX = 5.0
_BYTES_PER_CALL_MAX = 4 << 20
_TASK = "sends payloads to the stager"
# More than one TLS record, so that no decrypted bytes stay behind unseen by poll.
_BYTES_READ_MAX = 32 * 1024


class PayloadSender:
    """One payload connection and its thread. `send` and `load` are for the link's thread, `reconnect` and `close` for
    any.

    Args:
        on_receipt: Called from the sender's thread with the number of each payload whose receipt has arrived.
        on_death: Called from the sender's thread if an exception ends it: no payload is sent from then on.
        stall_seconds: Without progress for this time, the thread reconnects.
    """

    def __init__(
        self,
        connector: Connector,
        channel: int,
        *,
        on_receipt: Callable[[int], None],
        on_death: Callable[[ThreadDied], object],
        stall_seconds: float,
    ) -> None:
        self._connector, self._channel = connector, channel
        self._on_receipt, self._stall_seconds = on_receipt, stall_seconds
        self._lock = threading.Lock()
        self._waiting: deque[tuple[PayloadHeader, memoryview]] = deque()
        self._in_flight: OrderedDict[int, tuple[PayloadHeader, memoryview]] = OrderedDict()
        self.load = 0  # bytes that have no receipt yet
        self._closed = False
        self._reconnect_requested = False
        self._moved_at = 0.0  # of bytes of the connection
        self._idle = threading.Event()  # set while the thread reads no payload's memory
        self._idle.set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._on_death = on_death
        self._thread = BackgroundThread(
            f"holdfast-payloads-{channel}",
            self._run,
            rank=connector.rank,
            task=_TASK,
            on_death=self._on_thread_death,
        )
        self._thread.start()

    def send(self, header: PayloadHeader, payload: memoryview) -> None:
        """Queue a payload; its memory must not change until its receipt has arrived."""
        with self._lock:
            self._waiting.append((header, payload))
            self.load += header.nbytes
        os.eventfd_write(self._wake, 1)

    def reconnect(self) -> None:
        """Reconnect: the message connection was cut, so this one may be dead, too, without an error."""
        self._reconnect_requested = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop sending; wait until the thread reads no payload's memory."""
        self._closed = True
        os.eventfd_write(self._wake, 1)
        # Returns at once while the thread connects: it then reads no payload.
        self._idle.wait(_IDLE_WAIT_SECONDS_MAX)

    def _on_thread_death(self, error: ThreadDied) -> None:
        self._idle.set()
        self._on_death(error)

    def _run(self) -> None:
        while not self._closed:
            try:
                sock = self._connector.open(self._channel, seconds_max=_TRY_SECONDS_MAX, resuming=True).sock
            except HoldfastError as error:
                # The message connection decides whether the stager is lost.
                _log.debug("no connection for payloads: %s", error)
                if not self._closed:
                    time.sleep(_PAUSE_SECONDS)
                continue
            with sock:
                self._idle.clear()
                try:
                    self._serve(sock)
                except OSError as error:
                    _log.debug("a connection for payloads has ended: %s", error)
                finally:
                    self._idle.set()
            with self._lock:
                self._waiting.extendleft(reversed(self._in_flight.values()))
                self._in_flight.clear()

    def _serve(self, sock: AnySocket) -> None:
        """Send payloads and read receipts until `close` or `reconnect`. OSError: it ended, or made no progress."""
        self._reconnect_requested, self._moved_at = False, time.monotonic()
        parts: deque[memoryview] = deque()  # of the payload that is being written
        receipts = bytearray()
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(sock, select.POLLIN)
        while not (self._closed or self._reconnect_requested):
            if not parts and (following := self.next_payload()) is not None:
                header, payload = following
                parts.extend((memoryview(header.to_bytes()), payload))
                self._moved_at = time.monotonic()
            poll.modify(sock, select.POLLIN | (select.POLLOUT if parts else 0))
            for descriptor, mask in poll.poll(_POLL_SECONDS * 1000):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                if mask & select.POLLOUT:
                    self._write(sock, parts)
                if mask & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._read_receipts(sock, receipts)
            if self._in_flight and time.monotonic() - self._moved_at > self._stall_seconds:
                raise TimeoutError(f"nothing has moved for {self._stall_seconds:g} s")

    def next_payload(self) -> tuple[PayloadHeader, memoryview] | None:
        """Return the next payload, and count it as in flight. The sender's thread."""
        with self._lock:
            if not self._waiting:
                return None
            header, payload = self._waiting.popleft()
            self._in_flight[header.number] = (header, payload)
            return header, payload

    def _write(self, sock: AnySocket, parts: deque[memoryview]) -> None:
        try:
            sent = sock.sendmsg([part[:_BYTES_PER_CALL_MAX] for part in parts])
        except BlockingIOError:
            return
        self._moved_at = time.monotonic()
        while sent > 0:
            part = parts.popleft()
            if sent < len(part):
                parts.appendleft(part[sent:])
            sent -= min(sent, len(part))

    def _read_receipts(self, sock: AnySocket, receipts: bytearray) -> None:
        try:
            data = sock.recv(_BYTES_READ_MAX)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the stager has hung up")
        self._moved_at = time.monotonic()
        receipts += data
        complete_bytes = len(receipts) - len(receipts) % RECEIPT.size
        for (number,) in RECEIPT.iter_unpack(bytes(receipts[:complete_bytes])):
            self._acknowledge(number)
        del receipts[:complete_bytes]

    def _acknowledge(self, number: int) -> None:
        with self._lock:
            found = self._in_flight.pop(number, None)
            if found is None:
                return
            self.load -= found[0].nbytes
        self._on_receipt(number)
