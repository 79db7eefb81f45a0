"""A connection on which a rank sends payloads: the bytes go from the kernel straight to their targets in the ring.

    header ─► target posted for (rank, slot)? ── yes ─► recvmsg_into the slot ─► handed over ─► receipt
                        └─ no, received before, withdrawn, or another size ─► read and dropped ─► receipt

A slot's memory is written only while its target is wanted. When a target is withdrawn, or filled over another
connection, the rest of the payload is dropped.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import ProtocolError
from holdfast.image.entries import Extent
from holdfast.net.payload_frame import HEADER, RECEIPT, PayloadHeader
from holdfast.net.tls import AnySocket

_BYTES_PER_TURN_MAX = 16 << 20  # then other connections get their turn
_PIECES_PER_CALL_MAX = 512  # half of the system's limit for one call
_DROPPED_BYTES = 256 * 1024
_NBYTES_MAX = 1 << 31
_RECEIPTS_BYTES_MAX = 4 << 20  # more than the payloads that fit into the connection's buffers can need


@dataclass(slots=True)
class PayloadTarget:
    """Target of a payload. `pieces`: parts of `memory`, in the order of the payload's bytes."""

    memory: memoryview
    pieces: tuple[Extent, ...]
    nbytes: int
    wanted: bool = True


class PayloadConnection:
    """Reads payloads from one connection into the ring, and sends receipts. One thread.

    Args:
        open_target: Returns the target of a payload; None to drop it.
        on_received: Called when a payload was read to its end, with the header and the target that `open_target`
            returned; None if that target is no longer wanted.
    """

    def __init__(
        self,
        sock: AnySocket,
        *,
        open_target: Callable[[PayloadHeader], PayloadTarget | None],
        on_received: Callable[[PayloadHeader, PayloadTarget | None], None],
    ) -> None:
        self._sock, self._open_target, self._on_received = sock, open_target, on_received
        self._header = bytearray(HEADER.size)
        self._header_filled = 0
        self._current: PayloadHeader | None = None
        self._target: PayloadTarget | None = None
        self._buffers: deque[memoryview] = deque()
        self._remaining = 0  # bytes of the current payload
        self._receipts = bytearray()

    def read(self) -> None:
        """Read available bytes, at most `_BYTES_PER_TURN_MAX`.

        Raises:
            ProtocolError: The header is invalid, or the rank does not read its receipts.
            OSError: The connection has ended, or is broken.
        """
        budget = _BYTES_PER_TURN_MAX
        while budget > 0:
            try:
                nbytes = self._read_some()
            except BlockingIOError:
                break
            if nbytes == 0:
                raise ConnectionResetError("the connection has ended")
            budget -= nbytes
        self.write()

    def _read_some(self) -> int:
        if self._current is None:
            nbytes = self._sock.recv_into(memoryview(self._header)[self._header_filled :])
            self._header_filled += nbytes
            if self._header_filled == HEADER.size:
                self._begin()
            return nbytes
        if self._buffers and not (self._target is not None and self._target.wanted):
            self._buffers.clear()
        nbytes = self._read_into_target() if self._buffers else self._drop()
        self._remaining -= nbytes
        if self._remaining == 0:
            self._end()
        return nbytes

    def _begin(self) -> None:
        header = PayloadHeader.from_bytes(self._header)
        if not 0 < header.nbytes <= _NBYTES_MAX or header.number == 0:
            raise ProtocolError(f"a payload of {header.nbytes} bytes with number {header.number}")
        self._header_filled = 0
        self._current, self._remaining = header, header.nbytes
        self._target = target = self._open_target(header)
        if target is not None and target.nbytes == header.nbytes:
            self._buffers.extend(target.memory[piece.offset : piece.end] for piece in target.pieces)

    def _read_into_target(self) -> int:
        buffers = self._buffers
        nbytes = self._sock.recvmsg_into(
            [buffers[i] for i in range(min(len(buffers), _PIECES_PER_CALL_MAX))]
        )[0]
        left = nbytes
        while left > 0:
            first = buffers.popleft()
            if left < len(first):
                buffers.appendleft(first[left:])
            left -= min(left, len(first))
        return nbytes

    def _drop(self) -> int:
        return len(self._sock.recv(min(self._remaining, _DROPPED_BYTES)))

    def _end(self) -> None:
        header, target = self._current, self._target
        assert header is not None
        self._current, self._target = None, None
        self._buffers.clear()
        self._on_received(header, target if target is not None and target.wanted else None)
        self._receipts += RECEIPT.pack(header.number)
        if len(self._receipts) > _RECEIPTS_BYTES_MAX:
            raise ProtocolError(
                f"does not read its receipts: {len(self._receipts)} bytes of them wait for room"
            )

    def write(self) -> None:
        """Send pending receipts until the socket's buffer is full. Raises `OSError`: the connection is broken."""
        if self._receipts:
            with contextlib.suppress(BlockingIOError):
                del self._receipts[: self._sock.send(self._receipts)]

    @property
    def has_pending_receipts(self) -> bool:
        """Whether receipts are pending."""
        return bool(self._receipts)
