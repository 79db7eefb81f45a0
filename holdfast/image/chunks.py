"""Work on the bytes of one chunk: check every sender's frame, and put the true CRCs into the zip's fields.

Both are pure functions over the slot's memory, and release the GIL while they compute. Both may be repeated: a chunk
that a flusher patched before it died can be verified again, because the fields are zeroed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from holdfast.crc import combine, combine_all, crc32, crc32_of_each
from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout

if TYPE_CHECKING:
    import numpy.typing as npt

_FIELD_BYTES = 4


class Source(NamedTuple):
    """One sender's frame in a chunk: its rank, and the CRC-32 it stated for its bytes."""

    rank: int
    crc32: int


def verify_chunk(
    memory: memoryview, index: LayoutIndex, chunk: int, sources: Sequence[Source], *, key: CheckpointId
) -> tuple[int, ...]:
    """Compare each sender's CRC with the stated one; return the CRC of each segment, computed once. Zeroes the chunk's
    CRC fields in `memory`. DamageError: a CRC differs; names rank, chunk and the tensors in its frame.
    """
    layout = index.layout
    base = chunk * layout.chunk_bytes
    fields = index.fields[chunk]
    _put(memory, fields.whole, 0)
    for part in fields.cut:
        memory[part.offset : part.offset + part.nbytes] = bytes(part.nbytes)
    segments = layout.segments(chunk)
    crcs = crc32_of_each([memory[offset - base : offset - base + nbytes] for offset, nbytes, _ in segments])
    if len(sources) == 1 and layout.senders(chunk) == (sources[0].rank,):
        total = combine_all(zip(crcs, [nbytes for _, nbytes, _ in segments], strict=True))
        by_rank = {sources[0].rank: total}
    else:
        by_rank = _crc_of_each_sender(memory, layout, chunk, crcs, {source.rank: 0 for source in sources})
    for source in sources:
        if by_rank[source.rank] != source.crc32:
            raise DamageError(
                f"{key}: chunk {chunk} from rank {source.rank}: CRC-32 {by_rank[source.rank]:#010x}, the rank "
                f"sent {source.crc32:#010x}; the chunk was damaged on the way or in the ring; it holds "
                f"{index.describe_contents(chunk, source.rank)}"
            )
    return crcs


def _crc_of_each_sender(
    memory: memoryview, layout: Layout, chunk: int, crcs: Sequence[int], by_rank: dict[int, int]
) -> dict[int, int]:
    """Return the CRC of each sender's frame in the chunk; `by_rank` has 0 for each sender."""
    base = chunk * layout.chunk_bytes
    for segment, crc in zip(layout.segments(chunk), crcs, strict=True):
        senders = (
            layout.split_senders(segment) if layout.is_split(segment) else [layout.sender(chunk, segment)]
        )
        if len(senders) == 1:
            by_rank[senders[0]] = combine(by_rank[senders[0]], crc, segment.nbytes)
            continue
        for rank in senders:
            own = layout.part(segment, rank)
            assert own is not None, "it sends something"
            for extent in own.extents:
                by_rank[rank] = crc32(memory[extent.offset - base : extent.end - base], by_rank[rank])
    return by_rank


def patch_chunk(
    memory: memoryview,
    index: LayoutIndex,
    chunk: int,
    entry_crcs: Sequence[int],
    verified_crcs: Sequence[int],
    *,
    key: CheckpointId,
) -> tuple[tuple[int, int], ...]:
    """Write `entry_crcs` into the chunk's fields; return `(index, crc)` of the changed segments. `verified_crcs`: Of
    each segment with a field, while the fields were zero.

    The new CRCs come from a copy that still has the verified CRCs, so that a bit flipped in the ring never gets a
    matching CRC. DamageError: a segment has changed since it was verified; names the chunk.
    """
    layout, fields = index.layout, index.fields[chunk]
    base, segments = chunk * layout.chunk_bytes, layout.segments(chunk)
    touched = [*map(segments.__getitem__, fields.segments)]
    bounds = [(offset - base, offset - base + nbytes) for offset, nbytes, _ in touched]
    # One copy of these segments, back to back, and the place of each field in the copy.
    copy = bytearray().join([memory[first:end] for first, end in bounds])
    begins = [0, *accumulate([nbytes for _, nbytes, _ in touched])]
    pieces = memoryview(copy)
    copied = [pieces[begin:end] for begin, end in pairwise(begins)]
    firsts = np.array([first for first, _ in bounds], np.int64)
    moved_by = firsts - np.array(begins[:-1], np.int64)

    def in_copy(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return offsets - moved_by[np.searchsorted(firsts, offsets, side="right") - 1]

    values = [crc.to_bytes(_FIELD_BYTES, "little") for crc in entry_crcs[fields.whole.size :]]
    whole, crcs = in_copy(fields.whole), np.array(entry_crcs[: fields.whole.size], np.uint32)
    cut_at = in_copy(np.array([part.offset for part in fields.cut], np.int64)).tolist()
    cut = [
        (at, part.offset, value[part.first : part.first + part.nbytes])
        for at, part, value in zip(cut_at, fields.cut, values, strict=True)
    ]
    _put(pieces, whole, 0)
    for at, _, value in cut:
        pieces[at : at + len(value)] = bytes(len(value))
    for (first, end), found, verified in zip(bounds, crc32_of_each(copied), verified_crcs, strict=True):
        if found != verified:
            raise DamageError(
                f"{key}: chunk {chunk}: bytes {first} to {end} have CRC-32 {found:#010x}, and had "
                f"{verified:#010x} when they were verified; they were damaged in the ring since then: test the memory "
                "of this machine"
            )
    _put(pieces, whole, crcs)
    for at, _, value in cut:
        pieces[at : at + len(value)] = value
    changed = tuple(zip(fields.segments, crc32_of_each(copied), strict=True))
    _put(memory, fields.whole, crcs)
    for _, offset, value in cut:
        memory[offset : offset + len(value)] = value
    return changed


def _put(memory: memoryview, offsets: npt.NDArray[np.int64], values: npt.NDArray[np.uint32] | int) -> None:
    """Write one value of four bytes at each of these offsets, aligned or not."""
    if offsets.size:
        places = len(memory) - _FIELD_BYTES + 1
        np.ndarray((places,), "<u4", memory, strides=(1,))[offsets] = values
