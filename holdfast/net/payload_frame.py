"""The bytes around a payload on its way from a rank into a slot of the stager's ring.

    rank   ── header: number, slot, nbytes ── the bytes … ──►  stager
           ◄─ receipt: number ──                               they lie in the ring

Numbers rise by one from payload to payload of a rank, over all its connections. A payload without a receipt is sent
again over the next connection, under the same number: the stager takes each number once.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER = struct.Struct("<QIIQ")
RECEIPT = struct.Struct("<Q")


class PayloadHeader(NamedTuple):
    """What precedes a payload.

    Attributes:
        number: From 1 on.
        slot: Of the ring, as its credit said.
        nbytes: Of the payload.
    """

    number: int
    slot: int
    nbytes: int

    def to_bytes(self) -> bytes:
        return HEADER.pack(self.number, self.slot, 0, self.nbytes)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> PayloadHeader:
        """Of `HEADER.size` bytes."""
        number, slot, _, nbytes = HEADER.unpack(data)
        return cls(number, slot, nbytes)


class TakenNumbers:
    """Which payloads of a rank have been taken. One thread."""

    def __init__(self) -> None:
        self._all_up_to = 0
        self._beyond: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number <= self._all_up_to or number in self._beyond

    def add(self, number: int) -> None:
        self._beyond.add(number)
        while self._all_up_to + 1 in self._beyond:
            self._all_up_to += 1
            self._beyond.discard(self._all_up_to)
