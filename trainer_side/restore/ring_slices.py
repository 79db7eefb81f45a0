"""The stager's ring as a source of slices: nearer than the store, farther than a rank's own tiers.

    rank 0 asks for the contents ─► to all ─┐
    the store's manifests ──────────────────┴─► checkpoints of the ring that are known to have been staged ─► slices
    a rank elsewhere: its share of their frames ─► FETCH ─► FETCHED ─┐
    a rank of the stager's machine: ──► the shared memory itself ─────┴─► CRC fields left out ─► reading.py

A checkpoint counts if its file beside the ring says that it is staged and the ring has every chunk; or if the store has
published it, in which case the store provides missing chunks. A step that was never staged is ignored. If the stager
does not answer, the store is read. If all ranks are on the stager's machine, each rank reads everything itself
(`slice_reader.py`): passing bytes on would be one more copy.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from holdfast.errors import DamageError, HoldfastError, ProtocolError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.entries import Extent
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import SliceFrame, SliceSeal, frames_of
from holdfast.ring.near_ring import NearRing, open_near_ring
from holdfast.ring.remains import ANSWER_BYTES_MAX, FetchKind, HeldCheckpoint, decode_held
from holdfast.wire.frames import to_json
from trainer_side.ranks.peers import Peers
from trainer_side.restore.choice import RING, StoreCandidate
from trainer_side.tiers.tier import Nearness, SealedSlice, SliceKeeper

_log = logging.getLogger("holdfast.restore")
_CHECKPOINTS_MAX = 4  # newest first; older ones come from the store


class Fetch(Protocol):
    """Interface of `trainer_side.link.link.Link.fetch`: ask the stager; None if it lacks the bytes. Any thread."""

    def __call__(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None: ...


class _RingCheckpoint(NamedTuple):
    held: HeldCheckpoint
    layout: Layout


class RingContents:
    """The contents of the ring, as `fetch_ring_contents` got them on rank 0; the same on every rank."""

    def __init__(self, fetch: Fetch | None, held: list[HeldCheckpoint], place: bytes = b"") -> None:
        self._fetch, self._held, self._place = fetch, held, place

    @property
    def keys(self) -> list[CheckpointId]:
        """The checkpoints of which the ring may have chunks."""
        return [CheckpointId(held.attempt, held.step) for held in self._held]

    def staged_slices(self, stored: Sequence[StoreCandidate], peers: Peers) -> RingSlices:
        """Return the checkpoints that were staged, according to the ring or the store. Collective.

        `stored`: The checkpoints of `keys` that the store has. The store was listed after the ring, so a checkpoint
        that became durable in between is in one of the two.
        """
        found: list[_RingCheckpoint] = []
        layouts: dict[str, Layout | None] = {}
        for held in self._held:
            of_store = [one for one in stored if (one.attempt, one.step) == (held.attempt, held.step)]
            digest = held.staged_digest or next((one.digest for one in of_store if one.digest), "")
            if not digest or len(found) == _CHECKPOINTS_MAX:
                continue
            if digest not in layouts:
                layouts[digest] = self._layout(digest, peers)
            layout = layouts[digest]
            if layout is None:
                continue
            is_complete = len(held.chunks_fitting(layout)) == layout.chunks
            if is_complete or any(one.digest == digest and not one.fault for one in of_store):
                found.append(_RingCheckpoint(held, layout))
        near = open_near_ring(self._place) if self._place and found else None
        return RingSlices(self._fetch, found, near, near_on_all_ranks=peers.all_agree(near is not None))

    def _layout(self, digest: str, peers: Peers) -> Layout | None:
        data = _fetch_on_rank_0(self._fetch, peers, FetchKind.LAYOUT, digest.encode())
        try:
            layout = Layout.from_bytes(data) if data else None
        except ProtocolError as error:
            _log.warning("restore: the stager's ring: %s; not used", error)
            return None
        return layout if layout is not None and layout.digest == digest else None


def fetch_ring_contents(fetch: Fetch | None, peers: Peers) -> RingContents:
    """Ask the stager, from rank 0, for the contents of the ring. Collective. PeerLost: a rank is gone."""
    data = _fetch_on_rank_0(fetch, peers, FetchKind.HELD)
    if not data:
        return RingContents(fetch, [])
    place = _fetch_on_rank_0(fetch, peers, FetchKind.PLACE)
    try:
        return RingContents(fetch, decode_held(data), place)
    except ProtocolError as error:
        _log.warning("restore: the stager's ring: %s; not used", error)
        return RingContents(None, [])


def _fetch_on_rank_0(fetch: Fetch | None, peers: Peers, kind: FetchKind, body: bytes = b"") -> bytes:
    """Return the stager's answer on every rank; empty if it has none, or does not answer. Collective."""
    data = b""
    if peers.rank == 0 and fetch is not None:
        try:
            data = fetch(kind, body=body) or b""
        except HoldfastError as error:
            _log.warning("restore: %s; the ring is not used", error)
    return peers.broadcast(data if peers.rank == 0 else None)


class RingSlices(SliceKeeper):
    """The ring's part of each saved rank's slice, as a tier. Any thread may call `read_into`."""

    name = "the stager's ring"
    nearness = Nearness.RING

    def __init__(
        self,
        fetch: Fetch | None,
        checkpoints: Sequence[_RingCheckpoint],
        near: NearRing | None = None,
        *,
        near_on_all_ranks: bool = False,
    ) -> None:
        # `near_on_all_ranks`: every rank reads the ring itself; the same on every rank.
        self._fetch, self._checkpoints = fetch, checkpoints
        self._near, self.near_on_all_ranks = near, near_on_all_ranks
        self._lock = threading.Lock()
        self._indexes: dict[str, LayoutIndex] = {}
        self._frames: dict[tuple[str, int], tuple[tuple[SliceFrame, ...], list[int]]] = {}
        self._problem = ""

    def kept_slices(self) -> list[SealedSlice]:
        """As `trainer_side.tiers.tier.Tier.kept_slices`; a slice may lack chunks, which are named."""
        return [kept for checkpoint in self._checkpoints for kept in _slices(checkpoint)]

    def read_into(self, kept: SealedSlice, offset: int, view: memoryview) -> None:
        """Fill `view` with a part of one frame; its CRC fields are zero, as when the ranks sent them.

        DamageError: the chunk has left the ring. StoreError: the stager is gone, or does not answer.
        """
        chunk, spans = self._spans(kept, offset, view.nbytes)
        base = chunk * kept.layout.chunk_bytes
        parts = [*_parts(spans, view)]
        wanted = [(span.offset - base, part) for span, part in parts]
        if self._near is None or not self._near.read(kept.seal.attempt, kept.seal.step, chunk, wanted):
            for some in _group_neighbours(parts):
                first, end = some[0][0].offset, some[-1][0].end
                data = memoryview(self._fetch_bytes(kept, chunk, first - base, end - first))
                for span, part in some:
                    part[:] = data[span.offset - first : span.end - first]
        for span, part in parts:
            self._zero_crc_fields(kept.layout, chunk, span, part)

    def _spans(self, kept: SealedSlice, offset: int, nbytes: int) -> tuple[int, list[Extent]]:
        """Return the chunk, and the extents of the image, in `nbytes` of the slice from `offset` on."""
        key = kept.layout.digest, kept.seal.rank
        with self._lock:
            if key not in self._frames:
                frames = frames_of(kept.layout, kept.seal.rank)
                self._frames[key] = frames, [frame.offset for frame in frames]
            frames, begins = self._frames[key]
        frame = frames[bisect.bisect_right(begins, offset) - 1]
        spans = _extents_in(frame, offset, nbytes)
        if sum(span.nbytes for span in spans) != nbytes:
            raise DamageError(
                f"{nbytes} bytes from byte {offset} were asked for, but the frame of chunk {frame.chunk} ends before"
            )
        return frame.chunk, spans

    def _fetch_bytes(self, kept: SealedSlice, chunk: int, offset: int, nbytes: int) -> bytes:
        if self._problem or self._fetch is None:
            raise StoreError(f"{self.name}: {self._problem or 'this job has no stager'}")
        try:
            data = self._fetch(
                FetchKind.BYTES,
                attempt=kept.seal.attempt,
                step=kept.seal.step,
                chunk=chunk,
                body=to_json({"offset": offset, "nbytes": nbytes}),
            )
        except HoldfastError as error:
            self._problem = str(error)  # not asked again: each request would wait as long
            raise StoreError(f"{self.name}: {error}") from error
        if data is None:
            raise DamageError(
                f"{self.name}: chunk {chunk} is no longer in the ring: its slot was filled again"
            )
        if len(data) != nbytes:
            raise DamageError(f"{self.name}: chunk {chunk}: expected {nbytes} bytes, got {len(data)}")
        return data

    def _zero_crc_fields(self, layout: Layout, chunk: int, span: Extent, view: memoryview) -> None:
        """Zero the CRC fields: the flusher fills them in when it writes a chunk, but the ranks' CRCs cover zeros."""
        with self._lock:
            if layout.digest not in self._indexes:
                self._indexes[layout.digest] = LayoutIndex(layout)
            index = self._indexes[layout.digest]
        for offset, nbytes in index.fields[chunk].extents():
            begin = max(0, chunk * layout.chunk_bytes + offset - span.offset)
            end = min(span.nbytes, chunk * layout.chunk_bytes + offset + nbytes - span.offset)
            if begin < end:
                view[begin:end] = bytes(end - begin)


def _slices(checkpoint: _RingCheckpoint) -> Iterator[SealedSlice]:
    held, layout = checkpoint
    fitting = held.chunks_fitting(layout)
    for rank in range(layout.ranks):
        crcs, absent = [], set()
        for frame in frames_of(layout, rank):
            record = held.chunks[frame.chunk] if frame.chunk in fitting else None
            if record is None:
                absent.add(frame.chunk)
            crcs.append(0 if record is None else dict(record.sources)[rank])
        seal = SliceSeal(
            run="",
            attempt=held.attempt,
            step=held.step,
            rank=rank,
            ranks=layout.ranks,
            layout_digest=layout.digest,
            frame_crc32s=tuple(crcs),
            record=SaveRecord(job=RING, drift=held.drift, trackers=dict(held.trackers) or None).to_json(),
        )
        yield SealedSlice(seal, layout, "ring", absent=frozenset(absent))


def _extents_in(frame: SliceFrame, offset: int, nbytes: int) -> list[Extent]:
    """Return the extents of the image in a part of a frame; `offset` counts from the begin of the slice."""
    found: list[Extent] = []
    position = frame.offset
    for extent in frame.extents:
        begin, end = max(offset, position), min(offset + nbytes, position + extent.nbytes)
        if begin < end:
            found.append(Extent(extent.offset + begin - position, end - begin))
        position += extent.nbytes
    return found


def _parts(spans: Sequence[Extent], view: memoryview) -> Iterator[tuple[Extent, memoryview]]:
    """Cut the spans to the size of an answer; yield each with its part of the view, in which they lie back to back."""
    position = 0
    for span in spans:
        for offset in range(span.offset, span.end, ANSWER_BYTES_MAX):
            nbytes = min(span.end - offset, ANSWER_BYTES_MAX)
            yield Extent(offset, nbytes), view[position : position + nbytes]
            position += nbytes


def _group_neighbours(
    parts: Sequence[tuple[Extent, memoryview]],
) -> Iterator[list[tuple[Extent, memoryview]]]:
    """Group neighbours that fit into one answer, together with the gaps between them."""
    some: list[tuple[Extent, memoryview]] = []
    for part in parts:
        if some and part[0].end - some[0][0].offset > ANSWER_BYTES_MAX:
            yield some
            some = []
        some.append(part)
    if some:
        yield some
