"""What is done to the bytes of one chunk: check every sender's frame, and put the true CRCs into the zip's fields.

Both are pure functions over the slot's memory, and give the GIL back while they compute. Both may be repeated: a chunk
that was patched by a flusher that died then is verified as it came, because the fields are zeroed first.
"""

from __future__ import annotations

from flusher.steps import Patch, Verify
from holdfast.crc import combine, crc32
from holdfast.errors import DamageError

__all__ = ["patch_chunk", "verify_chunk"]


def verify_chunk(memory: memoryview, job: Verify) -> tuple[int, ...]:
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
        rank = layout.sender(chunk, segment)
        by_rank[rank] = combine(by_rank[rank], crc, segment.nbytes)
        crcs.append(crc)
    for source in job.sources:
        if by_rank[source.rank] != source.crc32:
            raise DamageError(
                f"{job.key}: chunk {chunk} from rank {source.rank}: CRC-32 {by_rank[source.rank]:#010x}, the rank "
                f"sent {source.crc32:#010x}; damaged on the way or in the ring; it holds "
                f"{job.index.contents(chunk, source.rank)}"
            )
    return tuple(crcs)


def patch_chunk(memory: memoryview, job: Patch) -> tuple[tuple[int, int], ...]:
    """Write the CRC values; give `(index, crc)` of the segments that changed."""
    layout = job.index.layout
    base = job.chunk * layout.chunk_bytes
    for offset, value in job.values:
        _put(memory, offset, value)
    segments = layout.segments(job.chunk)
    return tuple(
        (index, crc32(memory[segments[index].offset - base :][: segments[index].nbytes]))
        for index in job.touched
    )


def _put(memory: memoryview, offset: int, value: bytes) -> None:
    memory[offset : offset + len(value)] = value
