"""The exchange of bytes among the ranks, and its checks, since a transfer may flip a bit.

    of a portable file    each entry's CRC-32 is in its manifest: compare it with those of its parts, combined
    of slices            the rank that read a part tells the others its CRC-32 (`exchange_sums`)

A rank has the sums of the bytes that it read; those of received bytes are computed here, in several threads.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from holdfast.crc import combine_all
from holdfast.errors import DamageError, HoldfastError, ProtocolError
from holdfast.image.manifest import Manifest
from trainer_side.ranks.deadlines import run_in_threads
from trainer_side.ranks.peers import Peers, gather
from trainer_side.restore.read_plan import Unit, cores_to_use
from trainer_side.restore.structure import ImageMap
from trainer_side.restore.targets import ChunkWindows, EntryPart, EntrySink, EntryTarget, Sum

_T = TypeVar("_T")
_WAIT_SECONDS = 0.1


class Exchange(ABC):
    """Sends the units that this rank reads to other ranks, and receives theirs, while further units are read.

    A reader that is ahead waits in `wait_for_room` until there is memory for its next unit; a few units may be read and
    not yet sent. `share`, `is_full` and `process_received` belong to the training thread; each rank calls them in the
    same order.
    """

    def __init__(self, ahead_max: int) -> None:
        self._ahead_max = ahead_max
        self._sent_count = 0  # own units that were sent
        self._changed = threading.Condition()
        self.received: dict[int, Sum] = {}  # of parts from other ranks, by offset in the image
        self.error: HoldfastError | None = None  # received bytes differ from those that were sent

    def wait_for_room(self, unit: Unit, stopped: threading.Event) -> None:
        """Wait until there is memory for a unit that this rank reads. Any thread."""
        turn = self._send_index(unit)
        if turn is None:
            return
        with self._changed:
            while turn - self._sent_count >= self._ahead_max and not stopped.is_set():
                self._changed.wait(_WAIT_SECONDS)

    def _count_sent(self, units: int) -> None:
        """Count own units that have arrived everywhere, so that `wait_for_room` hands out their memory again."""
        with self._changed:
            self._sent_count += units
            self._changed.notify_all()

    @abstractmethod
    def _send_index(self, unit: Unit) -> int | None:
        """Return the unit's index among this rank's units that others need; None if it is not one of them."""

    @abstractmethod
    def pack(self, unit: Unit, part: EntryPart, address: int, view: memoryview) -> None:
        """Keep bytes of a unit until they are sent. Any thread."""

    @abstractmethod
    def share(self, unit: Unit, peers: Peers) -> None:
        """Start to send a unit, or to receive it."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether nothing more may be shared before `Peers.finish` and `process_received`."""

    @abstractmethod
    def process_received(self) -> None:
        """Process the received bytes, after `Peers.finish`."""


def check_received(
    manifest: Manifest,
    units: Sequence[Unit],
    targets: Mapping[int, EntrySink],
    sums: Mapping[int, Sum],
    peers: Peers,
    *,
    threads: int | None,
) -> DamageError | None:
    """For each entry that has bytes from other ranks, compare its CRC with the manifest's.

    Every rank must have read its units without an error. `sums`: `Reading.sums` and `Reading.received`. `threads`: As
    in `ReadOptions`.
    """
    windows = ChunkWindows(manifest, targets)
    parts: dict[int, list[EntryPart]] = {}
    received: set[int] = set()
    for unit in units:
        for part in windows.parts(unit.extents):
            parts.setdefault(part.entry, []).append(part)
            if unit.reader != peers.rank:
                received.add(part.entry)

    def check(index: int) -> bool:
        found = [sums.get(part.offset) or _sum(targets[part.entry], part) for part in parts[index]]
        return combine_all(found) == manifest.entries[index].crc32

    index = _first_wrong(sorted(received, key=lambda index: manifest.entries[index].offset), check, threads)
    if index is None:
        return None
    entry = manifest.entries[index]
    return DamageError(
        f"{manifest.file}: entry {entry.name} ({entry.nbytes} bytes at {entry.offset}): its CRC-32 is not "
        f"{entry.crc32:08x} after the exchange among the ranks, although every chunk was read whole"
    )


def exchange_sums(
    image: ImageMap,
    units: Sequence[Unit],
    entries: Mapping[int, EntrySink],
    sums: Mapping[int, Sum],
    peers: Peers,
) -> dict[int, tuple[EntryPart, Sum]]:
    """Return the sums of all parts, each from the rank that read it. Collective.

    `units`: All units that were read whole, the same on every rank. `sums`: `Reading.sums` of this rank. ProtocolError:
    a rank does not send as many sums as it has read parts.
    """
    windows = ChunkWindows(image, entries)
    of_rank: list[list[EntryPart]] = [[] for _ in range(peers.ranks)]
    for unit in units:
        of_rank[unit.reader] += windows.parts(unit.extents)
    own = [sums[part.offset].crc32 for part in of_rank[peers.rank]]
    reported_sums: dict[int, tuple[EntryPart, Sum]] = {}
    for rank, data in enumerate(gather(peers, struct.pack(f"<{len(own)}I", *own))):
        if len(data) != 4 * len(of_rank[rank]):
            raise ProtocolError(
                f"rank {rank} sent {len(data)} bytes of CRCs, expected {4 * len(of_rank[rank])}; the ranks run "
                "different versions: install the same holdfast on all machines"
            )
        crcs = struct.unpack(f"<{len(of_rank[rank])}I", data)
        reported_sums.update(
            (part.offset, (part, Sum(crc, part.nbytes)))
            for part, crc in zip(of_rank[rank], crcs, strict=True)
        )
    return reported_sums


def check_sums(
    image: ImageMap,
    reported_sums: Mapping[int, tuple[EntryPart, Sum]],
    targets: Mapping[int, EntrySink],
    sums: Mapping[int, Sum],
    received: Mapping[int, Sum],
    *,
    threads: int | None,
) -> DamageError | None:
    """Compare each part that another rank read with the sum from that rank.

    `sums`, `received`: Of `Reading`. `threads`: As in `ReadOptions`.
    """
    from_others = [both for offset, both in sorted(reported_sums.items()) if offset not in sums]

    def check(item: tuple[EntryPart, Sum]) -> bool:
        part, reported = item
        target = targets[part.entry]
        found = _sum(target, part) if isinstance(target, EntryTarget) else received.get(part.offset)
        return found == reported

    wrong = _first_wrong(from_others, check, threads)
    if wrong is None:
        return None
    part, reported = wrong
    return DamageError(
        f"{image.entries[part.entry].name} ({part.nbytes} bytes at {part.offset}): its CRC-32 is not "
        f"{reported.crc32:08x} after the exchange among the ranks, although it was read whole"
    )


def _first_wrong(items: Sequence[_T], check: Callable[[_T], bool], threads: int | None) -> _T | None:
    results = run_in_threads(check, items, threads or cores_to_use(), "check")
    return next((one for one, result in zip(items, results, strict=True) if not result.result()), None)


def check_entries(
    manifest: Manifest, image: ImageMap, reported_sums: Mapping[int, tuple[EntryPart, Sum]], tier: str
) -> DamageError | None:
    """Check the bytes from the tiers against the store's manifest of the same checkpoint, without reading any byte.

    `image`: The layout of the slices. `tier`: Where the bytes come from, for the message.
    """
    expected = {entry.name: entry.crc32 for entry in manifest.entries}
    of_entries: dict[int, list[Sum]] = {}
    for _, (part, reported) in sorted(reported_sums.items()):
        of_entries.setdefault(part.entry, []).append(reported)
    for index, sums in of_entries.items():
        name, found = image.entries[index].name, combine_all(sums)
        if found != expected.get(name):
            return DamageError(
                f"{tier}: entry {name}: CRC-32 {found:08x}, {manifest.file} in the store has "
                f"{expected.get(name, 0):08x}: these slices are of another checkpoint with the same numbers"
            )
    return None


def _sum(target: EntrySink, part: EntryPart) -> Sum:
    assert isinstance(target, EntryTarget), "what went through a window was summed there"
    return Sum.of(target.memory[part.entry_offset : part.entry_offset + part.nbytes])
