"""Writes an image part by part, while the frames of the parts after it are being read.

    frames are read ─► all of a part are there ─► its chunks finished, in their order ─► part written
          └ as many parts at once as are faster, and as there is memory for (to a file two, one after the other)

After a failure or cancellation, queued parts are not started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from holdfast.checkpoints.publish import Finished
from holdfast.crc import combine_all
from holdfast.errors import ProtocolError
from holdfast.image.layout import Layout
from holdfast.process import available_memory_bytes
from holdfast.ring.pages import direct_window
from holdfast.store.concurrency import ConcurrencyLimit, LimitedRequest, LimitedUntilFailure

_BUFFERS_MIN = 2  # one is filled while the other is written
_BYTES_MAX, _MEMORY_SHARE = 4 << 30, 4  # of all parts at once, and of what is available

Read = Callable[[int, int, memoryview], None]
"""Fill a view with the bytes of a rank's slice from an offset on."""


class Parts(Protocol):
    """A destination that takes an image part by part: an upload, or an open file."""

    @property
    def part_bytes(self) -> int:
        """Size of every part but the last: a multiple of the chunk's."""
        ...

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        """Write part `index`, whose bytes are `buffers` back to back."""
        ...


class Image(Protocol):
    """An image whose chunks can be made, in order."""

    @property
    def layout(self) -> Layout: ...

    def senders(self, chunk: int) -> tuple[int, ...]: ...

    def read_frame(self, chunk: int, rank: int, memory: memoryview, read: Read) -> None:
        """Copy the part of `chunk` that `rank` has to its place. Any thread."""
        ...

    def finish_chunk(self, memory: memoryview) -> int:
        """Fill the CRC fields of the next chunk, all of whose frames are there; its CRC-32."""
        ...

    def finished(self) -> Finished:
        """The part of the manifest that is known after the last chunk."""
        ...


@dataclass(slots=True)
class _PartAtWork:
    number: int
    memory: memoryview
    chunks: list[memoryview]
    reads: int  # that have not ended


def write_parts(
    upload: Parts, image: Image, read: Read, readers: ConcurrencyLimit, writers: ConcurrencyLimit
) -> Generator[int, None, None]:
    """Write all parts; gives the bytes of each when it is written. Blocks; a consumer that stops closes it. With a
    limit of one writer, `upload` gets the parts in their order. `read`: from any thread.

    Memory is two parts where one is written at a time; else one for each request, within a quarter of the available
    memory and 4 GiB, the copies among it that frames of several pieces take while they are read. Raises
    `ProtocolError`: the parts are no multiple of the chunks.
    """
    layout = image.layout
    nbytes_max = min(upload.part_bytes, layout.image_bytes)
    part_chunks = _part_chunks(upload, layout)
    buffers_max = _BUFFERS_MIN if writers.most == 1 else _buffers(nbytes_max)
    firsts = deque(enumerate(range(0, layout.chunks, part_chunks)))
    being_read: deque[_PartAtWork] = deque()
    ends: SimpleQueue[tuple[Future[int], _PartAtWork]] = SimpleQueue()
    free: list[memoryview] = []
    at_work = 0
    requests = LimitedUntilFailure()

    def read_frame(chunk: int, rank: int, memory: memoryview) -> int:
        def call(request: LimitedRequest) -> int:
            image.read_frame(chunk, rank, memory, read)
            request.nbytes = sum(extent.nbytes for extent in layout.pieces(chunk, rank))
            return request.nbytes

        return requests.run(readers, call)

    def write(part: _PartAtWork, crc: int) -> int:
        def call(request: LimitedRequest) -> int:
            upload.write_part(part.number, part.chunks, crc)
            request.nbytes = sum(chunk.nbytes for chunk in part.chunks)
            return request.nbytes

        return requests.run(writers, call)

    def submit(part: _PartAtWork, future: Future[int]) -> None:
        future.add_done_callback(lambda ended: ends.put((ended, part)))

    with (
        ThreadPoolExecutor(readers.most, thread_name_prefix="slices") as slices,
        ThreadPoolExecutor(writers.most, thread_name_prefix="image") as images,
    ):
        try:
            while firsts or at_work:
                while firsts and at_work < max(_BUFFERS_MIN, min(buffers_max, readers.width + writers.width)):
                    number, first = firsts.popleft()
                    memory = free.pop() if free else direct_window(nbytes_max)
                    at_work += 1
                    base = first * layout.chunk_bytes
                    numbers = range(first, min(first + part_chunks, layout.chunks))
                    extents = [layout.chunk_extent(chunk) for chunk in numbers]
                    chunks = [memory[at.offset - base : at.end - base] for at in extents]
                    frames = [(chunk, rank) for chunk in numbers for rank in image.senders(chunk)]
                    part = _PartAtWork(number, memory, chunks, len(frames))
                    being_read.append(part)
                    for chunk, rank in frames:
                        submit(part, slices.submit(read_frame, chunk, rank, chunks[chunk - first]))
                while being_read and not being_read[0].reads:
                    part = being_read.popleft()
                    crcs = [(image.finish_chunk(chunk), chunk.nbytes) for chunk in part.chunks]
                    submit(part, images.submit(write, part, combine_all(crcs)))
                ended, part = ends.get()
                requests.check()
                nbytes = ended.result()
                if part.reads:
                    part.reads -= 1
                else:
                    free.append(part.memory)
                    at_work -= 1
                    yield nbytes
        finally:
            requests.end()


def _part_chunks(upload: Parts, layout: Layout) -> int:
    if upload.part_bytes <= 0 or upload.part_bytes % layout.chunk_bytes:
        raise ProtocolError(
            f"the store uploads parts of {upload.part_bytes} bytes, expected a multiple of the chunk size "
            f"{layout.chunk_bytes}"
        )
    return upload.part_bytes // layout.chunk_bytes


def _buffers(nbytes: int) -> int:
    """How many parts may be at work where the limit allows all: each takes its memory twice at the most."""
    share_bytes = min(_BYTES_MAX, available_memory_bytes() // _MEMORY_SHARE)
    return max(_BUFFERS_MIN, share_bytes // (2 * nbytes))
