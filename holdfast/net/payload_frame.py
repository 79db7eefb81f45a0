"""The bytes around a payload on its way from a rank into a slot of the stager's ring.

    rank   ── header: number, slot, nbytes ── the bytes … ──►  stager
           ◄─ receipt: number ──                               they lie in the ring

Numbers rise by one from payload to payload of a rank, over all its connections. A payload without a receipt is sent
again over the next connection, under the same number: the stager takes each number once. One connection may be ahead of
another, but not by more than `NUMBERS_AHEAD_MAX`.
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


class TakenNumbers:
    """Which payloads of a rank have been taken, in 8 KiB at most. One thread."""

    def __init__(self) -> None:
        self._first_free = 1
        self._beyond = 0  # bit i: `_first_free + i` is taken; bit 0 is always clear

    def __contains__(self, number: int) -> bool:
        ahead = number - self._first_free
        return ahead < 0 or bool(self._beyond >> ahead & 1)

    def check(self, number: int) -> None:
        """See that this number can come now. Raises `ProtocolError`: it is too far ahead of one that has not come."""
        if number > self._first_free + NUMBERS_AHEAD_MAX:
            raise ProtocolError(
                f"payload {number}, and payload {self._first_free} has not come; expected at most "
                f"{self._first_free + NUMBERS_AHEAD_MAX}"
            )

    def add(self, number: int) -> None:
        """Raises: ProtocolError: As `check`."""
        self.check(number)
        if number in self:
            return
        self._beyond |= 1 << number - self._first_free
        if self._beyond & 1:
            free = ~self._beyond & self._beyond + 1  # the lowest bit that is clear
            taken = free.bit_length() - 1
            self._first_free += taken
            self._beyond >>= taken
