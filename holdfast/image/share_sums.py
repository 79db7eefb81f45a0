"""The CRC-32s of one share, and their combination into the CRC-32s of the image.

    share 0  │ entry 0 │ entry 1 … ┐        entry_crcs: CRC of each entry's bytes in the share, in the order of entries
    share 1                … entry 1 │ entry 2 │        chunk_crcs: CRC of each chunk as it stands in the file

An entry that a border cuts has a CRC in each share that holds its bytes; combined in order, these are the entry's CRC.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.crc import combine_all
from holdfast.errors import ProtocolError
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.shares import Shares


class EntryPiece(NamedTuple):
    """The bytes of one entry that lie in one share."""

    entry: int
    offset: int
    nbytes: int


class ShareSums(NamedTuple):
    """The CRC-32s of one share, of its chunks and of its `entry_pieces`."""

    chunk_crcs: tuple[int, ...]
    entry_crcs: tuple[int, ...]


class ImageSums(NamedTuple):
    """The CRC-32s of a whole image."""

    image_crc32: int
    chunk_crc32s: tuple[int, ...]
    entry_crc32s: tuple[int, ...]


def entry_pieces(layout: Layout, chunks: range) -> list[EntryPiece]:
    """Return the bytes of entries in a run of chunks, in order."""
    if not chunks:
        return []
    first, last = layout.chunk_extent(chunks[0]).offset, layout.chunk_extent(chunks[-1]).end
    found: list[EntryPiece] = []
    for number in range(bisect_left(layout.entries, first, key=lambda entry: entry.end), len(layout.entries)):
        entry = layout.entries[number]
        if entry.offset >= last:
            break
        begin, end = max(entry.offset, first), min(entry.end, last)
        if begin < end:
            found.append(EntryPiece(number, begin, end - begin))
    return found


def entry_crcs_of(
    index: LayoutIndex, chunks: range, segment_crcs: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    """Combine the CRCs of each chunk's segments into those of `entry_pieces`."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for chunk in chunks:
        for segment, crc in zip(index.layout.segments(chunk), segment_crcs[chunk], strict=True):
            if segment.entry is not None and segment.nbytes:
                runs.setdefault(segment.entry, []).append((crc, segment.nbytes))
    return tuple(combine_all(run) for _, run in sorted(runs.items()))


def part_crcs(layout: Layout, shares: Shares, chunk_crcs: Sequence[int]) -> dict[int, int]:
    """Combine the CRCs of chunks into those of each part of the image."""
    found: dict[int, int] = {}
    for part in range(shares.parts):
        chunks = range(shares.chunks)[part * shares.part_chunks : (part + 1) * shares.part_chunks]
        found[part] = combine_all((chunk_crcs[chunk], layout.chunk_extent(chunk).nbytes) for chunk in chunks)
    return found


def combine_sums(layout: Layout, shares: Shares, sums: Sequence[ShareSums]) -> ImageSums:
    """Combine the CRCs of all shares into the image's. ProtocolError: a wrong number of shares or CRCs."""
    if len(sums) != shares.count:
        raise ProtocolError(f"CRCs of {len(sums)} shares, expected {shares.count}")
    chunk_crcs: list[int] = []
    runs: list[list[tuple[int, int]]] = [[] for _ in layout.entries]
    for share, own in enumerate(sums):
        chunks = shares.chunks_of(share)
        pieces = entry_pieces(layout, chunks)
        if (len(own.chunk_crcs), len(own.entry_crcs)) != (len(chunks), len(pieces)):
            raise ProtocolError(
                f"share {share + 1} of {shares.count} has CRCs of {len(own.chunk_crcs)} chunks and "
                f"{len(own.entry_crcs)} entries, expected {len(chunks)} and {len(pieces)}"
            )
        chunk_crcs += own.chunk_crcs
        for piece, crc in zip(pieces, own.entry_crcs, strict=True):
            runs[piece.entry].append((crc, piece.nbytes))
    sizes = (layout.chunk_extent(chunk).nbytes for chunk in range(layout.chunks))
    return ImageSums(
        combine_all(zip(chunk_crcs, sizes, strict=True)),
        tuple(chunk_crcs),
        tuple(combine_all(run) for run in runs),
    )
