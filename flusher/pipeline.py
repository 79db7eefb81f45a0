"""The pure core of the flush: chunks in any order become one file with true CRCs, or nothing.

    ChunkFull ─► Verify ─► all CRC fields in the chunk known? ─► Patch ─► part complete? ─► WritePart ─► FreeSlots
                    │              ▲                                                            │
                    └─ entry CRCs ─┘                         staged, and all parts written ─► Publish

Rules:
1. A chunk is written only after every sender's CRC held, and after the CRC of every entry that its zip fields state is
   known: those entries end before the field, so chunks that come in order never wait for later ones.
2. The CRC that goes with a part is combined from the CRCs of the verified segments, never taken from the memory again:
   a bit that flips between verify and write is caught by the store or by read-back.
3. Published means staged, and all parts written. Whatever fails before drops the whole checkpoint.
4. A slot is freed once, when no job reads it any more; a dropped checkpoint is discarded when its last job has ended.

No threads, clocks, files or memory here: events in, actions out. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flusher.index import LayoutIndex
from flusher.steps import (
    Aborted,
    Action,
    Begin,
    ChunkFull,
    Discard,
    Event,
    Failed,
    FreeSlots,
    Key,
    Open,
    Opened,
    PartWritten,
    Patch,
    Patched,
    Publish,
    Published,
    Staged,
    Verified,
    Verify,
    WritePart,
)
from holdfast.crc import combine_all
from holdfast.errors import BusyError, ConfigError, HoldfastError, ProtocolError

__all__ = ["Pipeline"]


@dataclass(slots=True)
class _Flight:
    """One checkpoint on its way."""

    key: Key
    index: LayoutIndex
    entry_crcs: list[int | None] = field(init=False)
    entry_left: list[int] = field(init=False)  # segments of the entry that are not verified yet
    chunk_left: list[int] = field(init=False)  # entries that the chunk's CRC fields still wait for
    chunk_crcs: list[int | None] = field(init=False)
    segment_crcs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)  # chunk → its slot, until it is freed
    seen: set[int] = field(default_factory=set)  # chunks that have come
    busy: set[int] = field(default_factory=set)  # slots that a job uses
    jobs: int = 0
    part_chunks: int = 0  # 0 until the upload is open
    parts_done: set[int] = field(default_factory=set)
    parts_sent: set[int] = field(default_factory=set)
    staged: bool = False
    publishing: bool = False
    error: HoldfastError | None = None

    def __post_init__(self) -> None:
        index = self.index
        self.entry_left = [len(places) for places in index.places]
        self.entry_crcs = [None if left else 0 for left in self.entry_left]
        self.chunk_left = [sum(self.entry_left[e] > 0 for e in needs) for needs in index.needs]
        self.chunk_crcs = [None] * index.layout.chunks

    @property
    def parts(self) -> int:
        return -(-self.index.layout.chunks // self.part_chunks)

    def part_range(self, part: int) -> range:
        first = part * self.part_chunks
        return range(first, min(first + self.part_chunks, self.index.layout.chunks))


class Pipeline:
    """Takes events, gives actions.

    Args:
        ring_chunks: Slots in the ring: a part must fit into it.
    """

    def __init__(self, ring_chunks: int) -> None:
        self._ring_chunks = ring_chunks
        self._flights: dict[Key, _Flight] = {}

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._flights

    def receiving(self) -> list[Key]:
        """Checkpoints that still wait for chunks or for `Staged`, oldest first."""
        return sorted(f.key for f in self._flights.values() if not f.staged and f.error is None)

    def staged(self) -> list[Key]:
        """Checkpoints that are staged and not yet durable, oldest first."""
        return sorted(f.key for f in self._flights.values() if f.staged and f.error is None)

    def knows(self, key: Key) -> bool:
        """Whether this checkpoint is under way, or being given up."""
        return key in self._flights

    def held_slots(self) -> set[int]:
        """Slots that this pipeline has been told of and has not given back yet."""
        return {slot for flight in self._flights.values() for slot in flight.slots.values()}

    def handle(self, event: Event) -> list[Action]:
        """Take one event; give what is to be done now, in order."""
        if isinstance(event, Begin):
            return self._begin(event)
        flight = self._flights.get(event.key)
        if flight is None:
            # Chunks of a checkpoint that was dropped may still come in for a while: they only cost their slot.
            return [FreeSlots((event.slot,))] if isinstance(event, ChunkFull) else []
        match event:
            case ChunkFull():
                return self._chunk_full(flight, event)
            case Staged():
                return self._staged(flight)
            case Aborted(_, error):
                return self._drop(flight, error)
        flight.jobs -= 1
        match event:
            case Opened():
                return self._opened(flight, event.part_chunks)
            case Verified():
                flight.busy.discard(flight.slots[event.chunk])
                return self._verified(flight, event)
            case Patched():
                flight.busy.discard(flight.slots[event.chunk])
                return self._patched(flight, event)
            case PartWritten():
                return self._part_written(flight, event.part)
            case Published():
                del self._flights[flight.key]
                return []
            case Failed():
                flight.busy -= set(event.slots)
                return self._drop(flight, event.error)

    # -- the stager's events -------------------------------------------------------------------------------------

    def _begin(self, event: Begin) -> list[Action]:
        if event.key in self._flights:
            return self._drop(
                self._flights[event.key], BusyError(f"{event.key} began twice; both are given up")
            )
        self._flights[event.key] = _Flight(event.key, event.index)
        return self._start(self._flights[event.key], [Open(event.key, event.index)])

    def _chunk_full(self, flight: _Flight, event: ChunkFull) -> list[Action]:
        if flight.error is not None:
            return [FreeSlots((event.slot,))]
        complaint = _complaint(flight, event)
        if complaint:
            error = ProtocolError(f"{flight.key}: slot {event.slot}, chunk {event.chunk}: {complaint}")
            return [FreeSlots((event.slot,)), *self._drop(flight, error)]
        flight.seen.add(event.chunk)
        flight.slots[event.chunk] = event.slot
        return self._start(
            flight, [Verify(flight.key, (event.slot,), event.chunk, event.sources, flight.index)]
        )

    def _staged(self, flight: _Flight) -> list[Action]:
        if flight.error is not None:
            return []
        missing = flight.index.layout.chunks - len(flight.seen)
        if missing:
            error = ProtocolError(
                f"{flight.key}: staged, but {missing} of {flight.index.layout.chunks} chunks never came"
            )
            return self._drop(flight, error)
        flight.staged = True
        return self._maybe_publish(flight)

    # -- the workers' events -------------------------------------------------------------------------------------

    def _opened(self, flight: _Flight, part_chunks: int) -> list[Action]:
        flight.part_chunks = part_chunks
        if flight.error is not None:
            return self._drop(flight, flight.error)
        if min(part_chunks, flight.index.layout.chunks) > self._ring_chunks:
            return self._drop(
                flight,
                ConfigError(
                    f"{flight.key}: the store needs parts of {part_chunks} chunks for "
                    f"{flight.index.layout.image_bytes} bytes, the ring holds {self._ring_chunks}; raise ring_bytes"
                ),
            )
        return [action for part in range(flight.parts) for action in self._maybe_write(flight, part)]

    def _verified(self, flight: _Flight, event: Verified) -> list[Action]:
        if flight.error is not None:
            return self._drop(flight, flight.error)
        flight.segment_crcs[event.chunk] = event.segment_crcs
        ready = [event.chunk]
        for segment in flight.index.layout.segments(event.chunk):
            if segment.entry is None:
                continue
            flight.entry_left[segment.entry] -= 1
            if flight.entry_left[segment.entry] == 0:
                flight.entry_crcs[segment.entry] = self._entry_crc(flight, segment.entry)
                for chunk in flight.index.waiting[segment.entry]:
                    flight.chunk_left[chunk] -= 1
                    ready.append(chunk)
        return [action for chunk in dict.fromkeys(ready) for action in self._maybe_patch(flight, chunk)]

    def _patched(self, flight: _Flight, event: Patched) -> list[Action]:
        if flight.error is not None:
            return self._drop(flight, flight.error)
        crcs = list(flight.segment_crcs[event.chunk])
        for index, crc in event.segment_crcs:
            crcs[index] = crc
        flight.segment_crcs[event.chunk] = tuple(crcs)
        return self._finish_chunk(flight, event.chunk)

    def _part_written(self, flight: _Flight, part: int) -> list[Action]:
        slots = tuple(flight.slots.pop(chunk) for chunk in flight.part_range(part))
        flight.busy -= set(slots)
        flight.parts_done.add(part)
        freed: list[Action] = [FreeSlots(slots)]
        if flight.error is not None:
            return freed + self._drop(flight, flight.error)
        return freed + self._maybe_publish(flight)

    # -- what can be done now ------------------------------------------------------------------------------------

    def _maybe_patch(self, flight: _Flight, chunk: int) -> list[Action]:
        if chunk not in flight.segment_crcs or flight.chunk_left[chunk]:
            return []
        index = flight.index
        if not index.fields[chunk]:
            return self._finish_chunk(flight, chunk)
        values: list[tuple[int, bytes]] = []
        for part in index.fields[chunk]:
            crc = flight.entry_crcs[part.entry]
            assert crc is not None, "chunk_left counts the entries that are not known"
            values.append((part.offset, crc.to_bytes(4, "little")[part.first : part.first + part.nbytes]))
        slot = flight.slots[chunk]
        return self._start(
            flight, [Patch(flight.key, (slot,), chunk, tuple(values), index.patched[chunk], index)]
        )

    def _finish_chunk(self, flight: _Flight, chunk: int) -> list[Action]:
        segments = flight.index.layout.segments(chunk)
        crcs = flight.segment_crcs[chunk]
        flight.chunk_crcs[chunk] = combine_all(
            (crc, segment.nbytes) for crc, segment in zip(crcs, segments, strict=True)
        )
        return self._maybe_write(flight, chunk // flight.part_chunks) if flight.part_chunks else []

    def _maybe_write(self, flight: _Flight, part: int) -> list[Action]:
        chunks = flight.part_range(part)
        crcs = [flight.chunk_crcs[chunk] for chunk in chunks]
        if part in flight.parts_sent or None in crcs:
            return []
        flight.parts_sent.add(part)
        sizes = [flight.index.layout.chunk_extent(chunk).nbytes for chunk in chunks]
        pieces = tuple((flight.slots[chunk], nbytes) for chunk, nbytes in zip(chunks, sizes, strict=True))
        crc = combine_all((crc, nbytes) for crc, nbytes in zip(crcs, sizes, strict=True) if crc is not None)
        return self._start(flight, [WritePart(flight.key, part, pieces, crc)])

    def _maybe_publish(self, flight: _Flight) -> list[Action]:
        written = flight.part_chunks > 0 and len(flight.parts_done) == flight.parts
        if not flight.staged or not written or flight.publishing:
            return []
        flight.publishing = True
        layout = flight.index.layout
        chunk_crcs = tuple(crc for crc in flight.chunk_crcs if crc is not None)
        entry_crcs = tuple(crc for crc in flight.entry_crcs if crc is not None)
        assert len(chunk_crcs) == layout.chunks
        assert len(entry_crcs) == len(layout.entries)
        image_crc = combine_all(
            (crc, layout.chunk_extent(chunk).nbytes) for chunk, crc in enumerate(chunk_crcs)
        )
        return self._start(flight, [Publish(flight.key, flight.index, image_crc, chunk_crcs, entry_crcs)])

    def _start(
        self, flight: _Flight, jobs: list[Open | Verify | Patch | WritePart | Publish]
    ) -> list[Action]:
        for job in jobs:
            flight.jobs += 1
            flight.busy.update(job.slots)
        return list(jobs)

    def _drop(self, flight: _Flight, error: HoldfastError) -> list[Action]:
        """Give the checkpoint up, or go on giving it up: free what no job uses, discard after the last job."""
        flight.error = flight.error or error
        idle = {chunk: slot for chunk, slot in flight.slots.items() if slot not in flight.busy}
        for chunk in idle:
            del flight.slots[chunk]
        actions: list[Action] = [FreeSlots(tuple(idle.values()))] if idle else []
        if flight.jobs == 0:
            del self._flights[flight.key]
            actions.append(Discard(flight.key, flight.error))
        return actions

    @staticmethod
    def _entry_crc(flight: _Flight, entry: int) -> int:
        segments = flight.index.layout.segments
        return combine_all(
            (flight.segment_crcs[chunk][index], segments(chunk)[index].nbytes)
            for chunk, index in flight.index.places[entry]
        )


def _complaint(flight: _Flight, event: ChunkFull) -> str:
    """What is wrong with a chunk that came in; empty if nothing is."""
    layout = flight.index.layout
    if event.chunk >= layout.chunks:
        return f"the image has {layout.chunks} chunks"
    if flight.staged:
        return "came after staged"
    if event.chunk in flight.seen:
        return "came twice"
    if event.nbytes != layout.chunk_extent(event.chunk).nbytes:
        return f"{event.nbytes} bytes, expected {layout.chunk_extent(event.chunk).nbytes}"
    ranks = tuple(source.rank for source in event.sources)
    if ranks != layout.senders(event.chunk):
        return f"sent by ranks {ranks}, expected {layout.senders(event.chunk)}"
    return ""
