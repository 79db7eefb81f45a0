"""Chunks that several ranks need: one rank reads each and sends the others only their bytes.

    reader   a chunk ─► its own parts                              each rank says which chunks it needs (a bit each)
                    └─► packed: a parcel for each other rank ──┐   and the regions of which it needs bytes
    others                       straight into their memory ◄──┘   the reader is one of the ranks that need the chunk

A rank holds the bytes of a region in the order of the whole tensor. A parcel therefore has one run for each region, and
is received straight into its place, or for a device into a page-locked window. It ends with its CRC-32.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.crc import combine_all
from holdfast.errors import DamageError
from holdfast.image.regions import Comb, Region
from trainer_side.ranks.peers import Peers, gather
from trainer_side.restore.choice import STORE
from trainer_side.restore.device_sections import WIDEST_BYTES, DeviceSections, SectionPart, SectionWindow, pad
from trainer_side.restore.exchange import Exchange
from trainer_side.restore.read_plan import Unit
from trainer_side.restore.structure import ImageMap, chunk_extent
from trainer_side.restore.targets import EntryPart, RegionTarget, ScatterTarget, Sum, copy_runs

_PACKED_MAX = 2  # own chunks whose parcels are in flight at once
_AHEAD = _PACKED_MAX + 2  # own chunks that are read and packed but not yet sent
_INCOMING_MAX = 16  # receives in flight; those into host memory need no memory of their own
_INCOMING_BYTES_MAX = 64 << 20  # of receives in flight for a device
_CRC_BYTES = 4
_NO_BYTES = np.empty(0, np.uint8)


class NeededRegion(NamedTuple):
    """A region of which another rank needs bytes: its comb in the tensor that begins at `base` of the entry."""

    entry: int
    base: int
    comb: Comb


class _Parcel(NamedTuple):
    """A message in the reader's memory. `regions`: Each region, where it begins, and its first byte in the message."""

    ranks: tuple[int, ...]
    regions: list[tuple[NeededRegion, int, int]]
    sizes: list[int]
    memory: np.ndarray


class Scatter(Exchange):
    """Sends each rank its regions of the chunks that this rank reads, as parcels. The constructor is collective.

    `targets`: The regions that this rank holds, by entry; the same entries on every rank. `device_sections`: Transfers
    to the device of some regions; None if this rank has none there. `units`: The chunks that any rank needs, each with
    its reader: the same on every rank.
    """

    def __init__(
        self,
        image: ImageMap,
        targets: Mapping[int, ScatterTarget],
        peers: Peers,
        device_sections: DeviceSections | None,
    ) -> None:
        super().__init__(_AHEAD)
        self._image, self._peers, self._device_sections = image, peers, device_sections
        self._own_regions: dict[int, list[RegionTarget]] = {}
        for index in sorted(targets):
            for region in targets[index].regions:
                for chunk in region.chunks(image):
                    self._own_regions.setdefault(chunk, []).append(region)
        readers = _readers(-(-image.image_bytes // image.chunk_bytes), self._own_regions, peers)
        self.units = [
            Unit(int(readers[chunk]), STORE, chunk, -1, (chunk_extent(image, chunk),), ())
            for chunk in np.flatnonzero(readers >= 0).tolist()
        ]
        own = [unit.chunk for unit in self.units if unit.reader == peers.rank]
        self._needed_regions = self._exchange_needed_regions(targets, frozenset(own))
        self._send_indexes = {chunk: turn for turn, chunk in enumerate(sorted(self._needed_regions))}
        self._packed: dict[int, list[_Parcel]] = {}
        self._memory: dict[int, np.ndarray] = {}
        self._outgoing: list[int] = []
        self._incoming: list[tuple[int, list[np.ndarray], np.ndarray]] = []
        on_device = () if device_sections is None else self._own_regions
        self._largest = max(map(self._device_bytes, on_device), default=0)
        self._section: SectionWindow | None = None  # of receives in flight for a device
        self._section_end = 0
        self._parts: list[SectionPart] = []

    def _send_index(self, unit: Unit) -> int | None:
        return self._send_indexes.get(unit.chunk)

    def pack(self, unit: Unit, part: EntryPart, _address: int, view: memoryview) -> None:
        """Pack the bytes that other ranks need. Any thread."""
        source = np.frombuffer(view, np.uint8)
        for parcel in self._parcels(unit.chunk):
            for needed, place, first in parcel.regions:
                if needed.entry == part.entry:
                    begin = part.entry_offset - needed.base
                    copy_runs(needed.comb, begin, source, parcel.memory[place:], first)

    def share(self, unit: Unit, peers: Peers) -> None:
        if unit.reader == peers.rank:
            for parcel in self._parcels(unit.chunk):
                end = sum(parcel.sizes)
                crc = Sum.of(parcel.memory[:end].data).crc32
                parcel.memory[end : end + _CRC_BYTES] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
                pieces = _pieces(parcel.memory, [*parcel.sizes, _CRC_BYTES])
                for rank in parcel.ranks:
                    peers.send(pieces, rank)
            if unit.chunk in self._send_indexes:
                self._outgoing.append(unit.chunk)
        elif unit.chunk in self._own_regions:
            runs = [self._receive_memory(region, first, end) for region, first, end in self._runs(unit.chunk)]
            received_crc = np.empty(_CRC_BYTES, np.uint8)
            peers.receive([piece for run in (*runs, received_crc) for piece in _pieces(run)], unit.reader)
            self._incoming.append((unit.chunk, runs, received_crc))

    @property
    def is_full(self) -> bool:
        has_room = self._section is None or self._section_end + self._largest <= len(self._section.memory)
        return len(self._outgoing) >= _PACKED_MAX or len(self._incoming) >= _INCOMING_MAX or not has_room

    def process_received(self) -> None:
        """Check that the received bytes are those that were sent, after `Peers.finish`."""
        for chunk, runs, crc in self._incoming:
            found = combine_all(Sum.of(run.data) for run in runs)
            if found != int.from_bytes(crc.tobytes(), "little") and self.error is None:
                self.error = DamageError(
                    f"chunk {chunk}: its parts from another rank differ after the exchange among the ranks, although "
                    "the chunk was read whole"
                )
        self._incoming.clear()
        if self._section is not None and self._device_sections is not None:
            self._device_sections.send(self._section, self._parts)
            self._section, self._section_end, self._parts = None, 0, []
        with self._changed:
            for chunk in self._outgoing:
                self._packed.pop(chunk, None)
        self._count_sent(len(self._outgoing))
        self._outgoing.clear()

    def _runs(self, chunk: int) -> Iterator[tuple[RegionTarget, int, int]]:
        """Yield this rank's regions in a chunk, each with the range of its bytes there."""
        for region in self._own_regions[chunk]:
            first, end = self._range_in_chunk(region.entry, region.base, region.comb, chunk)
            yield region, first, end

    def _receive_memory(self, region: RegionTarget, first: int, end: int) -> np.ndarray:
        if region.device is None or self._device_sections is None:
            return region.memory[first:end]
        if self._section is None:
            self._section = self._device_sections.window(
                max(self._largest, min(_INCOMING_MAX * self._largest, _INCOMING_BYTES_MAX))
            )
        begin = pad(self._section_end) + first % WIDEST_BYTES
        self._section_end = begin + end - first
        self._parts.append(SectionPart(region.device, first, begin, end - first))
        return self._section.bytes[begin : self._section_end]

    def _device_bytes(self, chunk: int) -> int:
        """Return the most space in a window that the received bytes of one chunk take."""
        runs = [end - first for region, first, end in self._runs(chunk) if region.device is not None]
        return sum(pad(nbytes) + 2 * WIDEST_BYTES for nbytes in runs)

    def _range_in_chunk(self, entry: int, base: int, comb: Comb, chunk: int) -> tuple[int, int]:
        begin = chunk * self._image.chunk_bytes - self._image.entries[entry].offset - base
        return comb.bytes_before(begin), comb.bytes_before(begin + self._image.chunk_bytes)

    def _exchange_needed_regions(
        self, targets: Mapping[int, ScatterTarget], own: Collection[int]
    ) -> dict[int, list[tuple[tuple[int, ...], list[NeededRegion]]]]:
        """Return the regions that other ranks need of each chunk that this rank reads. Collective.

        The regions of one rank are filtered before the next rank sends its own, so only the regions in these chunks are
        kept in memory.
        """
        peers, image = self._peers, self._image
        mine = [
            (one.entry, one.base, one.shape, one.item_bytes, *one.region)
            for index in sorted(targets)
            for one in targets[index].regions
        ]
        own_rows = json.dumps(mine).encode()
        spans = {index: _chunks(image, index) for index in targets}
        near = {index for index, span in spans.items() if any(chunk in own for chunk in span)}
        known: dict[str, NeededRegion] = {}
        wanted: dict[int, dict[int, list[str]]] = {}
        for root in range(peers.ranks):
            message = peers.broadcast(own_rows if root == peers.rank else None, root)
            if root == peers.rank:
                continue
            for row in json.loads(message):
                if row[0] not in near:
                    continue
                name = json.dumps(row)
                if name not in known:
                    entry, base, shape, item_bytes, start, size = row
                    region = Region(tuple(start), tuple(size))
                    known[name] = NeededRegion(entry, base, Comb(shape, item_bytes, region))
                needed = known[name]
                for chunk in spans[needed.entry]:
                    if chunk not in own:
                        continue
                    first, end = self._range_in_chunk(needed.entry, needed.base, needed.comb, chunk)
                    if first < end:
                        wanted.setdefault(chunk, {}).setdefault(root, []).append(name)
        found: dict[int, list[tuple[tuple[int, ...], list[NeededRegion]]]] = {}
        for chunk, of_ranks in wanted.items():
            alike: dict[tuple[str, ...], list[int]] = {}
            for rank, names in of_ranks.items():
                alike.setdefault(tuple(names), []).append(rank)
            found[chunk] = [(tuple(ranks), [known[name] for name in names]) for names, ranks in alike.items()]
        return found

    def _parcels(self, chunk: int) -> list[_Parcel]:
        """Return the parcels of a chunk that this rank reads; their memory is reused once they are sent."""
        turn = self._send_indexes.get(chunk)
        if turn is None:
            return []
        with self._changed:
            if chunk not in self._packed:
                self._packed[chunk] = self._make_parcels(chunk, turn % _AHEAD)
            return self._packed[chunk]

    def _make_parcels(self, chunk: int, place: int) -> list[_Parcel]:
        parcels: list[_Parcel] = []
        for ranks, needed_regions in self._needed_regions[chunk]:
            placed: list[tuple[NeededRegion, int, int]] = []
            sizes: list[int] = []
            for needed in needed_regions:
                first, end = self._range_in_chunk(needed.entry, needed.base, needed.comb, chunk)
                placed.append((needed, sum(sizes), first))
                sizes.append(end - first)
            parcels.append(_Parcel(ranks, placed, sizes, _NO_BYTES))
        ends = [*itertools.accumulate(sum(parcel.sizes) + _CRC_BYTES for parcel in parcels)]
        if place not in self._memory or len(self._memory[place]) < ends[-1]:
            self._memory[place] = np.empty(ends[-1], np.uint8)
        pieces = np.split(self._memory[place][: ends[-1]], ends[:-1])
        return [parcel._replace(memory=piece) for parcel, piece in zip(parcels, pieces, strict=True)]


def _readers(chunks: int, needed: Collection[int], peers: Peers) -> np.ndarray:
    """Return the reader of each chunk: in turn one of the ranks that need it, -1 if none does. Collective."""
    mine = np.zeros(chunks, np.uint8)
    mine[list(needed)] = 1
    packed = gather(peers, np.packbits(mine).tobytes())
    needed_by_rank = [np.unpackbits(np.frombuffer(bits, np.uint8), count=chunks) for bits in packed]
    count = np.sum(needed_by_rank, axis=0, dtype=np.int32)
    chosen = np.arange(chunks, dtype=np.int32) % np.maximum(count, 1)
    readers, seen = np.full(chunks, -1, np.int32), np.zeros(chunks, np.int32)
    for rank, bits in enumerate(needed_by_rank):
        readers[(bits == 1) & (seen == chosen)] = rank
        seen += bits
    return readers


def _chunks(image: ImageMap, entry: int) -> range:
    first, nbytes = image.entries[entry].offset, max(image.entries[entry].nbytes, 1)
    return range(first // image.chunk_bytes, (first + nbytes - 1) // image.chunk_bytes + 1)


def _pieces(memory: np.ndarray, sizes: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return `(address, nbytes)` of pieces that lie back to back; by default of all bytes as one piece."""
    address = int(memory.__array_interface__["data"][0])
    found = []
    for nbytes in sizes or (len(memory),):
        found.append((address, nbytes))
        address += nbytes
    return found
