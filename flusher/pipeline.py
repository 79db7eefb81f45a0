"""Pure core of the flush: makes one file with correct CRCs from chunks in any order, or nothing.

    ChunkFull ─► Verify ─► all CRC fields in the chunk known? ─► Patch ─► part complete? ─► WritePart ─► FreeSlots
                    │              ▲                                                            │
                    └─ entry CRCs ─┘                         staged, and all parts written ─► Publish

Rules:
1. A chunk is written once every sender's CRC matched, and the CRC of every entry that its zip fields state is known.
   These entries end before the field, so chunks that arrive in order never wait for later ones.
2. The CRC that goes with a part is combined from the CRCs of the verified segments, never computed from memory again.
   A bit flip between verify and patch is caught there, a later one by the store or by read-back.
3. A checkpoint is published when it is staged and all parts are written. A failure before that drops the whole
   checkpoint. Only if the store lost the written parts and every chunk is still here, the flush starts over.
4. A slot is freed once, when no job reads it any more. A dropped checkpoint is discarded when its last job has ended.
5. A repeated event has no effect: a stager that has found a new flusher repeats all it knows. A chunk that the next
   process of one of several stagers receives again is freed.
6. Parts that a dead flusher wrote count once the upload is open again. Until then its chunks only wait: if the store
   has lost the upload, the chunks still in the ring are needed.
7. Where several flushers write one file, this one writes a range of chunks. Parts whose CRC fields state entries of
   another share are late: they wait for the CRCs that its flusher puts into the store. A share ends with its seal, and
   the lead publishes when all are sealed. A sealed share cannot be given up here.
8. When incoming chunks have no room, an older whole checkpoint may lose its place, but never the newest whole one
   (`superseded`). `flusher.succession` decides when, because that takes a clock.

No threads, clocks, files or memory here: events in, actions out. Not thread-safe.
"""

from __future__ import annotations

from flusher.flight import Flight, describe_chunk_mismatch, describe_resume_mismatch
from flusher.steps import (
    Aborted,
    Action,
    AllSealed,
    Assemble,
    AwaitPublished,
    Begin,
    ChunkFull,
    CrcsPut,
    CrcsRead,
    Discard,
    Event,
    FreeSlots,
    Job,
    JobFailed,
    Open,
    Opened,
    PartWritten,
    Patch,
    Patched,
    Publish,
    Published,
    PutCrcs,
    ReadCrcs,
    ReadSeal,
    Sealed,
    SealRead,
    SealShare,
    Staged,
    Verified,
    Verify,
    WritePart,
)
from holdfast.checkpoints.publish import FinishedImage
from holdfast.crc import combine_all
from holdfast.errors import BusyError, ConfigError, HoldfastError, ProtocolError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.share_sums import ShareSums, entry_crcs_of


class Pipeline:
    """Takes events, returns actions.

    Args:
        ring_chunks: Slots in the ring: a part must fit into it.

    Attributes:
        ring_chunks: Set by the owner when the ring has grown; counts for uploads that are opened after that.
    """

    def __init__(self, ring_chunks: int) -> None:
        self.ring_chunks = ring_chunks
        self._flights: dict[CheckpointId, Flight] = {}

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is in flight."""
        return not self._flights

    def receiving(self) -> list[CheckpointId]:
        """Checkpoints that still wait for chunks or for `Staged`, oldest first."""
        return sorted(
            f.key for f in self._flights.values() if not f.staged and (f.error is None or f.is_restarting)
        )

    @property
    def only_receiving(self) -> bool:
        """Whether all checkpoints in flight wait for chunks, for `Staged` or for other flushers."""
        waiting = sum(flight.waits_for_others for flight in self._flights.values())
        return len(self.receiving()) + waiting == len(self._flights)

    @property
    def only_sealed(self) -> bool:
        """Whether all checkpoints in flight are sealed shares that wait for the lead."""
        return all(
            flight.waits_for_others and flight.share is not None and flight.share.index
            for flight in self._flights.values()
        )

    def stranded(self) -> list[CheckpointId]:
        """Return those of `receiving` that have parts in an upload that no other process could resume."""
        flights = self._flights
        return [
            key
            for key in self.receiving()
            if flights[key].opened and not flights[key].resumable and not flights[key].keeps_slots
            if flights[key].parts_sent
        ]

    def has_staged(self) -> bool:
        """Whether a staged checkpoint waits for the store."""
        return any(flight.staged and flight.error is None for flight in self._flights.values())

    def superseded(self, *, even_if_written: bool) -> tuple[CheckpointId, CheckpointId] | None:
        """Return the oldest whole checkpoint that can make room, and the newest whole one, which takes its place; None
        while incoming chunks have room, or if no checkpoint can go. `even_if_written`: include checkpoints of which
        the store has parts.
        """
        flights = [flight for flight in self._flights.values() if flight.error is None]
        if sum(flight.staged for flight in flights) < 2:
            return None
        # Slots of checkpoints being given up become free by themselves.
        room = self.ring_chunks - sum(len(flight.slots) for flight in flights)
        missing_chunks = sum(flight.missing for flight in flights if not flight.staged)
        if missing_chunks <= room:
            return None
        complete = sorted((flight for flight in flights if flight.is_complete), key=lambda flight: flight.key)
        droppable = [
            flight.key
            for flight in complete[:-1]
            if flight.may_be_superseded(even_if_written=even_if_written)
        ]
        return (droppable[0], complete[-1].key) if droppable else None

    def missing(self, key: CheckpointId) -> int:
        """Return how many chunks of one of `receiving` have not arrived."""
        return self._flights[key].missing

    def knows(self, key: CheckpointId) -> bool:
        """Whether this checkpoint is under way, or being given up."""
        return key in self._flights

    def given_up(self, key: CheckpointId) -> HoldfastError | None:
        """Return why this checkpoint is being given up, its slots freed; None if it is not."""
        flight = self._flights.get(key)
        return None if flight is None or flight.is_restarting else flight.error

    def is_dropping(self, key: CheckpointId) -> bool:
        """Whether this checkpoint is being given up: its jobs need not succeed."""
        flight = self._flights.get(key)
        return flight is not None and flight.error is not None and not flight.is_restarting

    def chunks_together(self, key: CheckpointId) -> int:
        """Return how many chunks of a checkpoint must be in the ring together before a slot is freed; 0 if unknown.

        The stager keeps this many slots free of newer checkpoints.
        """
        flight = self._flights.get(key)
        if flight is None:
            return 0
        if flight.keeps_slots:
            return flight.index.layout.chunks
        # Late parts stay until other flushers have all their chunks, and the next part must fit in beside them.
        wanted = flight.part_chunks * (1 + flight.late_parts())
        return max(flight.part_chunks, min(wanted, len(flight.chunks), self.ring_chunks))

    def handle(self, event: Event) -> list[Action]:
        """Take one event; return the actions to perform now, in order."""
        if isinstance(event, Begin):
            return self._begin(event)
        flight = self._flights.get(event.key)
        if flight is None:
            # Chunks of a dropped checkpoint may still arrive for a while: free their slots.
            return [FreeSlots((event.slot,))] if isinstance(event, ChunkFull) else []
        match event:
            case ChunkFull():
                if flight.is_restarting:
                    return self._note_for_restart(flight, event)
                return self._chunk_full(flight, event)
            case Staged():
                return self._staged(flight)
            case Aborted(_, error):
                if flight.publishing and flight.share is not None and flight.share.index:
                    return []  # sealed or being sealed: the lead may be publishing it
                return self._drop(flight, error)
        return self._handle_answer(flight, event)

    def _handle_answer(
        self,
        flight: Flight,
        event: Opened
        | Verified
        | Patched
        | PartWritten
        | CrcsPut
        | CrcsRead
        | Sealed
        | SealRead
        | AllSealed
        | Published
        | JobFailed,
    ) -> list[Action]:
        """Handle the event by which a job ends."""
        flight.jobs -= 1
        if isinstance(event, CrcsPut | CrcsRead | Sealed | SealRead | AllSealed):
            return self._handle_peer_event(flight, event)
        match event:
            case Opened():
                return self._opened(flight, event)
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
                return [FreeSlots(tuple(flight.slots.values()))] if flight.slots else []
            case JobFailed():
                flight.busy -= set(event.slots)
                return self._failed(flight, event.error)

    # -- the stager's events -------------------------------------------------------------------------------------

    def _begin(self, event: Begin) -> list[Action]:
        known = self._flights.get(event.key)
        if known is not None:
            if known.index.layout.digest == event.index.layout.digest:
                return []
            return self._drop(known, BusyError(f"{event.key} began twice, with two layouts; it is given up"))
        mismatch = describe_resume_mismatch(event)
        if mismatch:
            error = ProtocolError(f"{event.key}: the record of what was written does not hold: {mismatch}")
            return [Discard(event.key, error)]
        flight = self._flights[event.key] = Flight(event.key, event.index, event.resume, event.share)
        return self._start_jobs(flight, [Open(event.key, event.index, event.resume, event.share)])

    def _chunk_full(self, flight: Flight, event: ChunkFull) -> list[Action]:
        if flight.error is not None:
            is_repeated = event.slot in flight.slots.values()
            return [] if is_repeated else [FreeSlots((event.slot,))]
        if flight.slots.get(event.chunk) == event.slot:
            return []  # repeated
        if flight.is_written(event.chunk) and event.chunk not in flight.slots:
            if flight.opened and not flight.keeps_slots:
                # Recorded as written by a flusher that died before it freed the slot.
                return [FreeSlots((event.slot,))]
            self._note(flight, event)
            return []
        if flight.share is not None and event.chunk in flight.received:
            return [FreeSlots((event.slot,))]
        mismatch = describe_chunk_mismatch(flight, event)
        if mismatch:
            error = ProtocolError(f"{flight.key}: slot {event.slot}, chunk {event.chunk}: {mismatch}")
            return [FreeSlots((event.slot,)), *self._drop(flight, error)]
        self._note(flight, event)
        waits = flight.resume is not None and not flight.opened
        return [] if waits else self._verify(flight, event)

    @staticmethod
    def _note(flight: Flight, event: ChunkFull) -> None:
        flight.received.add(event.chunk)
        flight.slots[event.chunk] = event.slot
        flight.chunk_events[event.chunk] = event

    def _note_for_restart(self, flight: Flight, event: ChunkFull) -> list[Action]:
        """Note a chunk of a checkpoint that will start over, and is verified then."""
        if event.chunk not in flight.slots:
            self._note(flight, event)
        return []

    def _verify(self, flight: Flight, event: ChunkFull) -> list[Action]:
        return self._start_jobs(
            flight, [Verify(flight.key, (event.slot,), event.chunk, event.sources, flight.index)]
        )

    def _staged(self, flight: Flight) -> list[Action]:
        if flight.is_restarting:
            flight.staged = True  # missing chunks are noticed when it starts over
        if flight.error is not None or flight.staged:
            return []
        if flight.missing:
            error = ProtocolError(
                f"{flight.key}: staged, but {flight.missing} of {len(flight.chunks)} chunks never came: they are "
                "neither in the ring nor recorded as written"
            )
            return self._drop(flight, error)
        flight.staged = True
        return self._maybe_publish(flight)

    # -- the workers' events -------------------------------------------------------------------------------------

    def _opened(self, flight: Flight, event: Opened) -> list[Action]:
        part_chunks = flight.part_chunks = event.part_chunks
        flight.opened = True
        if flight.error is not None:
            return self._drop(flight, flight.error)
        flight.resumable = event.resumable
        flight.keeps_slots = not event.resumable and flight.index.layout.chunks <= self.ring_chunks
        if min(part_chunks, flight.index.layout.chunks) > self.ring_chunks:
            return self._drop(
                flight,
                ConfigError(
                    f"{flight.key}: the store needs parts of {part_chunks} chunks for "
                    f"{flight.index.layout.image_bytes} bytes, the ring holds {self.ring_chunks}; raise ring_bytes"
                ),
            )
        share = flight.share
        if share is not None and (part_chunks != share.shares.part_chunks or not event.resumable):
            how = "can be resumed" if event.resumable else "cannot be resumed"
            error = ConfigError(
                f"{flight.key}: the store takes parts of {part_chunks} chunks, and uploads that {how}; several stagers "
                f"write one file in parts of {share.shares.part_chunks} into an upload that can be resumed"
            )
            return self._drop(flight, error)
        reads = self._read_others(flight)
        if flight.resume is not None:
            return reads + self._resume(flight)
        writes = [action for part in flight.parts for action in self._maybe_write(flight, part)]
        return reads + writes + self._maybe_put_crcs(flight)

    def _resume(self, flight: Flight) -> list[Action]:
        """Resume a dead flusher's upload: free the slots of written chunks, verify the others."""
        written = tuple(chunk for chunk in flight.slots if flight.is_written(chunk))
        actions: list[Action] = []
        if written and not flight.keeps_slots:
            actions.append(FreeSlots(tuple(flight.slots.pop(chunk) for chunk in written)))
        for chunk in sorted(flight.slots.keys() - set(written)):
            actions += self._verify(flight, flight.chunk_events[chunk])
        return actions + self._maybe_put_crcs(flight) + self._maybe_publish(flight)

    def _verified(self, flight: Flight, event: Verified) -> list[Action]:
        if flight.error is not None:
            return self._drop(flight, flight.error)
        ready = [event.chunk, *flight.note_crcs(event.chunk, event.segment_crcs)]
        actions = [action for chunk in dict.fromkeys(ready) for action in self._maybe_patch(flight, chunk)]
        return actions + self._maybe_put_crcs(flight)

    def _patched(self, flight: Flight, event: Patched) -> list[Action]:
        if flight.error is not None:
            return self._drop(flight, flight.error)
        crcs = list(flight.segment_crcs[event.chunk])
        for index, crc in event.segment_crcs:
            crcs[index] = crc
        flight.segment_crcs[event.chunk] = tuple(crcs)
        return self._finish_chunk(flight, event.chunk)

    def _part_written(self, flight: Flight, part: int) -> list[Action]:
        chunks = flight.part_range(part)
        flight.busy -= {flight.slots[chunk] for chunk in chunks}
        flight.parts_done.add(part)
        freed: list[Action] = []
        if not flight.is_restarting and not flight.keeps_slots:
            freed.append(FreeSlots(tuple(flight.slots.pop(chunk) for chunk in chunks)))
        if flight.error is not None:
            return freed + self._drop(flight, flight.error)
        return freed + self._maybe_publish(flight)

    # -- the other flushers of the same image ----------------------------------------------------------------------

    def _handle_peer_event(
        self, flight: Flight, event: CrcsPut | CrcsRead | Sealed | SealRead | AllSealed
    ) -> list[Action]:
        if flight.error is not None:
            return self._drop(flight, flight.error)
        match event:
            case CrcsPut():
                return []
            case CrcsRead():
                return self._crcs_read(flight, event)
            case Sealed():
                return self._sealed(flight, event)
            case SealRead(_, of, seal):
                flight.seals[of] = seal
                return self._maybe_assemble(flight)
            case AllSealed():
                return self._start_jobs(flight, [Publish(event.image)])

    def _read_others(self, flight: Flight) -> list[Action]:
        """Poll the nearest share by itself, since the others are seldom later; then all others together."""
        if flight.share is None:
            return []
        next_shares = flight.unread if flight.others else flight.unread[-1:]
        flight.unread = flight.unread[: len(flight.unread) - len(next_shares)]
        return self._start_jobs(
            flight, [ReadCrcs(flight.key, flight.index, flight.share, of) for of in next_shares]
        )

    def _crcs_read(self, flight: Flight, event: CrcsRead) -> list[Action]:
        ready = flight.note_others(event.share, event.entry_crcs)
        actions = [action for chunk in dict.fromkeys(ready) for action in self._maybe_patch(flight, chunk)]
        return self._read_others(flight) + actions

    def _maybe_put_crcs(self, flight: Flight) -> list[Action]:
        share = flight.share
        if share is None or flight.has_put_crcs or not flight.opened or share.index == share.shares.count - 1:
            return []
        if len(flight.segment_crcs) < len(flight.chunks):
            return []
        flight.has_put_crcs = True
        crcs = entry_crcs_of(flight.index, flight.chunks, flight.segment_crcs)
        return self._start_jobs(flight, [PutCrcs(flight.key, share, crcs)])

    def _sealed(self, flight: Flight, event: Sealed) -> list[Action]:
        share = event.share
        flight.waits_for_others = True
        if share.index:
            return self._start_jobs(flight, [AwaitPublished(flight.key)])
        flight.seals[0] = event.seal
        # All polled at the same time, so that the last seal is noticed within the time of one request.
        reads: list[Job] = [ReadSeal(flight.key, share, of) for of in range(1, share.shares.count)]
        return self._start_jobs(flight, reads) + self._maybe_assemble(flight)

    def _maybe_assemble(self, flight: Flight) -> list[Action]:
        share, seals = flight.share, flight.seals
        if share is None or len(seals) < share.shares.count:
            return []
        flight.waits_for_others = False
        in_order = tuple(seals[of] for of in sorted(seals))
        return self._start_jobs(flight, [Assemble(flight.key, flight.index, share, in_order)])

    # -- what can be done now ------------------------------------------------------------------------------------

    def _maybe_patch(self, flight: Flight, chunk: int) -> list[Action]:
        if chunk not in flight.segment_crcs or flight.chunk_left[chunk] or flight.is_written(chunk):
            return []  # already written by a dead flusher
        index = flight.index
        fields = index.fields[chunk]
        if not fields:
            return self._finish_chunk(flight, chunk)
        crcs = tuple(map(flight.entry_crcs.__getitem__, fields.entries))
        known = tuple(crc for crc in crcs if crc is not None)
        assert len(known) == len(crcs), "chunk_left counts the entries that are not known"
        verified = tuple(map(flight.segment_crcs[chunk].__getitem__, fields.segments))
        return self._start_jobs(
            flight, [Patch(flight.key, (flight.slots[chunk],), chunk, known, verified, index)]
        )

    def _finish_chunk(self, flight: Flight, chunk: int) -> list[Action]:
        flight.finish_chunk(chunk)
        return self._maybe_write(flight, chunk // flight.part_chunks) if flight.part_chunks else []

    def _maybe_write(self, flight: Flight, part: int) -> list[Action]:
        chunks = flight.part_range(part)
        crcs = [flight.chunk_crcs[chunk] for chunk in chunks]
        if part in flight.parts_sent or None in crcs:
            return []
        flight.parts_sent.add(part)
        sizes = [flight.index.layout.chunk_extent(chunk).nbytes for chunk in chunks]
        pieces = tuple((flight.slots[chunk], nbytes) for chunk, nbytes in zip(chunks, sizes, strict=True))
        crc = combine_all((crc, nbytes) for crc, nbytes in zip(crcs, sizes, strict=True) if crc is not None)
        segment_crcs = tuple(flight.segment_crcs[chunk] for chunk in chunks)
        return self._start_jobs(flight, [WritePart(flight.key, part, pieces, crc, segment_crcs)])

    def _maybe_publish(self, flight: Flight) -> list[Action]:
        written = flight.opened and len(flight.parts_done) == len(flight.parts)
        if not flight.staged or not written or flight.publishing:
            return []
        flight.publishing = True
        if flight.share is not None:
            own = tuple(crc for chunk in flight.chunks if (crc := flight.chunk_crcs[chunk]) is not None)
            sums = ShareSums(own, entry_crcs_of(flight.index, flight.chunks, flight.segment_crcs))
            return self._start_jobs(flight, [SealShare(flight.key, flight.share, sums)])
        layout = flight.index.layout
        chunk_crcs = tuple(crc for crc in flight.chunk_crcs if crc is not None)
        entry_crcs = tuple(crc for crc in flight.entry_crcs if crc is not None)
        assert len(chunk_crcs) == layout.chunks
        assert len(entry_crcs) == len(layout.entries)
        image_crc = combine_all(
            (crc, layout.chunk_extent(chunk).nbytes) for chunk, crc in enumerate(chunk_crcs)
        )
        image = FinishedImage(flight.key, flight.index, image_crc, chunk_crcs, entry_crcs)
        return self._start_jobs(flight, [Publish(image)])

    def _start_jobs(self, flight: Flight, jobs: list[Job]) -> list[Action]:
        for job in jobs:
            flight.jobs += 1
            flight.busy.update(job.slots)
        return list(jobs)

    def _failed(self, flight: Flight, error: HoldfastError) -> list[Action]:
        is_lost = isinstance(error, StoreError) and error.begin_anew
        # Other flushers have written into the same upload, so a share cannot start over by itself.
        if (
            flight.error is None
            and is_lost
            and flight.share is None
            and flight.received <= flight.slots.keys()
        ):
            flight.error, flight.is_restarting = error, True
        return self._drop(flight, error)

    def _restart(self, flight: Flight) -> list[Action]:
        """Start over with a new upload: every chunk that arrived is still in its slot."""
        restarted = self._flights[flight.key] = Flight(flight.key, flight.index)
        actions: list[Action] = self._start_jobs(restarted, [Open(flight.key, flight.index)])
        for chunk in sorted(flight.chunk_events.keys() & flight.slots.keys()):
            actions += self._chunk_full(restarted, flight.chunk_events[chunk])
        return actions + (self._staged(restarted) if flight.staged else [])

    def _drop(self, flight: Flight, error: HoldfastError) -> list[Action]:
        """Give up a checkpoint, or continue to: free the slots that no job uses, and discard after the last job."""
        flight.error, flight.waits_for_others = flight.error or error, False
        if flight.is_restarting and not isinstance(error, StoreError):
            flight.is_restarting = False  # aborted meanwhile, or damaged
            flight.error = error
        if flight.is_restarting:
            return [] if flight.jobs else self._restart(flight)
        idle = {chunk: slot for chunk, slot in flight.slots.items() if slot not in flight.busy}
        for chunk in idle:
            del flight.slots[chunk]
        actions: list[Action] = [FreeSlots(tuple(idle.values()))] if idle else []
        if flight.jobs == 0:
            del self._flights[flight.key]
            actions.append(Discard(flight.key, flight.error))
        return actions
