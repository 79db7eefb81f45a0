"""Payloads on their way from ranks into slots of the ring.

    credit granted ─► receive posted ── SENT heard ─► looked at each turn ─► arrived
                            └── credit given back, rank lost ─► cancelled

Only payloads whose SENT has arrived are polled: testing a receive has a cost, and thousands may be posted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.image.entries import Extent
from holdfast.image.layout import Layout
from holdfast.ring.ring import Ring
from stager.trainers_port import TrainersPort


class Arrival(NamedTuple):
    """The payload of one credit is complete: `nbytes` arrived, of `expected_bytes`."""

    rank: int
    step: int
    chunk: int
    nbytes: int
    expected_bytes: int


class Payloads:
    """Receives of one stager. For one thread."""

    def __init__(self, port: TrainersPort, ring: Ring) -> None:
        self._port = port
        self._posted: dict[tuple[int, int], tuple[int, int, int]] = {}  # (rank, slot) → step, chunk, bytes
        self._slots: dict[tuple[int, int, int], int] = {}  # (rank, step, chunk) → slot
        self._arriving: set[tuple[int, int]] = set()
        self._memory = _memory(ring)

    @property
    def arriving(self) -> bool:
        """Whether a payload is in flight whose SENT has arrived."""
        return bool(self._arriving)

    def set_ring(self, ring: Ring) -> None:
        """Receive into another ring from now on. Only while no receive is posted."""
        assert not self._posted, "payloads are still in flight into the old ring"
        self._memory = _memory(ring)

    def grow(self, ring: Ring, slots: Iterable[int]) -> None:
        """Add slots by which the ring has grown."""
        self._memory += [ring.slot_memory(slot) for slot in slots]

    def close(self) -> None:
        """Release the ring's memory."""
        self._memory = []

    def post(self, rank: int, slot: int, step: int, chunk: int, layout: Layout) -> None:
        """Post the receive of `rank`'s pieces of `chunk`; send the credit only after this."""
        start = layout.chunk_extent(chunk).offset
        extents = layout.pieces(chunk, rank)
        pieces = tuple(Extent(extent.offset - start, extent.nbytes) for extent in extents)
        self._posted[rank, slot] = (step, chunk, sum(extent.nbytes for extent in extents))
        self._slots[rank, step, chunk] = slot
        self._port.post(rank, slot, self._memory[slot], pieces)

    def on_sent(self, rank: int, step: int, chunk: int) -> None:
        """Poll this payload from now on: its SENT has arrived."""
        slot = self._slots.get((rank, step, chunk))
        if slot is not None:
            self._arriving.add((rank, slot))

    def cancel(self, rank: int, slot: int) -> None:
        """Withdraw the receive of a payload that will not be sent."""
        self._port.cancel(rank, slot)
        self._forget(rank, slot)
        self._arriving.discard((rank, slot))

    def poll(self) -> list[Arrival]:
        """Return the payloads that were completed since the last call."""
        found = []
        for key in list(self._arriving):
            nbytes = self._port.pop_received(*key)
            if nbytes is None:
                continue
            self._arriving.discard(key)
            step, chunk, expected_bytes = self._posted[key]
            self._forget(*key)
            found.append(Arrival(key[0], step, chunk, nbytes, expected_bytes))
        return found

    def _forget(self, rank: int, slot: int) -> None:
        posted = self._posted.pop((rank, slot), None)
        if posted is not None:
            del self._slots[rank, posted[0], posted[1]]


def _memory(ring: Ring) -> list[memoryview]:
    return [ring.slot_memory(slot) for slot in range(ring.ring_chunks)]
