"""The layout: the place of every byte of the image, and the rank that sends it.

The *image* is the final `torch.load` file. The ranks agree on its *layout* before the first byte moves; it is the same
on every rank until the set of tensors changes:

    image   │ header │ data.pkl      │desc│ header │ storage 0 │desc│ header │ storage 1      │desc│ … │ directory │
    entries          └ owner rank 0 ─┘             └ replicated┘             └ replicated ────┘
    chunks  │            0             │            1             │            2             │         3         │
    slices  │                     rank 0                          │                     rank 1                   │

An *entry* is a run of bytes whose CRC-32 the zip file states and which is not known when the layout is made. All bytes
between entries are *literals*: zip headers, padding, constants, the central directory. The rank whose slice holds
literals or a replicated entry sends them; an entry with an owner is sent by that rank alone, wherever the entry lies
(data.pkl and buffers: rank 0; `PerRank` values: their rank). An entry that is split among the ranks has a pattern
(regions.py): each rank sends the part that it holds, and ranks that hold the same part divide it. Only layouts of older
versions have *spared* ranks: these have no slice and send only bytes that no other rank holds.

Every sender sends the CRC fields in `Entry.crc_fields` as four zero bytes; the flusher writes the true values once they
are known.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.errors import ProtocolError
from holdfast.image.entries import REPLICATED, SPLIT, TEXT_MAX, Entry, Extent, Segment, SentPart, TensorInfo
from holdfast.image.regions import Pattern, Share, merge_adjacent
from holdfast.parse_cost import inflate_json

ALIGNMENT_BYTES = 4096
# Ranks that may send into one chunk; each costs the stager a receive and a line of the journal.
SOURCES_MAX = 16384
CHUNK_BYTES = 16 * 1024 * 1024
LARGE_IMAGE_BYTES = 100 * 10**9
_LARGE_CHUNK_BYTES = 64 << 20
_RING_CHUNKS = 64  # in a smaller ring, incoming chunks wait for outgoing ones
_FORMAT = 1
# Read only: older versions wrote it when ranks were about to lose their machine. A ring may still hold one.
_FORMAT_SPARED = 2
_FORMAT_SPLIT = 3  # with patterns, and with `spared`, which this version leaves empty
_FORMATS = (_FORMAT, _FORMAT_SPARED, _FORMAT_SPLIT)
_MAX_LAYOUT_BYTES = 1 << 30  # decompressed; about three million tensors
_CHUNKS_MAX = 1 << 20  # bounds the memory per chunk; 16 TiB in chunks of 16 MiB, and chunks may be larger
_RANKS_MAX = 1 << 31
_CHUNKS_KEPT = 64  # whose senders are cached, in a layout with patterns


@dataclass(frozen=True)
class Layout:
    """The layout of one image for a number of ranks. Immutable. `chunk_bytes`: A multiple of 4096. `spared`: Ranks
    without a slice, ascending; empty except in layouts of older versions. ProtocolError: the parts contradict each
    other. A layout also comes from outside (wire, disk), so all offsets and sizes are checked here.
    """

    image_bytes: int
    chunk_bytes: int
    ranks: int
    entries: tuple[Entry, ...]
    tensors: tuple[TensorInfo, ...] = ()
    spared: tuple[int, ...] = ()
    patterns: tuple[Pattern, ...] = ()

    def __post_init__(self) -> None:
        if self.image_bytes <= 0 or self.ranks <= 0:
            raise ProtocolError(
                f"layout: image of {self.image_bytes} bytes for {self.ranks} ranks; both must be above 0"
            )
        if self.chunk_bytes <= 0 or self.chunk_bytes % ALIGNMENT_BYTES:
            raise ProtocolError(
                f"layout: chunk_bytes must be a multiple of {ALIGNMENT_BYTES}, got {self.chunk_bytes}"
            )
        if self.chunks > _CHUNKS_MAX or self.ranks >= _RANKS_MAX:
            raise ProtocolError(
                f"layout: {self.chunks} chunks for {self.ranks} ranks, expected at most {_CHUNKS_MAX} chunks and fewer "
                f"than {_RANKS_MAX} ranks; raise chunk_bytes"
            )
        self._check_spared()
        self._check_entries()
        self._check_crc_fields()
        for tensor in self.tensors:
            if not 0 <= tensor.entry < len(self.entries):
                raise ProtocolError(
                    f"layout: tensor {tensor.path} names entry {tensor.entry} of {len(self.entries)}"
                )
        self._check_senders()

    def _check_entries(self) -> None:
        end = 0
        for entry in self.entries:
            if entry.offset < end or entry.nbytes < 0 or entry.end > self.image_bytes:
                raise ProtocolError(
                    f"layout: entry {entry.name} at {entry.offset}+{entry.nbytes} overlaps the one before (ends {end}) "
                    f"or leaves the image of {self.image_bytes} bytes"
                )
            if not SPLIT - len(self.patterns) < entry.owner < self.ranks:
                raise ProtocolError(
                    f"layout: entry {entry.name} has owner {entry.owner}, of {self.ranks} ranks and "
                    f"{len(self.patterns)} patterns"
                )
            pattern = self.pattern_of(entry)
            if pattern is not None and pattern.nbytes != entry.nbytes:
                raise ProtocolError(
                    f"layout: entry {entry.name} of {entry.nbytes} bytes has a pattern for {pattern.nbytes}"
                )
            end = entry.end
        for pattern in self.patterns:
            if max(pattern.region_of, default=0) >= self.ranks:
                raise ProtocolError(
                    f"layout: rank {max(pattern.region_of)} holds a region, of {self.ranks} ranks"
                )

    def _check_crc_fields(self) -> None:
        starts = [entry.offset for entry in self.entries]
        for entry in self.entries:
            for crc_field in entry.crc_fields:
                inside = bisect.bisect_right(starts, crc_field + 3) - 1
                in_entry = (
                    inside >= 0 and self.entries[inside].end > crc_field and self.entries[inside].nbytes > 0
                )
                if crc_field < entry.end or crc_field + 4 > self.image_bytes or in_entry:
                    raise ProtocolError(
                        f"layout: CRC field of {entry.name} at {crc_field} is not in a literal after it"
                    )

    def _check_spared(self) -> None:
        spared = list(self.spared)
        in_order = spared == sorted(set(spared))
        if spared and not (in_order and 0 <= spared[0] <= spared[-1] < self.ranks > len(spared)):
            raise ProtocolError(
                f"layout: spared ranks {spared[:20]}, expected some of {self.ranks} ranks, not all, ascending"
            )

    def _check_senders(self) -> None:
        """Limit the senders of a chunk: the stager posts a receive for each, and the journal names them all."""
        if self.ranks <= SOURCES_MAX:
            return
        senders, most = max((len(self.senders(chunk)), chunk) for chunk in range(self.chunks))
        if senders > SOURCES_MAX:
            less_bytes = max(self.chunk_bytes // 4 // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES
            raise ProtocolError(
                f"layout: {senders} ranks send into chunk {most} of {self.chunk_bytes} bytes, at most {SOURCES_MAX} "
                "may, because small values or shards of many ranks lie side by side; start the stager with a smaller "
                f"chunk_bytes, such as {less_bytes}"
            )

    @cached_property
    def chunks(self) -> int:
        """Number of chunks; the last one may be short."""
        return -(-self.image_bytes // self.chunk_bytes)

    def pattern_of(self, entry: Entry) -> Pattern | None:
        """Return how an entry is split; None for an entry that is not."""
        number = self.pattern_number(entry)
        return None if number is None else self.patterns[number]

    def pattern_number(self, entry: Entry) -> int | None:
        """Return the number of the pattern by which an entry is split; None for an entry that is not."""
        return SPLIT - entry.owner if entry.owner <= SPLIT else None

    def chunk_extent(self, chunk: int) -> Extent:
        """Return where chunk `chunk` lies in the image."""
        offset = chunk * self.chunk_bytes
        return Extent(offset, min(self.chunk_bytes, self.image_bytes - offset))

    @cached_property
    def _carriers(self) -> Sequence[int]:
        """The ranks with a slice, ascending."""
        if not self.spared:
            return range(self.ranks)
        spared = set(self.spared)
        return [rank for rank in range(self.ranks) if rank not in spared]

    def slice_chunks(self, rank: int) -> range:
        """Return the chunks of rank `rank`'s slice: contiguous, and divided evenly; empty for a spared rank."""
        carriers = self._carriers
        place = bisect.bisect_left(carriers, rank)
        if place == len(carriers) or carriers[place] != rank:
            return range(0)
        return range(place * self.chunks // len(carriers), (place + 1) * self.chunks // len(carriers))

    def chunk_rank(self, chunk: int) -> int:
        """Return the rank whose slice holds chunk `chunk`."""
        return self._carriers[((chunk + 1) * len(self._carriers) - 1) // self.chunks]

    @cached_property
    def _segments(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each chunk in order, found in one sweep over entries and chunks."""
        per_chunk: list[list[Segment]] = [[] for _ in range(self.chunks)]

        def put(offset: int, end: int, entry: int | None) -> None:
            while offset < end:
                chunk = offset // self.chunk_bytes
                stop = min(end, (chunk + 1) * self.chunk_bytes)
                per_chunk[chunk].append(Segment(offset, stop - offset, entry))
                offset = stop

        position = 0
        for index, entry in enumerate(self.entries):
            put(position, entry.offset, None)
            put(entry.offset, entry.end, index)
            position = entry.end
        put(position, self.image_bytes, None)
        return tuple(tuple(segments) for segments in per_chunk)

    def segments(self, chunk: int) -> tuple[Segment, ...]:
        """Return the segments of chunk `chunk`, in order, without gaps."""
        return self._segments[chunk]

    def held_bytes(self, entry: int, rank: int) -> int:
        """Return how many bytes of an entry `rank` holds; the entry must not belong to another rank alone."""
        pattern = self.pattern_of(self.entries[entry])
        if pattern is None:
            return self.entries[entry].nbytes
        region = pattern.region_of.get(rank)
        return 0 if region is None else pattern.combs[region].nbytes

    def is_split(self, segment: Segment) -> bool:
        """Whether several ranks may send parts of `segment`."""
        return segment.entry is not None and self.entries[segment.entry].owner <= SPLIT

    def sender(self, chunk: int, segment: Segment) -> int:
        """Return the rank that sends `segment` of chunk `chunk`; the segment must not be split."""
        if segment.entry is not None and self.entries[segment.entry].owner != REPLICATED:
            return self.entries[segment.entry].owner
        return self.chunk_rank(chunk)

    def parts(self, chunk: int, rank: int) -> list[SentPart]:
        """Return the bytes of rank `rank` in chunk `chunk`, segment by segment, in the order of the rank's frame."""
        found: list[SentPart] = []
        for segment in self.segments(chunk):
            if self.is_split(segment):
                if (part := self.part(segment, rank)) is not None:
                    found.append(part)
            elif self.sender(chunk, segment) == rank:
                inside = 0 if segment.entry is None else segment.offset - self.entries[segment.entry].offset
                extents = (Extent(segment.offset, segment.nbytes),)
                found.append(SentPart(segment.entry, inside, segment.nbytes, extents))
        return found

    def part(self, segment: Segment, rank: int) -> SentPart | None:
        """Return the bytes that a rank sends of a split segment; None if it sends none."""
        number, pattern = self._split(segment)
        region = pattern.region_of.get(rank)
        shares = () if region is None else pattern.shares(region, number, self.spared)
        share = next((share for share in shares if share.rank == rank), None)
        if region is None or share is None:
            return None
        first, end = self._share_within(segment, region, share)
        if first >= end:
            return None
        start = self.entries[number].offset
        places = (Extent(start + at, nbytes) for at, nbytes in pattern.combs[region].extents(first, end))
        return SentPart(number, first, end - first, tuple(places))

    def _split(self, segment: Segment) -> tuple[int, Pattern]:
        assert segment.entry is not None
        pattern = self.pattern_of(self.entries[segment.entry])
        assert pattern is not None
        return segment.entry, pattern

    def _share_within(self, segment: Segment, region: int, share: Share) -> tuple[int, int]:
        """Return which bytes of a share, numbered as in its region, lie in the segment."""
        number, pattern = self._split(segment)
        comb, start = pattern.combs[region], self.entries[number].offset
        return (
            max(share.first, comb.bytes_before(segment.offset - start)),
            min(share.end, comb.bytes_before(segment.end - start)),
        )

    def split_senders(self, segment: Segment) -> list[int]:
        """Return the ranks that send parts of a split segment, ascending."""
        number, pattern = self._split(segment)
        start = self.entries[number].offset
        found = []
        for region in pattern.regions_within(segment.offset - start, segment.end - start):
            for share in pattern.shares(region, number, self.spared):
                first, end = self._share_within(segment, region, share)
                if first < end:
                    found.append(share.rank)
        return sorted(found)

    @cached_property
    def _pieces(self) -> tuple[dict[int, tuple[Extent, ...]], ...]:
        """Per chunk of a layout without patterns: sender → its extents, neighbours merged."""
        result: list[dict[int, tuple[Extent, ...]]] = []
        for chunk in range(self.chunks):
            by_rank: dict[int, list[Extent]] = {}
            for segment in self.segments(chunk):
                mine = by_rank.setdefault(self.sender(chunk, segment), [])
                if mine and mine[-1].end == segment.offset:
                    mine[-1] = Extent(mine[-1].offset, mine[-1].nbytes + segment.nbytes)
                else:
                    mine.append(Extent(segment.offset, segment.nbytes))
            result.append({rank: tuple(extents) for rank, extents in by_rank.items()})
        return tuple(result)

    @cached_property
    def _cached_senders(self) -> OrderedDict[int, tuple[int, ...]]:
        return OrderedDict()

    def senders(self, chunk: int) -> tuple[int, ...]:
        """Return the ranks that send into chunk `chunk`, ascending."""
        if not self.patterns:
            return tuple(sorted(self._pieces[chunk]))
        if (kept := self._cached_senders.get(chunk)) is not None:
            return kept
        found: set[int] = set()
        for segment in self.segments(chunk):
            split = self.is_split(segment)
            found.update(self.split_senders(segment) if split else [self.sender(chunk, segment)])
        senders = self._cached_senders[chunk] = tuple(sorted(found))
        while len(self._cached_senders) > _CHUNKS_KEPT:
            self._cached_senders.popitem(last=False)
        return senders

    def pieces(self, chunk: int, rank: int) -> tuple[Extent, ...]:
        """Return the image extents of rank `rank` in chunk `chunk`, in order; one frame carries them back to back."""
        if not self.patterns:
            return self._pieces[chunk].get(rank, ())
        extents = [extent for part in self.parts(chunk, rank) for extent in part.extents]
        return tuple(merge_adjacent(extents))

    def sent_frames(self, rank: int) -> Iterator[tuple[int, tuple[Extent, ...]]]:
        """Yield all frames of rank `rank` in sending order: `(chunk, extents)`, chunks ascending."""
        for chunk in range(self.chunks):
            if extents := self.pieces(chunk, rank):
                yield chunk, extents

    @cached_property
    def frames(self) -> tuple[int, ...]:
        """The number of frames that each rank sends."""
        sent = Counter(rank for chunk in range(self.chunks) for rank in self.senders(chunk))
        return tuple(sent[rank] for rank in range(self.ranks))

    def slice_bytes(self, rank: int) -> int:
        """Return how many bytes rank `rank` sends for one checkpoint."""
        return sum(extent.nbytes for _, extents in self.sent_frames(rank) for extent in extents)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hex: equal on two ranks only if their layouts are equal."""
        return hashlib.sha256(self._canonical).hexdigest()

    @cached_property
    def _canonical(self) -> bytes:
        document: dict[str, Any] = {
            "format": _FORMAT_SPLIT if self.patterns else _FORMAT_SPARED if self.spared else _FORMAT,
            "image_bytes": self.image_bytes,
            "chunk_bytes": self.chunk_bytes,
            "ranks": self.ranks,
            "entries": [[e.name, e.offset, e.nbytes, e.owner, list(e.crc_fields)] for e in self.entries],
            "tensors": [[t.path, t.dtype, list(t.shape), t.entry] for t in self.tensors],
        }
        if self.spared or self.patterns:
            document["spared"] = list(self.spared)
        if self.patterns:
            document["patterns"] = [pattern.to_json() for pattern in self.patterns]
        return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()

    def to_bytes(self) -> bytes:
        """Return zlib-compressed canonical JSON, as sent to the stager and stored beside the ring."""
        return zlib.compress(self._canonical, 1)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Layout:
        """Read a result of `to_bytes`. ProtocolError: it is something else, or too costly to parse."""
        try:
            document = json.loads(_inflate(data))
            if document["format"] not in _FORMATS:
                raise ProtocolError(
                    f"layout: format {document['format']!r}, this version reads {_FORMAT} to {_FORMATS[-1]}"
                )
            return cls(
                image_bytes=_whole_number(document["image_bytes"]),
                chunk_bytes=_whole_number(document["chunk_bytes"]),
                ranks=_whole_number(document["ranks"]),
                entries=tuple(
                    Entry(
                        _text(name),
                        _whole_number(offset),
                        _whole_number(nbytes),
                        _whole_number(owner),
                        _whole_numbers(crc_fields),
                    )
                    for name, offset, nbytes, owner, crc_fields in document["entries"]
                ),
                tensors=tuple(
                    TensorInfo(_text(path), _text(dtype), _whole_numbers(shape), _whole_number(entry))
                    for path, dtype, shape, entry in document["tensors"]
                ),
                spared=_whole_numbers(document["spared"]) if document["format"] != _FORMAT else (),
                patterns=tuple(map(Pattern.from_json, document["patterns"]))
                if document["format"] == _FORMAT_SPLIT
                else (),
            )
        except (zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError(f"layout: it cannot be read: {error}") from error


def _inflate(data: bytes | bytearray | memoryview) -> bytes:
    try:
        return inflate_json(data, _MAX_LAYOUT_BYTES)
    except ValueError as error:
        raise ProtocolError(
            f"layout: {error}; start the job again, and if its state holds millions of tensors, join some of them"
        ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT_MAX:
        raise ProtocolError(f"layout: expected a text of at most {TEXT_MAX} characters, got {value!r:.80}")
    value.encode()  # raises for half a surrogate pair: valid JSON, but no manifest or log can hold it
    return value


def _whole_number(value: Any) -> int:
    if type(value) is not int or not -(2**62) < value < 2**62:
        raise ProtocolError(f"layout: expected a whole number below 2^62, got {value!r:.80}")
    return value


def _whole_numbers(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_whole_number(value) for value in values)


def chunk_bytes_for(image_bytes: int | None, ring_bytes: int | None) -> int:
    """Return the default chunk size: 16 MiB, and 64 MiB for images of 100 GB and more. `image_bytes`: Of the newest
    checkpoint, if any. `ring_bytes`: None for a ring that grows with the image.

    Each chunk, of any size, costs stager and flusher some Python, a few messages and three journal writes, and 1 TB is
    60,000 chunks of 16 MiB. Smaller chunks showed no gain.
    """
    large_fit = ring_bytes is None or ring_bytes >= _RING_CHUNKS * _LARGE_CHUNK_BYTES
    if image_bytes is not None and image_bytes >= LARGE_IMAGE_BYTES and large_fit:
        return _LARGE_CHUNK_BYTES
    return CHUNK_BYTES
