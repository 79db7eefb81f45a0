"""Header and receipt of a payload that a rank sends into a slot of the stager's ring.

    rank   ── header: number, slot, nbytes ── the bytes … ──►  stager
           ◄─ receipt: number ──                               the bytes are in the ring

A rank numbers its payloads consecutively over all its connections. It resends a payload without a receipt over the next
connection, under the same number, and the stager takes each number once. One connection may be ahead of another by at
most `NUMBERS_AHEAD_MAX`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from holdfast.errors import ProtocolError

NUMBERS_AHEAD_MAX = 1 << 16
HEADER = struct.Struct("<QIIQ")
RECEIPT = struct.Struct("<Q")


class PayloadHeader(NamedTuple):
    """The header of a payload. `number`: from 1 on."""

    number: int
    slot: int
    nbytes: int

    def to_bytes(self) -> bytes:
        return HEADER.pack(self.number, self.slot, 0, self.nbytes)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> PayloadHeader:
        """Read the header from `HEADER.size` bytes."""
        number, slot, _, nbytes = HEADER.unpack(data)
        return cls(number, slot, nbytes)


class ReceivedNumbers:
    """Set of the numbers of a rank's payloads that were taken, in at most 8 KiB. One thread."""

    def __init__(self) -> None:
        self._first_free = 1
        self._beyond = 0  # bit i: `_first_free + i` is taken; bit 0 is always clear

    def __contains__(self, number: int) -> bool:
        ahead = number - self._first_free
        return ahead < 0 or bool(self._beyond >> ahead & 1)

    def check(self, number: int) -> None:
        """Check that this number is possible now. Raises `ProtocolError`: it is too far ahead of a missing one."""
        if number > self._first_free + NUMBERS_AHEAD_MAX:
            raise ProtocolError(
                f"payload {number}, and payload {self._first_free} has not come; expected at most "
                f"{self._first_free + NUMBERS_AHEAD_MAX}"
            )

    def add(self, number: int) -> None:
        """Add a number; no effect if it was taken before. Raises as `check`."""
        self.check(number)
        if number in self:
            return
        self._beyond |= 1 << number - self._first_free
        if self._beyond & 1:
            free = ~self._beyond & self._beyond + 1  # the lowest bit that is clear
            run_length = free.bit_length() - 1
            self._first_free += run_length
            self._beyond >>= run_length
