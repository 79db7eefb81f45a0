"""Payloads on their way from ranks into slots of the ring.

    credit granted ─► receive posted ── SENT heard ─► looked at each turn ─► arrived
                            └── credit given back, rank lost ─► cancelled

Only those of which SENT has come are looked at: the test of a request costs something, and there may be thousands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.image.entries import Extent
from holdfast.image.layout import Layout
from holdfast.ring.ring import Ring
from stager.trainers_port import TrainersPort


class Arrival(NamedTuple):
    """The payload of one credit is complete: `nbytes` came, `expected_bytes` should."""

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
        """Whether a payload is under way that its rank says it has sent."""
        return bool(self._arriving)

    def use(self, ring: Ring) -> None:
        """From now on receive into another ring. Only while nothing is posted."""
        assert not self._posted, "payloads are still under way into the ring before"
        self._memory = _memory(ring)

    def grow(self, ring: Ring, slots: Iterable[int]) -> None:
        """The ring has these slots, too."""
        self._memory += [ring.slot_memory(slot) for slot in slots]

    def close(self) -> None:
        """Let go of the ring's memory."""
        self._memory = []

    def post(self, rank: int, slot: int, step: int, chunk: int, layout: Layout) -> None:
        """Be ready for `rank`'s pieces of `chunk`; then send it the credit."""
        start = layout.chunk_extent(chunk).offset
        extents = layout.pieces(chunk, rank)
        pieces = tuple(Extent(extent.offset - start, extent.nbytes) for extent in extents)
        self._posted[rank, slot] = (step, chunk, sum(extent.nbytes for extent in extents))
        self._slots[rank, step, chunk] = slot
        self._port.post(rank, slot, self._memory[slot], pieces)

    def announced(self, rank: int, step: int, chunk: int) -> None:
        """The rank says that it has sent it: look for it from now on."""
        slot = self._slots.get((rank, step, chunk))
        if slot is not None:
            self._arriving.add((rank, slot))

    def cancel(self, rank: int, slot: int) -> None:
        """It will not come."""
        self._port.cancel(rank, slot)
        self._forget(rank, slot)
        self._arriving.discard((rank, slot))

    def look(self) -> list[Arrival]:
        """Payloads since the last look."""
        found = []
        for place in list(self._arriving):
            nbytes = self._port.received(*place)
            if nbytes is None:
                continue
            self._arriving.discard(place)
            step, chunk, expected_bytes = self._posted[place]
            self._forget(*place)
            found.append(Arrival(place[0], step, chunk, nbytes, expected_bytes))
        return found

    def _forget(self, rank: int, slot: int) -> None:
        posted = self._posted.pop((rank, slot), None)
        if posted is not None:
            del self._slots[rank, posted[0], posted[1]]


def _memory(ring: Ring) -> list[memoryview]:
    return [ring.slot_memory(slot) for slot in range(ring.ring_chunks)]
