"""Checks the bytes that came from other ranks, because the exchange may flip a bit, too.

    of a portable file    each entry's CRC-32 is in its manifest: compare it with those of its parts, combined
    of slices            nobody knew them before: who read a part tells the others its CRC-32 (`tell`)

Of what a rank has read itself it has the sums; of what it has received it computes them here, in several threads.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from holdfast.crc import combine_all
from holdfast.errors import DamageError, ProtocolError
from holdfast.image.manifest import Manifest
from trainer_side.ranks.deadlines import start
from trainer_side.ranks.peers import Peers, gather
from trainer_side.restore.choice import Unit
from trainer_side.restore.image_map import Mapped
from trainer_side.restore.targets import EntryTaker, EntryTarget, Sum
from trainer_side.restore.windows import ChunkWindows, EntryPart


def check_received(
    manifest: Manifest,
    units: Sequence[Unit],
    targets: Mapping[int, EntryTaker],
    sums: Mapping[int, Sum],
    peers: Peers,
    *,
    threads: int,
) -> DamageError | None:
    """Compare the CRC of each entry of which other ranks have sent something with the manifest's.

    For when every rank has read its units without an error: else the fault lies there.

    Args:
        manifest: The file's manifest.
        units: As given to `read`, chunks ascending.
        targets: As given to `read`.
        sums: `Reading.sums` and `Reading.received`: of these parts no byte is looked at again.
        peers: The ranks.
        threads: How many compute at once.
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

    order = sorted(received, key=lambda index: manifest.entries[index].offset)
    for index, result in zip(order, start(check, order, threads, "check"), strict=True):
        if not result.result():
            entry = manifest.entries[index]
            return DamageError(
                f"{manifest.file}: entry {entry.name} ({entry.nbytes} bytes at {entry.offset}): its CRC-32 is not "
                f"{entry.crc32:08x} after the exchange among the ranks, although every chunk was read whole"
            )
    return None


def tell(
    image: Mapped,
    units: Sequence[Unit],
    entries: Mapping[int, EntryTaker],
    sums: Mapping[int, Sum],
    peers: Peers,
) -> dict[int, tuple[EntryPart, Sum]]:
    """The sums of all parts, as the rank that read each one has found them. Collective.

    Args:
        image: Where everything lies.
        units: All that were read whole, the same on every rank.
        entries: As given to `read`.
        sums: `Reading.sums`: those of this rank.
        peers: The ranks.

    Raises:
        ProtocolError: A rank does not tell as many as it has read.
    """
    windows = ChunkWindows(image, entries)
    of_rank: list[list[EntryPart]] = [[] for _ in range(peers.ranks)]
    for unit in units:
        of_rank[unit.reader] += windows.parts(unit.extents)
    own = [sums[part.offset].crc32 for part in of_rank[peers.rank]]
    told: dict[int, tuple[EntryPart, Sum]] = {}
    for rank, said in enumerate(gather(peers, struct.pack(f"<{len(own)}I", *own))):
        if len(said) != 4 * len(of_rank[rank]):
            raise ProtocolError(
                f"rank {rank} sent {len(said)} bytes of CRCs, expected {4 * len(of_rank[rank])}; the ranks run "
                "different versions: install the same holdfast on all machines"
            )
        crcs = struct.unpack(f"<{len(of_rank[rank])}I", said)
        told.update(
            (part.offset, (part, Sum(crc, part.nbytes)))
            for part, crc in zip(of_rank[rank], crcs, strict=True)
        )
    return told


def check_told(
    image: Mapped,
    told: Mapping[int, tuple[EntryPart, Sum]],
    targets: Mapping[int, EntryTaker],
    sums: Mapping[int, Sum],
    *,
    received: Mapping[int, Sum],
    threads: int,
) -> DamageError | None:
    """Compare each part that another rank has read with what that rank has told of it.

    Args:
        image: Where everything lies.
        told: What `tell` gave.
        targets: As given to `read`.
        sums: `Reading.sums`: these parts were read here.
        received: `Reading.received`: these were passed on, and have their sum already.
        threads: How many compute at once.
    """
    from_others = [(part, said) for offset, (part, said) in sorted(told.items()) if offset not in sums]

    def check(item: tuple[EntryPart, Sum]) -> bool:
        part, said = item
        target = targets[part.entry]
        return (_sum(target, part) if isinstance(target, EntryTarget) else received.get(part.offset)) == said

    for (part, said), result in zip(from_others, start(check, from_others, threads, "check"), strict=True):
        if not result.result():
            return DamageError(
                f"{image.entries[part.entry].name} ({part.nbytes} bytes at {part.offset}): its CRC-32 is not "
                f"{said.crc32:08x} after the exchange among the ranks, although it was read whole"
            )
    return None


def check_entries(
    manifest: Manifest, image: Mapped, told: Mapping[int, tuple[EntryPart, Sum]], tier: str
) -> DamageError | None:
    """See that what the tiers gave is what the store has of the same checkpoint: no byte is read for it.

    Args:
        manifest: The store's.
        image: The layout of the slices.
        told: What `tell` gave.
        tier: Where the bytes come from, for the message.
    """
    expected = {entry.name: entry.crc32 for entry in manifest.entries}
    of_entries: dict[int, list[Sum]] = {}
    for _, (part, said) in sorted(told.items()):
        of_entries.setdefault(part.entry, []).append(said)
    for index, sums in of_entries.items():
        name, found = image.entries[index].name, combine_all(sums)
        if found != expected.get(name):
            return DamageError(
                f"{tier}: entry {name}: CRC-32 {found:08x}, {manifest.file} in the store has "
                f"{expected.get(name, 0):08x}: these slices are of another checkpoint with the same numbers"
            )
    return None


def _sum(target: EntryTaker, part: EntryPart) -> Sum:
    assert isinstance(target, EntryTarget), "what went through a window was summed there"
    return Sum.of(target.memory[part.inside : part.inside + part.nbytes])
