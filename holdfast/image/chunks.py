"""Work on the bytes of one chunk: check every sender's frame, and put the true CRCs into the zip's fields.

Both are pure functions over the slot's memory, and give the GIL back while they compute. Both may be repeated: a chunk
that was patched by a flusher that died then is verified as it came, because the fields are zeroed first.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple, Protocol

from holdfast.crc import combine, crc32
from holdfast.errors import DamageError
from holdfast.image.index import LayoutIndex
from holdfast.image.manifest import Key


class Source(NamedTuple):
    """One sender's frame in a chunk: its rank, and the CRC-32 it stated for its bytes."""

    rank: int
    crc32: int


class VerifyJob(Protocol):
    """A chunk to verify, and the CRC that each sender stated for its frame."""

    @property
    def key(self) -> Key: ...

    @property
    def chunk(self) -> int: ...

    @property
    def sources(self) -> tuple[Source, ...]: ...

    @property
    def index(self) -> LayoutIndex: ...


class PatchJob(Protocol):
    """A chunk to patch: the values and their places, the segments that they change, and the CRCs of these so far."""

    @property
    def key(self) -> Key: ...

    @property
    def chunk(self) -> int: ...

    @property
    def values(self) -> tuple[tuple[int, bytes], ...]: ...

    @property
    def touched(self) -> tuple[int, ...]: ...

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
    for part in job.index.fields[chunk]:
        _put(memory, part.offset, bytes(part.nbytes))
    crcs: list[int] = []
    by_rank = {source.rank: 0 for source in job.sources}
    for segment in layout.segments(chunk):
        offset = segment.offset - base
        crc = crc32(memory[offset : offset + segment.nbytes])
        crcs.append(crc)
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
    for source in job.sources:
        if by_rank[source.rank] != source.crc32:
            raise DamageError(
                f"{job.key}: chunk {chunk} from rank {source.rank}: CRC-32 {by_rank[source.rank]:#010x}, the rank "
                f"sent {source.crc32:#010x}; the chunk was damaged on the way or in the ring; it holds "
                f"{job.index.contents(chunk, source.rank)}"
            )
    return tuple(crcs)


def patch_chunk(memory: memoryview, job: PatchJob) -> tuple[tuple[int, int], ...]:
    """Write the CRC values; give `(index, crc)` of the segments that changed.

    These CRCs are taken from a copy that still has the verified CRCs: a bit that flipped in the ring since then, or
    flips after this, does not get a CRC that fits it. The segments are headers and the central directory, so small.

    Raises:
        DamageError: naming the chunk; a segment is no longer what was verified.
    """
    layout = job.index.layout
    base = job.chunk * layout.chunk_bytes
    segments = layout.segments(job.chunk)
    ordered = sorted(job.values)
    offsets = [offset for offset, _ in ordered]
    changed: list[tuple[int, int]] = []
    for index, verified in zip(job.touched, job.verified_crcs, strict=True):
        first = segments[index].offset - base
        end = first + segments[index].nbytes
        copy = bytearray(memory[first:end])
        inside = ordered[bisect_left(offsets, first) : bisect_left(offsets, end)]
        values = [(offset - first, value) for offset, value in inside]
        for at, value in values:
            copy[at : at + len(value)] = bytes(len(value))
        found = crc32(copy)
        if found != verified:
            raise DamageError(
                f"{job.key}: chunk {job.chunk}: bytes {first} to {end} have CRC-32 {found:#010x}, and had "
                f"{verified:#010x} when they were verified; they were damaged in the ring since then: test the memory "
                "of this machine"
            )
        for at, value in values:
            copy[at : at + len(value)] = value
        changed.append((index, crc32(copy)))
    for offset, value in job.values:
        _put(memory, offset, value)
    return tuple(changed)


def _put(memory: memoryview, offset: int, value: bytes) -> None:
    memory[offset : offset + len(value)] = value
