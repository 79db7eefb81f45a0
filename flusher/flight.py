"""State of one checkpoint in the flusher: chunks received, CRCs known, parts written.

Only `flusher.pipeline.Pipeline` changes it, and decides what follows; this file has the rules of a single checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flusher.steps import Begin, ChunkFull, Resume
from holdfast.checkpoints.share_records import ShareSeal
from holdfast.crc import combine_all
from holdfast.errors import HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.share_sums import EntryPiece, entry_pieces
from holdfast.image.shares import ImageShare


@dataclass(slots=True)
class Flight:
    """One checkpoint, until it is published or discarded."""

    key: CheckpointId
    index: LayoutIndex
    resume: Resume | None = None
    share: ImageShare | None = None  # where several flushers write it; None: this one writes all of it
    chunks: range = field(init=False)  # written by this flusher
    entry_crcs: list[int | None] = field(init=False)
    entry_left: list[int] = field(init=False)  # segments of the entry that are not verified yet
    chunk_left: list[int] = field(init=False)  # entries that the chunk's CRC fields still wait for
    chunk_crcs: list[int | None] = field(init=False)
    unfinished: int = field(init=False)  # chunks whose CRC is not known yet
    segment_crcs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)  # chunk → its slot, until it is freed
    chunk_events: dict[int, ChunkFull] = field(default_factory=dict)  # the event of each chunk in `slots`
    opened: bool = False
    resumable: bool = True  # by another process
    # the upload is not resumable, so the ring keeps all chunks until it is published
    keeps_slots: bool = False
    is_restarting: bool = False  # once the last job has ended
    received: set[int] = field(default_factory=set)  # chunks received
    busy: set[int] = field(default_factory=set)  # slots that a job uses
    jobs: int = 0
    part_chunks: int = 0  # 0 until the upload is open
    parts_done: set[int] = field(default_factory=set)
    parts_sent: set[int] = field(default_factory=set)
    staged: bool = False
    publishing: bool = False  # or sealing; from then on only the store knows the outcome
    waits_for_others: bool = False  # for other flushers only
    seals: dict[int, ShareSeal] = field(default_factory=dict)  # of sealed shares; only at the lead
    has_put_crcs: bool = False  # the flushers of later shares can read this one's entry CRCs
    unread: list[int] = field(default_factory=list)  # shares whose entry CRCs are needed, the next one last
    # per entry: its pieces in other shares, and their CRCs
    others: dict[int, list[tuple[EntryPiece, int]]] = field(default_factory=dict)
    error: HoldfastError | None = None

    def __post_init__(self) -> None:
        index, share = self.index, self.share
        self.chunks = range(index.layout.chunks) if share is None else share.chunks
        self.entry_left = [len(places) for places in index.places]
        self.entry_crcs = [None if left else 0 for left in self.entry_left]
        self.chunk_left = [sum(self.entry_left[e] > 0 for e in needs) for needs in index.needs]
        self.chunk_crcs = [None] * index.layout.chunks
        self.unfinished = len(self.chunks)
        if share is not None:
            self.unread = sorted(self._shares_needed(share))
        if self.resume is not None:
            self._take_over(self.resume)

    def _take_over(self, resume: Resume) -> None:
        """Restore the state of the parts that a dead flusher wrote."""
        self.part_chunks = resume.part_chunks
        for part, segment_crcs in resume.parts.items():
            self.parts_done.add(part)
            self.parts_sent.add(part)
            for chunk, crcs in zip(self.part_range(part), segment_crcs, strict=True):
                self.received.add(chunk)
                self.note_crcs(chunk, crcs)
                self.finish_chunk(chunk)

    def _shares_needed(self, share: ImageShare) -> set[int]:
        """Return the other shares that hold bytes of entries whose CRC this one states."""
        index = self.index
        entries = {entry for chunk in share.chunks for entry in index.needs[chunk]}
        owners = {share.shares.owner(chunk) for entry in entries for chunk, _ in index.places[entry]}
        return owners - {share.index}

    def late_parts(self) -> int:
        """Return how many parts wait for the CRC of an entry that begins in another share."""
        if self.share is None or not self.part_chunks:
            return 0
        elsewhere = {
            entry
            for entry, places in enumerate(self.index.places)
            if places and places[0][0] < self.chunks.start
        }
        late = (chunk for chunk in self.chunks if self.index.needs[chunk] & elsewhere)
        return len({chunk // self.part_chunks for chunk in late})

    def note_crcs(self, chunk: int, crcs: tuple[int, ...]) -> list[int]:
        """Note the CRCs of a chunk's segments; return the chunks whose CRC fields waited for an entry in it."""
        freed: list[int] = []
        self.segment_crcs[chunk] = crcs
        for (_, _, entry), crc in zip(self.index.layout.segments(chunk), crcs, strict=True):
            if entry is None:
                continue
            self.entry_left[entry] -= 1
            if self.entry_left[entry] == 0:
                freed += self._entry_known(entry, crc)
        return freed

    def note_others(self, share: int, crcs: tuple[int, ...]) -> list[int]:
        """Note the entry CRCs of another share; return the chunks here whose CRC fields waited for them."""
        assert self.share is not None
        chunks, freed = self.share.shares.chunks_of(share), []
        for piece, crc in zip(entry_pieces(self.index.layout, chunks), crcs, strict=True):
            self.others.setdefault(piece.entry, []).append((piece, crc))
            self.entry_left[piece.entry] -= sum(at in chunks for at, _ in self.index.places[piece.entry])
            if self.entry_left[piece.entry] == 0:
                freed += self._entry_known(piece.entry, crc)
        return [chunk for chunk in freed if chunk in self.chunks]

    def _entry_known(self, entry: int, last_crc: int) -> list[int]:
        """Compute the CRC of a verified entry; return the chunks that state it. `last_crc`: of its last bytes."""
        index = self.index
        places, others = index.places[entry], self.others.get(entry, [])
        here = ((at, number, index.layout.segments(at)[number]) for at, number in places)
        if len(places) == 1:
            self.entry_crcs[entry] = last_crc
        elif not others:
            self.entry_crcs[entry] = combine_all(
                (self.segment_crcs[at][number], segment.nbytes) for at, number, segment in here
            )
        else:
            runs = [(piece.offset, crc, piece.nbytes) for piece, crc in others]
            runs += [
                (segment.offset, self.segment_crcs[at][number], segment.nbytes)
                for at, number, segment in here
                if at in self.segment_crcs
            ]
            self.entry_crcs[entry] = combine_all((crc, nbytes) for _, crc, nbytes in sorted(runs))
        for waiting in index.waiting[entry]:
            self.chunk_left[waiting] -= 1
        return index.waiting[entry]

    def finish_chunk(self, chunk: int) -> None:
        """Compute the CRC of a chunk whose bytes are final."""
        segments = self.index.layout.segments(chunk)
        self.unfinished -= self.chunk_crcs[chunk] is None
        self.chunk_crcs[chunk] = combine_all(
            zip(self.segment_crcs[chunk], [nbytes for _, nbytes, _ in segments], strict=True)
        )

    @property
    def is_complete(self) -> bool:
        """Whether it is staged, and all its bytes are verified."""
        return self.staged and self.error is None and not self.unfinished

    def may_be_superseded(self, *, even_if_written: bool) -> bool:
        """Whether another checkpoint may take its place. `even_if_written`: even if the store has some of its parts."""
        # Until it is open, a resumed upload may turn out to be published.
        return not self.publishing and (not self.parts_done or (even_if_written and self.opened))

    def is_written(self, chunk: int) -> bool:
        """Whether the store has the part with this chunk."""
        return self.part_chunks > 0 and chunk // self.part_chunks in self.parts_done

    @property
    def parts(self) -> range:
        """The parts that this flusher writes."""
        return range(self.chunks.start // self.part_chunks, -(-self.chunks.stop // self.part_chunks))

    @property
    def missing(self) -> int:
        """How many chunks have not arrived."""
        return len(self.chunks) - len(self.received)

    def part_range(self, part: int) -> range:
        """Return the chunks of one part."""
        first = part * self.part_chunks
        return range(first, min(first + self.part_chunks, self.index.layout.chunks))


def describe_resume_mismatch(event: Begin) -> str:
    """Return how the record of written parts contradicts the layout; empty if it fits."""
    resume, layout = event.resume, event.index.layout
    if resume is None:
        return ""
    if resume.part_chunks < 1:
        return f"parts of {resume.part_chunks} chunks"
    parts = range(-(-layout.chunks // resume.part_chunks)) if event.share is None else event.share.parts
    if event.share is not None and resume.part_chunks != event.share.shares.part_chunks:
        return f"parts of {resume.part_chunks} chunks, expected {event.share.shares.part_chunks}"
    for part, segment_crcs in resume.parts.items():
        if part not in parts:
            return f"part {part}, expected {parts.start} to {parts.stop - 1}"
        first = part * resume.part_chunks
        chunks = range(first, min(first + resume.part_chunks, layout.chunks))
        counts = [len(crcs) for crcs in segment_crcs]
        expected = [len(layout.segments(chunk)) for chunk in chunks]
        if counts != expected:
            return f"part {part} has {counts} segments, expected {expected}"
    return ""


def describe_chunk_mismatch(flight: Flight, event: ChunkFull) -> str:
    """Return what is wrong with an incoming chunk; empty if nothing is."""
    layout = flight.index.layout
    if event.chunk >= layout.chunks:
        return f"the image has {layout.chunks} chunks"
    if event.chunk not in flight.chunks:
        return f"this flusher writes chunks {flight.chunks.start} to {flight.chunks.stop - 1}"
    if flight.staged:
        return "came after staged"
    if event.chunk in flight.received:
        return "came twice"
    if event.nbytes != layout.chunk_extent(event.chunk).nbytes:
        return f"{event.nbytes} bytes, expected {layout.chunk_extent(event.chunk).nbytes}"
    ranks, expected = tuple(source.rank for source in event.sources), layout.senders(event.chunk)
    if ranks != expected:
        unexpected, missing = sorted({*ranks} - {*expected}), sorted({*expected} - {*ranks})
        counts = f"sent by {len(ranks)} ranks, expected {len(expected)}"
        return f"{counts}; too many: {unexpected[:20]}, missing: {missing[:20]}"
    return ""
