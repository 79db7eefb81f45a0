"""Work on the bytes of one chunk: check every sender's frame, and put the true CRCs into the zip's fields.

Both are pure functions over the slot's memory, and give the GIL back while they compute. Both may be repeated: a chunk
that was patched by a flusher that died then is verified as it came, because the fields are zeroed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from holdfast.crc import combine, combine_all, crc32, crc32_of_each
from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex

if TYPE_CHECKING:
    import numpy.typing as npt

_FIELD_BYTES = 4


class Source(NamedTuple):
    """One sender's frame in a chunk: its rank, and the CRC-32 it stated for its bytes."""

    rank: int
    crc32: int


class VerifyJob(Protocol):
    """A chunk to verify, and the CRC that each sender stated for its frame."""

    @property
    def key(self) -> CheckpointId: ...

    @property
    def chunk(self) -> int: ...

    @property
    def sources(self) -> tuple[Source, ...]: ...

    @property
    def index(self) -> LayoutIndex: ...


class PatchJob(Protocol):
    """A chunk to patch: the CRCs for its fields, and those so far of the segments that they lie in.

    Attributes:
        verified_crcs: CRC of each of its `segments`, with their fields zero.
    """

    @property
    def key(self) -> CheckpointId: ...

    @property
    def chunk(self) -> int: ...

    @property
    def entry_crcs(self) -> tuple[int, ...]: ...

    @property
    def verified_crcs(self) -> tuple[int, ...]: ...

    @property
    def index(self) -> LayoutIndex: ...


def verify_chunk(memory: memoryview, job: VerifyJob) -> tuple[int, ...]:
    """CRC every segment once; combine each sender's in the order of its frame and compare with what it stated.

    Args:
        memory: The slot. Its CRC fields are zeroed.
        job: Which chunk it is, and the senders' CRCs.

    Returns:
        The CRC of each segment.

    Raises:
        DamageError: naming rank, chunk and the tensors in its frame.
    """
    layout, chunk = job.index.layout, job.chunk
    base = chunk * layout.chunk_bytes
    fields = job.index.fields[chunk]
    _put(memory, fields.whole, 0)
    for part in fields.cut:
        memory[part.offset : part.offset + part.nbytes] = bytes(part.nbytes)
    segments = layout.segments(chunk)
    crcs = crc32_of_each([memory[offset - base : offset - base + nbytes] for offset, nbytes, _ in segments])
    if len(job.sources) == 1 and layout.senders(chunk) == (job.sources[0].rank,):
        total = combine_all(zip(crcs, [nbytes for _, nbytes, _ in segments], strict=True))
        by_rank = {job.sources[0].rank: total}
    else:
        by_rank = _crc_of_each_sender(memory, job, crcs)
    for source in job.sources:
        if by_rank[source.rank] != source.crc32:
            raise DamageError(
                f"{job.key}: chunk {chunk} from rank {source.rank}: CRC-32 {by_rank[source.rank]:#010x}, the rank "
                f"sent {source.crc32:#010x}; the chunk was damaged on the way or in the ring; it holds "
                f"{job.index.contents(chunk, source.rank)}"
            )
    return crcs


def _crc_of_each_sender(memory: memoryview, job: VerifyJob, crcs: Sequence[int]) -> dict[int, int]:
    """CRC of the frame of each rank that sends into the chunk."""
    layout, chunk = job.index.layout, job.chunk
    base = chunk * layout.chunk_bytes
    by_rank = {source.rank: 0 for source in job.sources}
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


def patch_chunk(memory: memoryview, job: PatchJob) -> tuple[tuple[int, int], ...]:
    """Write the CRC values; give `(index, crc)` of the segments that changed.

    These CRCs are taken from a copy that still has the verified CRCs: a bit that flipped in the ring since then, or
    flips after this, does not get a CRC that fits it. The segments are headers and the central directory, so small.

    Raises:
        DamageError: naming the chunk; a segment is no longer what was verified.
    """
    layout, fields = job.index.layout, job.index.fields[job.chunk]
    base, segments = job.chunk * layout.chunk_bytes, layout.segments(job.chunk)
    touched = [*map(segments.__getitem__, fields.segments)]
    bounds = [(offset - base, offset - base + nbytes) for offset, nbytes, _ in touched]
    # One copy of all of them, one behind the other, and where each field lies in it.
    copy = bytearray().join([memory[first:end] for first, end in bounds])
    begins = [0, *accumulate([nbytes for _, nbytes, _ in touched])]
    pieces = memoryview(copy)
    copied = [pieces[begin:end] for begin, end in pairwise(begins)]
    firsts = np.array([first for first, _ in bounds], np.int64)
    moved_by = firsts - np.array(begins[:-1], np.int64)

    def in_copy(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return offsets - moved_by[np.searchsorted(firsts, offsets, side="right") - 1]

    values = [crc.to_bytes(_FIELD_BYTES, "little") for crc in job.entry_crcs[fields.whole.size :]]
    whole, crcs = in_copy(fields.whole), np.array(job.entry_crcs[: fields.whole.size], np.uint32)
    cut = [
        (at, part.offset, value[part.first : part.first + part.nbytes])
        for at, part, value in zip(
            in_copy(np.array([part.offset for part in fields.cut], np.int64)).tolist(),
            fields.cut,
            values,
            strict=True,
        )
    ]
    _put(pieces, whole, 0)
    for at, _, value in cut:
        pieces[at : at + len(value)] = bytes(len(value))
    for (first, end), found, verified in zip(bounds, crc32_of_each(copied), job.verified_crcs, strict=True):
        if found != verified:
            raise DamageError(
                f"{job.key}: chunk {job.chunk}: bytes {first} to {end} have CRC-32 {found:#010x}, and had "
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
    """Write one value of four bytes at each of these offsets, wherever they begin."""
    if offsets.size:
        places = len(memory) - _FIELD_BYTES + 1
        np.ndarray((places,), "<u4", memory, strides=(1,))[offsets] = values
