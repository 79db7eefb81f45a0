"""Which rank reads which bytes from where, and which ranks need them: agreed, or computed from inputs all ranks know.

shared   needed whole by every rank       read once, 1/R by each rank, and sent to the others
own      split on some rank               each rank reads its regions; for a rank that needs it whole, one region
         small, next to own entries       the same: step counters of an optimizer lie between its moments in the file,
                                          and their chunks would be read a second time
neither  needed by no rank                not read

Slices are divided by frames. If several ranks found a frame, the one with the nearest tier reads it, and among equals
the one that has less to read. If a frame is missing, its whole chunk comes from the store, where one CRC covers the
chunk. Bytes that one source fails to provide are read from the next.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import DamageError, HoldfastError, StoreError
from holdfast.image.entries import Extent
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.image.slices import frames_of
from holdfast.store.base import Store
from trainer_side.ranks.deadlines import HANGING_SHARE
from trainer_side.ranks.peers import Peers, gather
from trainer_side.restore.choice import NEARNESS_OF_STORE, STORE, Candidate
from trainer_side.restore.split_parts import PlacedParts
from trainer_side.restore.structure import Structure, chunk_extent, ends_of
from trainer_side.restore.targets import EntrySink, EntryTarget, ScatterTarget, copy_regions, whole_entry
from trainer_side.tiers.first_touch import cores_of_rank
from trainer_side.tiers.tier import Nearness, SealedSlice, SliceKeeper

_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class ReadPlan:
    """The targets of this rank. All ranks have the same shared entries and the same own entries."""

    # Entries that every rank needs whole; an `EntryTarget` if they go to host memory.
    shared: dict[int, EntrySink] = field(default_factory=dict)
    own: dict[int, ScatterTarget] = field(default_factory=dict)
    unshared: frozenset[int] = frozenset()  # entries that are own, or that no rank needs
    # Shared entries in host memory from which this rank also copies parts.
    mixed: dict[int, ScatterTarget] = field(default_factory=dict)

    @property
    def targets(self) -> Mapping[int, EntrySink]:
        return {**self.shared, **self.own}

    def copy_remaining(self) -> None:
        """Copy bytes that could not be read in place to where they belong. Training thread, after they arrived."""
        for index, target in self.mixed.items():
            whole = self.shared[index]
            assert isinstance(whole, EntryTarget)
            target.put(0, whole.address, whole.memory)
        if self.own or self.mixed:
            copy_regions([*self.own.values(), *self.mixed.values()])


def agree_on_plan(structure: Structure, placed: PlacedParts, peers: Peers) -> ReadPlan:
    """Agree on the ranks that need each entry. Collective. `structure`: after `allocate_on_device`."""
    free: list[set[int]] = []
    wanted: set[int] = set()
    if not peers.all_agree(not placed.free and not placed.regions):
        mine = json.dumps([sorted(placed.free), sorted(placed.regions)]).encode()
        for message in gather(peers, mine):
            remote_free, regions_there = json.loads(message)
            free.append(set(remote_free))
            wanted.update(regions_there)
    unshared = frozenset[int]().union(*free)
    wanted.update(index for index in unshared if any(index not in there for there in free))
    storages = structure.storages
    shared: dict[int, EntrySink] = {
        index: EntryTarget.of(storage)
        if storage.device.type == "cpu"
        else ScatterTarget.whole(index, storage)
        for index, storage in storages.items()
        if index not in unshared
    }
    own = {index: placed.regions.get(index, ScatterTarget()) for index in sorted(unshared & wanted)}
    for index, target in own.items():
        if index not in placed.free:
            target.regions.append(whole_entry(index, storages[index]))
    if own:
        small = {index for index in shared if storages[index].nbytes() <= _SMALL_BYTES}
        between = small - wanted
        for index in sorted(between):
            own[index] = ScatterTarget.whole(index, storages[index])
            del shared[index]
        unshared |= between
    mixed = {index: target for index, target in placed.regions.items() if index in shared}
    return ReadPlan(shared, own, unshared, mixed)


# -- who reads what --------------------------------------------------------------------------------------------------


class FramePiece(NamedTuple):
    """One frame of one slice: `extents` of the image that lie in one chunk."""

    slice_rank: int
    frame: int
    chunk: int
    extents: tuple[Extent, ...]
    nbytes: int


class Unit(NamedTuple):
    """Bytes that one rank reads at once, checks by one CRC, and sends to the others."""

    reader: int  # the rank that reads it
    number: int  # of a slice that the reader found, or `STORE`
    chunk: int  # that the extents lie in
    frame: int  # of the slice; -1 in the store
    extents: tuple[Extent, ...]  # the needed bytes; perhaps only parts of a chunk in the store
    pieces: tuple[int, ...]  # numbers of the pieces that are read


class FrameSource(NamedTuple):
    """A source of a frame: a slice that a rank has found, or the store (`number` is `STORE`, `rank` is -1)."""

    rank: int
    number: int


_STORE_SOURCE = FrameSource(-1, STORE)


def pieces_of(layout: Layout, within: Sequence[Extent] | None = None) -> dict[int, FramePiece]:
    """Number the frames of all slices, chunks ascending. `within`: Return only those that overlap these extents."""
    pieces: dict[int, FramePiece] = {}
    frames = Counter[int]()  # as `frames_of` numbers them
    count = 0
    for chunk in range(layout.chunks):
        for rank in layout.senders(chunk):
            extents = layout.pieces(chunk, rank)
            if within is None or any(
                max(extent.offset, needed.offset) < min(extent.end, needed.end)
                for extent in extents
                for needed in within
            ):
                nbytes = sum(extent.nbytes for extent in extents)
                pieces[count] = FramePiece(rank, frames[rank], chunk, extents, nbytes)
            frames[rank] += 1
            count += 1
    return pieces


def divide(
    candidate: Candidate,
    pieces: Mapping[int, FramePiece],
    ranks: int,
    *,
    chunk_bytes: int,
    failed: Collection[tuple[int, FrameSource]] = (),
    broken: Collection[FrameSource] = (),
) -> tuple[list[Unit], list[int]]:
    """Assign each piece a source and a reader. Return the units, chunks ascending, and pieces without a source.

    `ranks`: Number of ranks now. `failed`: Pieces, with a source that failed to provide them. `broken`: Sources that
    are unreadable altogether.
    """
    units: list[Unit] = []
    lost: list[int] = []
    loads = [0] * ranks
    for chunk, numbers in itertools.groupby(pieces, key=lambda number: pieces[number].chunk):
        chosen: dict[int, FrameSource] = {}
        for number in numbers:
            source = _nearest_source(candidate, number, pieces[number], loads, failed, broken)
            if source is None:
                lost.append(number)
            else:
                chosen[number] = source
        if _STORE_SOURCE in chosen.values():
            # A chunk of the store is read whole for its CRC anyway.
            from_store = [number for number in chosen if (number, _STORE_SOURCE) not in failed]
            extents = sorted(extent for number in from_store for extent in pieces[number].extents)
            reader = loads.index(min(loads))
            loads[reader] += chunk_bytes
            units.append(Unit(reader, STORE, chunk, -1, tuple(extents), tuple(from_store)))
            chosen = {number: source for number, source in chosen.items() if number not in from_store}
        for number, source in chosen.items():
            piece = pieces[number]
            loads[source.rank] += piece.nbytes
            units.append(Unit(source.rank, source.number, chunk, piece.frame, piece.extents, (number,)))
    return units, lost


def _nearest_source(
    candidate: Candidate,
    number: int,
    piece: FramePiece,
    loads: Sequence[int],
    failed: Collection[tuple[int, FrameSource]],
    broken: Collection[FrameSource],
) -> FrameSource | None:
    options = [
        (holder.nearness, loads[holder.rank], FrameSource(holder.rank, holder.number))
        for holder in candidate.slices.get(piece.slice_rank, ())
        if piece.chunk not in holder.absent
    ]
    if candidate.stored != STORE:
        options.append((NEARNESS_OF_STORE, -1, _STORE_SOURCE))
    left = [option for option in options if option[2] not in broken and (number, option[2]) not in failed]
    return min(left)[2] if left else None


def store_units(image: Manifest, ranks: int, without: Collection[int] = ()) -> list[Unit]:
    """Return the units of a portable file: each rank reads 1/R of it, in consecutive whole chunks.

    `without`: Entries that are not shared; chunks with only such bytes and the headers between are left out.
    """
    everything = range(-(-image.image_bytes // image.chunk_bytes))
    chosen = _chunks_without(image, without) if without else everything
    chunks = len(chosen)
    return [
        Unit(rank, STORE, chunk, -1, (chunk_extent(image, chunk),), ())
        for rank in range(ranks)
        for chunk in chosen[rank * chunks // ranks : (rank + 1) * chunks // ranks]
    ]


def _chunks_without(image: Manifest, without: Collection[int]) -> list[int]:
    head_bytes, tail_offset = ends_of(image)
    spans = [(0, head_bytes), (tail_offset, image.image_bytes)]
    spans += [
        (entry.offset, entry.offset + entry.nbytes)
        for index, entry in enumerate(image.entries)
        if index not in without and entry.nbytes
    ]
    nbytes = image.chunk_bytes
    chunks = (range(begin // nbytes, (end - 1) // nbytes + 1) for begin, end in spans if begin < end)
    return sorted({*itertools.chain.from_iterable(chunks)})


_TIER_REQUEST_BYTES = 4 << 20  # a multiple of the page size; small enough to stay in the processor's cache


class UnitLocation(NamedTuple):
    """A unit's place in its source: `extents` of the image, back to back from `offset` on, under one CRC-32."""

    extents: tuple[Extent, ...]
    offset: int
    crc32: int
    what: str


class StoredFile:
    """A portable file. No source follows it, so only the limit of the whole restore ends a request. Any thread."""

    seconds_share = math.inf  # fraction of the restore's limit after which a request counts as hanging
    in_memory = False  # whether a read is a memory copy, which more cores speed up

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self.tier = store.url  # for reports
        self.what = f"{store.url}/{manifest.file}"  # for messages
        self.request_bytes = store.request_bytes  # size of one request

    def locate(self, unit: Unit) -> UnitLocation:
        """Return the place of the whole chunk, as the CRC covers all of it."""
        extent = chunk_extent(self._manifest, unit.chunk)
        what = f"chunk {unit.chunk} ({extent.nbytes} bytes from {extent.offset})"
        return UnitLocation((extent,), extent.offset, self._manifest.chunk_crc32s[unit.chunk], what)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset` on. DamageError: the file ends before; StoreError: the store failed."""
        self._store.read_into(self._manifest.file, offset, view)

    def close(self) -> None:
        """Do nothing: the store opens its file for each request."""


class KeptSlice:
    """A slice in a tier. Any thread; attributes as those of a `StoredFile`."""

    request_bytes = _TIER_REQUEST_BYTES

    def __init__(self, tier: SliceKeeper, kept: SealedSlice) -> None:
        self._tier, self._kept = tier, kept
        self._frames = frames_of(kept.layout, kept.seal.rank)
        seal = kept.seal
        self.tier, self.in_memory = tier.name, tier.nearness is Nearness.MEMORY
        self._fill: Callable[[int, memoryview], None] | None = None
        self.seconds_share = HANGING_SHARE
        whose = f"rank {seal.rank}'s slice of step {seal.step} (attempt {seal.attempt})"
        self.what = f"{tier.name}: {whose} in {kept.place} slot {kept.slot}"

    def locate(self, unit: Unit) -> UnitLocation:
        frame = self._frames[unit.frame]
        what = f"frame {unit.frame} ({frame.nbytes} bytes from {frame.offset})"
        return UnitLocation(frame.extents, frame.offset, self._kept.seal.frame_crc32s[unit.frame], what)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset` on. DamageError: as the tier raises it; all its other errors become StoreError."""
        try:
            fill = self._fill
            if fill is None:
                # Several threads may open the slice at once; a file that is not kept closes after its read.
                fill = self._fill = self._tier.open_reader(self._kept)
            fill(offset, view)
        except (DamageError, StoreError):
            raise
        except (HoldfastError, OSError, ValueError) as error:
            raise StoreError(f"{self.what}: {error}") from error

    def close(self) -> None:
        """Close the file, so that its removal frees its memory. A later read opens it again."""
        self._fill = None


Origin = StoredFile | KeptSlice
"""A source of units."""

_REQUESTS = 4  # in flight to a disk or a store
_CORES_MAX = 16


def reader_count(origins: Iterable[Origin]) -> int:
    """Return the number of requests that a rank keeps in flight to these origins."""
    return cores_to_use() if all(origin.in_memory for origin in origins) else _REQUESTS


def cores_to_use() -> int:
    """Return how many threads of a rank copy and sum at once; the other cores serve threads that these wait for."""
    return max(_REQUESTS, min(cores_of_rank() * 3 // 4, _CORES_MAX))
