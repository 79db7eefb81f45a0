"""Memory of the ring: one thread moves it into huge pages, and allocates more when a checkpoint needs it.

    small ─► a checkpoint begins ─► room for two of its size is wanted ─► memory is allocated, a step at a time
                                                                              │ RingGrown, into the loop's inbox
                                                                              ▼
                                               the loop adds the slots to the journal, and tells the stager

The loop must not allocate: the kernel clears memory first, which takes about half a second per GiB. Until a step is
allocated the ring keeps its size, so a checkpoint never waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple, Self

from flusher.workers import Inbox
from holdfast.errors import HoldfastError
from holdfast.faultpoint import Point, reach
from holdfast.ring.growth import growth_bytes_in, wanted_chunks
from holdfast.ring.ring import Ring

_log = logging.getLogger("holdfast.flusher")

_STEP_BYTES_MIN, _STEP_BYTES_MAX = 256 << 20, 1 << 30
_GIB = 1 << 30


class RingGrown(NamedTuple):
    """There is memory for `ring_chunks` slots. `note`: for the user, with the last growth; else empty."""

    ring_chunks: int
    note: str


class RingRoom:
    """Runs the thread while the context is open. `grows`: whether the ring may grow, beside moving into huge pages."""

    def __init__(self, ring: Ring, inbox: Inbox, *, grows: bool) -> None:
        self._ring, self._inbox, self._grows = ring, inbox, grows
        self._allocated_chunks = (
            ring.ring_chunks
        )  # slots with memory, whether or not the loop has added them yet
        self._wanted_chunks = ring.ring_chunks
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ring-room", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()

    def request(self, image_chunks: int) -> bool:
        """Note that checkpoints of `image_chunks` chunks begin; return whether a `RingGrown` with a note will follow.
        For the loop's thread; never waits. After a shortage only a larger image asks for memory again.
        """
        wanted = wanted_chunks(image_chunks)
        if not self._grows or wanted <= self._wanted_chunks:
            return False
        self._wanted_chunks = wanted
        self._wake.set()
        return True

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        handled_chunks = self._ring.ring_chunks
        while not self._ended:
            self._wake.clear()
            wanted = self._wanted_chunks
            if wanted > handled_chunks:
                self._grow(wanted)
                handled_chunks = wanted
            self._move_to_huge_pages()
            self._wake.wait()

    def _move_to_huge_pages(self) -> None:
        begun = time.monotonic()
        moved_bytes = self._ring.use_huge_pages(self._allocated_chunks, self._wake.is_set)
        _log.info(
            "%d of the ring's %d bytes are in huge pages, after %.1f s",
            moved_bytes,
            self._allocated_chunks * self._ring.chunk_bytes,
            time.monotonic() - begun,
        )

    def _grow(self, wanted: int) -> None:
        ring = self._ring
        available_bytes = growth_bytes_in(ring.directory)
        target = min(wanted, self._allocated_chunks + available_bytes // ring.chunk_bytes, ring.room_chunks)
        shortage = "" if target == wanted else "no more than half of the free memory is taken"
        try:
            while self._allocated_chunks < target and not self._ended:
                self._allocate_step(target)
        except (OSError, HoldfastError) as error:
            shortage = f"the system gave no more ({error})"
        self._inbox.put(RingGrown(self._allocated_chunks, self._describe_growth(wanted, shortage)))

    def _allocate_step(self, target: int) -> None:
        """Allocate one step: memory that the kernel clears within about half a second."""
        chunk_bytes = self._ring.chunk_bytes
        step_bytes = min(max(_STEP_BYTES_MIN, self._allocated_chunks * chunk_bytes // 4), _STEP_BYTES_MAX)
        chunks = min(target, self._allocated_chunks + max(1, step_bytes // chunk_bytes))
        self._ring.allocate(chunks)
        reach(Point.RING_TAKEN)
        self._allocated_chunks = chunks
        self._inbox.put(RingGrown(chunks, ""))

    def _describe_growth(self, wanted: int, shortage: str) -> str:
        has, needs = (chunks * self._ring.chunk_bytes / _GIB for chunks in (self._allocated_chunks, wanted))
        if not shortage:
            return f"the ring has {has:.1f} GiB now, room for two checkpoints"
        return (
            f"the ring has {has:.1f} GiB; two checkpoints need {needs:.1f} GiB, but {shortage}. Chunks that do "
            "not fit wait for the store: set ring_bytes, or give the stager's machine more memory"
        )
