"""Publishes an image that a tool has at hand as a checkpoint of a run, as the flusher would.

    chunks of a part, in order ─► CRC fields filled in ─► part ─► upload ─► publish ─► manifest
                                                           └ as many at once as make it faster; to a directory, one

Chunks are in order here, so everything that a CRC field states is known by then
(docs/design/003-one-layout-torch-zip.md). The order of publishing is the flusher's: file, then manifest.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent import futures
from typing import Protocol

from holdfast.checkpoints.intents import Intent, discard_intent, undo_intent
from holdfast.checkpoints.lease import LeasedRun
from holdfast.checkpoints.publish import (
    ASSEMBLY,
    FinishedImage,
    ManifestFacts,
    build_manifest,
    choose_name,
    publish_manifest,
    writer_id,
)
from holdfast.crc import combine, combine_all, crc32
from holdfast.errors import HoldfastError
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source, patch_chunk, verify_chunk
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.process import available_memory_bytes
from holdfast.ring.pages import aligned_buffer
from holdfast.store import is_s3
from holdfast.store.base import Upload
from holdfast.store.concurrency import ConcurrencyLimit, FailFastRequests, LimitedRequest, write_limit

_BUFFERS_MIN = 2  # one is filled while the other is written
_BYTES_MAX, _MEMORY_SHARE = 4 << 30, 4  # of all parts in flight; divisor of the available memory


class Image(Protocol):
    """A whole image in one process."""

    @property
    def layout(self) -> Layout: ...

    def write_chunk(self, chunk: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes of a chunk, except its CRC fields."""


class ChunkFinisher:
    """Fills the CRC fields of an image's chunks, in order, and keeps the sums."""

    def __init__(self, key: CheckpointId, layout: Layout) -> None:
        self._key, self._layout = key, layout
        self._index = LayoutIndex(layout)
        self._chunk_crcs: list[int] = []
        self._entry_crcs = [0] * len(layout.entries)

    def finish(self, memory: memoryview) -> int:
        """Fill the CRC fields of the next chunk; return the CRC-32 of the finished chunk."""
        chunk = len(self._chunk_crcs)
        sender = Source(self._layout.chunk_rank(chunk), crc32(memory))
        crcs = list(verify_chunk(memory, self._index, chunk, (sender,), key=self._key))
        segments = self._layout.segments(chunk)
        for segment, crc in zip(segments, crcs, strict=True):
            if segment.entry is not None:
                self._entry_crcs[segment.entry] = combine(
                    self._entry_crcs[segment.entry], crc, segment.nbytes
                )
        if fields := self._index.fields[chunk]:
            known = tuple(map(self._entry_crcs.__getitem__, fields.entries))
            verified = tuple(map(crcs.__getitem__, fields.segments))
            for number, crc in patch_chunk(memory, self._index, chunk, known, verified, key=self._key):
                crcs[number] = crc
        total = combine_all((crc, segment.nbytes) for segment, crc in zip(segments, crcs, strict=True))
        self._chunk_crcs.append(total)
        return total

    def finished_image(self) -> FinishedImage:
        """Return the facts for the manifest, after the last chunk."""
        image_crc = combine_all(
            (crc, self._layout.chunk_extent(chunk).nbytes) for chunk, crc in enumerate(self._chunk_crcs)
        )
        return FinishedImage(
            self._key, self._index, image_crc, tuple(self._chunk_crcs), tuple(self._entry_crcs)
        )


def publish_image(
    leased_run: LeasedRun,
    key: CheckpointId,
    image: Image,
    *,
    progress: Callable[[int], None] | None,
    facts: ManifestFacts,
) -> Manifest:
    """Publish an image as a portable file, then its manifest. `leased_run`: the run, whose lease is checked before each
    visible change. Return the manifest as it stands in the store: durable, not read back. Raises `BusyError` if it is
    already published, and `FencedError` if the run is another's.
    """
    store, attempt, check = leased_run
    layout, finisher = image.layout, ChunkFinisher(key, image.layout)
    started = time.monotonic()
    file, write_id = choose_name(store, key, ()), f"{ASSEMBLY}{writer_id(attempt)}"
    check()
    sizes = {"nbytes": layout.image_bytes, "chunk_bytes": layout.chunk_bytes}
    upload = store.begin(file, **sizes, write_id=write_id)
    try:
        Intent.to_publish(file, upload, **sizes, write_id=write_id).write(store)
        limit = write_limit(store.url) if is_s3(store.url) else ConcurrencyLimit(1)
        with contextlib.closing(write_image(upload, image, finisher, limit)) as parts:
            for nbytes in parts:
                check()
                if progress is not None:
                    progress(nbytes)
        check()
        upload.publish()
    except BaseException:
        with contextlib.suppress(HoldfastError):
            upload.abort()
            undo_intent(store, write_id)
        raise
    reach(Point.IMAGE_NAMED)
    check()
    manifest = build_manifest(
        finisher.finished_image(),
        run=store.url.rstrip("/").rpartition("/")[2],
        file=file,
        write_id=write_id,
        facts=facts,
        writer_record={"seconds": round(time.monotonic() - started, 6)},
    )
    manifest = publish_manifest(store, manifest)
    discard_intent(store, write_id)
    return manifest


def write_image(
    upload: Upload, image: Image, finisher: ChunkFinisher, limit: ConcurrencyLimit
) -> Generator[int, None, None]:
    """Write all parts; yield the bytes of each once it is written. Blocks; a consumer that stops early must close it.

    Memory is two parts if one is written at a time. Else it is one part per request, within a quarter of the available
    memory and 4 GiB, including the copies that a store makes of a part. After a failure no waiting part is sent.
    """
    layout = image.layout
    nbytes_max = min(upload.part_bytes, layout.image_bytes)
    share_bytes = min(_BYTES_MAX, available_memory_bytes() // _MEMORY_SHARE)
    buffers_max = max(_BUFFERS_MIN, share_bytes // (2 * nbytes_max)) if limit.maximum > 1 else _BUFFERS_MIN
    requests, in_flight = FailFastRequests(), deque[tuple[futures.Future[int], memoryview]]()
    free: list[memoryview] = []

    def write(part: int, chunks: list[memoryview], crc: int) -> int:
        def call(request: LimitedRequest) -> int:
            upload.write_part(part, chunks, crc)
            request.nbytes = sum(chunk.nbytes for chunk in chunks)
            return request.nbytes

        return requests.run(limit, call)

    def wait_for_oldest() -> int:
        written, memory = in_flight.popleft()
        futures.wait([written])
        requests.raise_if_failed()
        free.append(memory)
        return written.result()

    with futures.ThreadPoolExecutor(limit.maximum, thread_name_prefix="image") as writers:
        try:
            for part, first in enumerate(range(0, layout.chunks, upload.part_bytes // layout.chunk_bytes)):
                while len(in_flight) >= max(_BUFFERS_MIN, min(buffers_max, limit.width + 1)):
                    yield wait_for_oldest()
                memory = free.pop() if free else aligned_buffer(nbytes_max)
                chunks, crcs = list[memoryview](), list[tuple[int, int]]()
                for chunk in range(
                    first, min(first + upload.part_bytes // layout.chunk_bytes, layout.chunks)
                ):
                    begin = (chunk - first) * layout.chunk_bytes
                    chunks.append(memory[begin : begin + layout.chunk_extent(chunk).nbytes])
                    image.write_chunk(chunk, chunks[-1])
                    crcs.append((finisher.finish(chunks[-1]), chunks[-1].nbytes))
                in_flight.append((writers.submit(write, part, chunks, combine_all(crcs)), memory))
            while in_flight:
                yield wait_for_oldest()
        finally:
            requests.cancel_pending()
