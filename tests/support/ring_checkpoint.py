"""A checkpoint of `tests.support.slices` in a ring, as stager and flusher leave it; and a stand-in for the stager."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Literal, cast

from holdfast.image.slices import frames_of
from holdfast.ring.remains import FetchKind
from holdfast.ring.ring import Ring
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from stager.fetches import Fetches
from tests.support.slices import Checkpoint

__all__ = ["FetchPort", "LiveFetch", "put_in_ring"]


def put_in_ring(
    ring: Ring, saved: Checkpoint, slots: Iterable[int], *, state: Literal["staged", "durable"]
) -> None:
    """Fill these slots with its first chunks. Durable: all slots are free again, and no file records the step."""
    digest, image, layout = ring.put_layout(saved.layout), saved.image(), saved.layout
    filled = list(zip(slots, range(layout.chunks), strict=False))
    for slot, chunk in filled:
        extent = layout.chunk_extent(chunk)
        ring.mark_filling(slot, saved.attempt, saved.step, chunk)
        # As the flusher writes it, with true CRCs in its fields.
        ring.slot_memory(slot)[: extent.nbytes] = image[extent.offset : extent.end]
        crcs = [
            (rank, zlib.crc32(saved.area(rank)[frame.offset : frame.offset + frame.nbytes]))
            for rank in layout.senders(chunk)
            for frame in frames_of(layout, rank)
            if frame.chunk == chunk
        ]
        ring.mark_full(slot, crcs, extent.nbytes)
    if state == "staged":
        ring.write_checkpoint(saved.attempt, saved.step, "staged", digest, {})
    else:
        for slot, _ in filled:
            ring.free(slot)


class FetchPort:
    """The part of `TrainersPort` that `Fetches` uses; keeps the sent frames, and how many each rank has yet to get."""

    def __init__(self) -> None:
        self.sent: deque[tuple[int, Frame]] = deque()
        self.unsent: dict[int, int] = {}

    def send(self, rank: int, message: bytes) -> None:
        self.sent.append((rank, wire.decode(message)))
        self.unsent[rank] = self.unsent.get(rank, 0) + 1

    def unsent_to(self, rank: int) -> int:
        return self.unsent.get(rank, 0)


class LiveFetch:
    """As `Link.fetch`, answered by a real `Fetches` on this ring.

    Attributes:
        asked: All requests so far.
        error: Raised from request `errors_from` on, if set.
        attempt: The stager's.
    """

    attempt = 9

    def __init__(self, ring: Ring) -> None:
        self.port = FetchPort()
        line: Any = SimpleNamespace(flusher=SimpleNamespace(ring=ring, attempt=self.attempt))
        self.fetches = Fetches(cast("Any", self.port), line)
        self.asked: list[FetchKind] = []
        self.error: Exception | None = None
        self.errors_from = 0
        self._lock = threading.Lock()

    def __call__(
        self, asked: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        with self._lock:
            self.asked.append(asked)
            if self.error is not None and len(self.asked) > self.errors_from:
                raise self.error
            self.fetches.handle(0, Frame(Kind.FETCH, self.attempt, step, chunk, asked, attempt, body))
            assert self.fetches.answer()
            _, frame = self.port.sent.pop()
            self.port.unsent.clear()
        assert (frame.kind, frame.flags, frame.step, frame.chunk) == (Kind.FETCHED, asked, step, chunk)
        return frame.body if frame.arg else None
