"""Reads an image from slices; bytes that one source cannot provide are read from the next.

    pieces ─► divide ─► read, each rank its units ─► all whole? ─► CRCs exchanged and compared
                 ▲                                      │ a frame is damaged, a tier gone
                 └── without those sources ◄── named ◄──┘

Head and tail of the image, from which the tree is made, are read in the same way: every rank compares CRCs before it
parses, also those of bytes from other ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.errors import DamageError
from holdfast.image.entries import Extent
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from trainer_side.ranks.peers import LonePeers, Peers, gather, raise_agreed
from trainer_side.restore.choice import NEARNESS_OF_RING, STORE, Candidate, Holder
from trainer_side.restore.device_sections import DeviceSections
from trainer_side.restore.exchange import check_entries, check_sums, exchange_sums
from trainer_side.restore.read_plan import FramePiece, FrameSource, Origin, Unit, divide, pieces_of
from trainer_side.restore.reading import Failure, Reading, ReadOptions, read
from trainer_side.restore.structure import ImageEnds, ImageMap, ends_of
from trainer_side.restore.targets import ChunkWindows, EntryPart, EntrySink, EntryTarget, Sum


@dataclass
class SliceReader:
    """Reads one candidate from slices, and from the store where slices are missing. Training thread; collective."""

    candidate: Candidate
    layout: Layout
    origins: Mapping[int, Origin]  # the sources that this rank reads from, by number
    manifest: Manifest | None  # the store's; None if it does not have this checkpoint
    peers: Peers
    read_options: ReadOptions
    # Tiers that get no more requests, by rank and name, with the reason; the same on every rank. Extended here.
    hanging: dict[tuple[int, str], str] = field(default_factory=dict)
    # Every rank reads the ring itself: all ranks see its shared memory.
    ring_is_near: bool = False
    # Slices of all ranks that were damaged or missing and were read from elsewhere, each with tier, place and rank.
    mended: list[str] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)  # of the last `read` on this rank, all rounds together
    _failed: set[tuple[int, FrameSource]] = field(default_factory=set)
    _broken: set[FrameSource] = field(default_factory=set)
    _reported: set[int | str] = field(default_factory=set)

    @property
    def complete_tiers(self) -> frozenset[str]:
        """Tiers that have every saved rank's slice, with no damage found. The same on every rank.

        The stager's ring does not count: its chunks are soon overwritten, so no damaged slice may be dropped for it.
        """
        damaged = self._unusable | {source for _, source in self._failed}
        found: dict[str, set[int]] = {}
        for holder in self._holders:
            if holder.nearness != NEARNESS_OF_RING:
                found.setdefault(holder.tier, set()).add(holder.slice_rank)
        for holder in self._holders:
            if FrameSource(holder.rank, holder.number) in damaged:
                found.pop(holder.tier, None)
        return frozenset(tier for tier, slices in found.items() if len(slices) == self.layout.ranks)

    @property
    def _unusable(self) -> set[FrameSource]:
        return self._broken | {
            FrameSource(one.rank, one.number) for one in self._holders if (one.rank, one.tier) in self.hanging
        }

    @property
    def _holders(self) -> Iterator[Holder]:
        return itertools.chain.from_iterable(self.candidate.slices.values())

    def read_ends(self) -> bytes:
        """Read and check head and tail of the image, back to back. Raises as `read`; DamageError also: too large."""
        head_bytes, tail_offset = ends_of(self.layout)
        ends = ImageEnds(self.layout.image_bytes, self.layout.chunk_bytes, head_bytes, tail_offset)
        data = torch.empty(ends.nbytes, dtype=torch.uint8, device="cpu")
        memory, address = data.numpy().data, data.data_ptr()
        targets: dict[int, EntrySink] = {
            0: EntryTarget(address, memory[:head_bytes]),
            1: EntryTarget(address + head_bytes, memory[head_bytes:]),
        }
        within = [Extent(entry.offset, entry.nbytes) for entry in ends.entries]
        self._read(ends, pieces_of(self.layout, within), targets)
        return bytes(memory)

    def read(self, targets: Mapping[int, EntrySink], device_sections: DeviceSections | None) -> None:
        """Fill every target on every rank.

        DamageError, on every rank: this candidate cannot be used, and the targets are undefined. StoreError: the store
        failed, and no other source has the bytes. PeerLost: a rank is gone.
        """
        reported_sums = self._read(self.layout, pieces_of(self.layout), targets, device_sections)
        if self.manifest is not None:
            tiers = sorted({holder.tier for holder in self._holders})
            error = check_entries(self.manifest, self.layout, reported_sums, ", ".join(tiers))
            raise_agreed(self.peers, error)

    def _read(
        self,
        image: ImageMap,
        pieces: dict[int, FramePiece],
        targets: Mapping[int, EntrySink],
        device_sections: DeviceSections | None = None,
    ) -> dict[int, tuple[EntryPart, Sum]]:
        self.reading = Reading()
        done: list[Unit] = []
        done_locally: list[Unit] = []
        left = dict(pieces)
        windows = ChunkWindows(image, targets)
        while left:
            units, lost = divide(
                self.candidate,
                left,
                self.peers.ranks,
                chunk_bytes=self.layout.chunk_bytes,
                failed=self._failed,
                broken=self._unusable,
            )
            if lost:
                raise self._unreadable_error(left[lost[0]])
            near, shared = self._split_near(units, left)
            failures: list[Failure] = []
            for some, peers in ((list(near.values()), LonePeers()), (shared, self.peers)):
                if some:
                    read_options = self.read_options._replace(device_sections=device_sections)
                    reading = read(image, some, self.origins, targets, peers, read_options)
                    self.reading.add(reading)
                    raise_agreed(self.peers, reading.error)
                    failures += reading.failures
            failed_units = self._exchange_failures(units, near, left, failures)
            numbers = {unit: number for number, unit in enumerate(units)}
            done += [unit for unit in shared if numbers[unit] not in failed_units]
            done_locally += [unit for unit in near if numbers[unit] not in failed_units]
            # Parts that some rank is missing are read again, possibly by another rank.
            for part in windows.parts(
                [extent for number in failed_units for extent in units[number].extents]
            ):
                self.reading.sums.pop(part.offset, None)
            retried = {piece for number in failed_units for piece in units[number].pieces}
            left = {number: piece for number, piece in left.items() if number in retried}
        reported_sums = exchange_sums(image, done, targets, self.reading.sums, self.peers)
        for part in windows.parts([extent for unit in done_locally for extent in unit.extents]):
            reported_sums[part.offset] = part, self.reading.sums[part.offset]
        sums, threads = self.reading.sums, self.read_options.threads
        error = check_sums(image, reported_sums, targets, sums, self.reading.received, threads=threads)
        raise_agreed(self.peers, error)
        return reported_sums

    def _split_near(
        self, units: Sequence[Unit], pieces: Mapping[int, FramePiece]
    ) -> tuple[dict[Unit, Unit], list[Unit]]:
        """Return the units that every rank reads itself, each mapped to this rank's version; and all others."""
        near: dict[Unit, Unit] = {}
        if self.ring_is_near:
            for unit in units:
                holders = self._ring_holders(pieces[unit.pieces[0]].slice_rank)
                if (unit.reader, unit.number) in {(one.rank, one.number) for one in holders}:
                    mine = next(one.number for one in holders if one.rank == self.peers.rank)
                    near[unit] = unit._replace(reader=LonePeers.rank, number=mine)
        return near, [unit for unit in units if unit not in near]

    def _ring_holders(self, slice_rank: int) -> list[Holder]:
        holders = self.candidate.slices.get(slice_rank, ())
        return [one for one in holders if one.nearness == NEARNESS_OF_RING]

    def _exchange_failures(
        self,
        units: Sequence[Unit],
        near: Mapping[Unit, Unit],
        pieces: Mapping[int, FramePiece],
        mine: Sequence[Failure],
    ) -> set[int]:
        """Exchange the failures of all ranks; return the numbers of the failed units.

        `near`: Units that every rank reads; after a failure on one rank, no rank reads the unit from the ring again.
        """
        if self.peers.all_agree(not mine):
            return set()
        numbers = {near.get(unit, unit): number for number, unit in enumerate(units)}
        rows = [
            (numbers[one.unit], one.broken, self.origins[one.unit.number].tier if one.hangs else "")
            for one in mine
        ]
        messages = gather(self.peers, json.dumps([rows, self._describe_failures(mine)]).encode())
        failed: set[int] = set()
        for rank, answer in enumerate(messages):
            rows_there, texts = json.loads(answer)
            self.mended += texts
            for number, broken, hanging in rows_there:
                if hanging:
                    self.hanging.setdefault((rank, hanging), f"rank {rank}: {hanging} hangs")
                failed.add(number)
                unit = units[number]
                sources = [FrameSource(unit.reader, unit.number)]
                if unit in near:
                    ring = self._ring_holders(pieces[unit.pieces[0]].slice_rank)
                    sources = [FrameSource(one.rank, one.number) for one in ring]
                self._failed.update((piece, source) for piece in unit.pieces for source in sources)
                if broken:
                    self._broken.update(sources)
        return failed

    def _describe_failures(self, failures: Sequence[Failure]) -> list[str]:
        """Return one text per slice or hanging tier: its first failed frame, and the number of others."""
        grouped: dict[int | str, list[Failure]] = {}
        for failure in failures:
            number = failure.unit.number
            grouped.setdefault(self.origins[number].tier if failure.hangs else number, []).append(failure)
        texts = []
        for what, some in grouped.items():
            if what in self._reported:
                continue
            self._reported.add(what)
            more = f"; and {len(some) - 1} more of its frames" if len(some) > 1 else ""
            place, text = self.origins[some[0].unit.number].what, str(some[0].error)
            texts.append(f"rank {self.peers.rank}: {text if place in text else f'{place}: {text}'}{more}")
        return texts

    def _unreadable_error(self, piece: FramePiece) -> DamageError:
        reasons = "; ".join(self.mended[-3:] or self.hanging.values())
        store = "the store does not have this step" if self.candidate.stored == STORE else "nor has the store"
        return DamageError(
            f"frame {piece.frame} of rank {piece.slice_rank}'s slice cannot be read from any tier of any rank, and "
            f"{store}: {reasons}"
        )
