"""Control messages over connections that may be cut: each arrives once, in order, however often it is sent.

    put ─► unacknowledged ─► next_outgoing ═ connection ═► data_received ─► messages
              ▲   └─ dropped ◄── acknowledged count, in the header of each record that comes back
              └── resume(count) after a cut: messages that the other side has not received are sent again

    record   offset 0       4        8               16
                    kind    nbytes   received so far  the message …

A message's number is its position in the order of sending. Pure: the owner moves bytes between a line and a socket.
"""

from __future__ import annotations

import struct
from collections import deque

import numpy as np

from holdfast.errors import ProtocolError
from holdfast.wire.frames import MAX_MESSAGE_BYTES

UNACKNOWLEDGED_BYTES_MAX = 2 * MAX_MESSAGE_BYTES
SCRATCH_BYTES = 64 * 1024
_RECORD = struct.Struct("<IIQ")
_MESSAGE, _ACKNOWLEDGED = 1, 2
_KEPT_BYTES = 128  # overhead of a kept message beside its own bytes


class MessageLine:
    """One end of a message connection, kept over reconnects. One thread. `scratch`: receive buffer, which lines of one
    thread may share.
    """

    def __init__(self, scratch: bytearray | None = None) -> None:
        self.received = 0
        self._acknowledged = 0  # how many of our messages the other side has acknowledged
        self._acknowledged_to_peer = 0  # how many of its messages we have acknowledged
        self._unacknowledged: deque[bytes] = deque()
        self._unacknowledged_bytes = 0  # of the unacknowledged messages, with overhead
        self._sending = 0  # how many unacknowledged messages the present connection has begun to send
        self._outgoing: deque[memoryview] = deque()
        self._scratch = bytearray(SCRATCH_BYTES) if scratch is None else scratch
        self._partial_record = b""  # the received beginning of an incomplete record
        self._large: memoryview | None = None  # a message that does not fit into the scratch buffer
        self._large_filled = 0

    # -- out ---------------------------------------------------------------------------------------------------------

    @property
    def unacknowledged(self) -> int:
        """How many messages the other side has not acknowledged."""
        return len(self._unacknowledged)

    def put(self, message: bytes) -> None:
        """Queue a message. Raises `ProtocolError`: too many messages are unacknowledged."""
        if self._unacknowledged_bytes + len(message) + _KEPT_BYTES > UNACKNOWLEDGED_BYTES_MAX:
            raise ProtocolError(
                f"has not acknowledged {len(self._unacknowledged)} control messages, which take "
                f"{self._unacknowledged_bytes} bytes; expected at most {UNACKNOWLEDGED_BYTES_MAX}"
            )
        self._unacknowledged.append(message)
        self._unacknowledged_bytes += len(message) + _KEPT_BYTES

    def next_outgoing(self) -> memoryview | None:
        """The bytes to write next, at least one; None if all were written. Report written bytes by `mark_written`."""
        if not self._outgoing:
            if self._sending < len(self._unacknowledged):
                message = self._unacknowledged[self._sending]
                self._sending += 1
                self._enqueue(_MESSAGE, message)
            elif self._acknowledged_to_peer < self.received:
                self._enqueue(_ACKNOWLEDGED, b"")
        return self._outgoing[0] if self._outgoing else None

    def mark_written(self, nbytes: int) -> None:
        """Note that this many bytes of `next_outgoing` were written."""
        head = self._outgoing.popleft()
        if nbytes < len(head):
            self._outgoing.appendleft(head[nbytes:])

    def _enqueue(self, kind: int, message: bytes) -> None:
        self._acknowledged_to_peer = self.received
        header = _RECORD.pack(kind, len(message), self.received)
        if len(message) < SCRATCH_BYTES:
            self._outgoing.append(memoryview(header + message))
        else:
            self._outgoing.extend((memoryview(header), memoryview(message)))

    # -- in ----------------------------------------------------------------------------------------------------------

    def receive_buffer(self) -> memoryview:
        """The buffer to receive into. Report the received bytes by `data_received`."""
        if self._large is not None:
            return self._large[self._large_filled :]
        begun = len(self._partial_record)
        self._scratch[:begun] = self._partial_record
        return memoryview(self._scratch)[begun:]

    def data_received(self, nbytes: int) -> list[bytes]:
        """Take `nbytes` of the last `receive_buffer`; return complete messages.

        Raises `ProtocolError`: close the connection.
        """
        if self._large is not None:
            self._large_filled += nbytes
            if self._large_filled < len(self._large):
                return []
            message, self._large = bytes(self._large), None
            self.received += 1
            return [message]
        return self._parse(len(self._partial_record) + nbytes)

    def _parse(self, filled: int) -> list[bytes]:
        messages: list[bytes] = []
        view = memoryview(self._scratch)
        place = 0
        while filled - place >= _RECORD.size:
            kind, size, acknowledged = _RECORD.unpack_from(self._scratch, place)
            self._check_record(kind, size, acknowledged)
            self._acknowledge(acknowledged)
            body = place + _RECORD.size
            if body + size > filled:
                if size > SCRATCH_BYTES - _RECORD.size:
                    # Not a bytearray, which is zeroed: these pages take no memory until bytes arrive.
                    self._large = np.empty(size, dtype=np.uint8).data
                    self._large_filled = filled - body
                    self._large[: self._large_filled] = view[body:filled]
                    place = filled
                break
            if kind == _MESSAGE:
                messages.append(bytes(view[body : body + size]))
                self.received += 1
            place = body + size
        self._partial_record = bytes(view[place:filled])
        return messages

    def _check_record(self, kind: int, size: int, acknowledged: int) -> None:
        if kind not in {_MESSAGE, _ACKNOWLEDGED} or (kind == _ACKNOWLEDGED and size):
            raise ProtocolError(
                f"a record of kind {kind} and {size} bytes; expected kind 1, or 2 and no bytes"
            )
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a control message of {size} bytes, expected at most {MAX_MESSAGE_BYTES}")
        if not self._acknowledged <= acknowledged <= self._acknowledged + self._sending:
            raise ProtocolError(
                f"it says that it has received {acknowledged} messages, expected {self._acknowledged} to "
                f"{self._acknowledged + self._sending}"
            )

    def _acknowledge(self, count: int) -> None:
        for _ in range(count - self._acknowledged):
            self._unacknowledged_bytes -= len(self._unacknowledged.popleft()) + _KEPT_BYTES
            self._sending -= 1
        self._acknowledged = count

    # -- cut ---------------------------------------------------------------------------------------------------------

    def resume(self, received: int) -> None:
        """Continue over a new connection; the other side has `received` of our messages. Raises `ProtocolError`."""
        sent = self._acknowledged + len(self._unacknowledged)
        if not self._acknowledged <= received <= sent:
            raise ProtocolError(
                f"it says that it has received {received} messages, expected {self._acknowledged} to {sent}"
            )
        self._sending = len(self._unacknowledged)
        self._acknowledge(received)
        self._sending = 0
        self._acknowledged_to_peer = self.received  # the handshake has acknowledged them
        self._outgoing.clear()
        self._partial_record, self._large = b"", None
