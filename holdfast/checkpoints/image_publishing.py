"""An image that a tool has at hand becomes a checkpoint of a run, as the flusher would have written it.

    frames of a part's chunks ─► CRC fields filled in ─► part ─► upload ─► publish ─► manifest

Chunks come in order here, so all that a CRC field states is known when its chunk is there
(docs/design/003-one-layout-torch-zip.md). The order of the acts is the flusher's: file, then manifest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from holdfast.checkpoints.image_writing import Image, Read, write_parts
from holdfast.checkpoints.intents import Intent, forget_intent, take_back
from holdfast.checkpoints.lease import LeasedRun
from holdfast.checkpoints.publish import (
    ASSEMBLY,
    Finished,
    ManifestFacts,
    build_manifest,
    choose_name,
    publish_manifest,
    writer_id,
)
from holdfast.crc import combine, combine_all
from holdfast.errors import HoldfastError
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source, patch_chunk, verify_chunk
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.store import is_s3
from holdfast.store.concurrency import ConcurrencyLimit, reading, writing

_READERS = 4


class ChunkFinisher:
    """Fills the CRC fields of an image's chunks, which come in order, and keeps the sums."""

    def __init__(self, key: CheckpointId, layout: Layout) -> None:
        self._key, self._layout = key, layout
        self.index = LayoutIndex(layout)
        self._chunk_crcs: list[int] = []
        self._entry_crcs = [0] * len(layout.entries)

    @property
    def chunk(self) -> int:
        return len(self._chunk_crcs)

    def finish(self, memory: memoryview, sources: tuple[Source, ...]) -> int:
        """Fill the CRC fields of the next chunk. `sources`: each sender, and the CRC-32 of its frame. Raises
        `DamageError`: a frame has another CRC-32.

        Returns:
            The CRC-32 of the chunk as it is then.
        """
        chunk = self.chunk
        crcs = list(verify_chunk(memory, self.index, chunk, sources, key=self._key))
        segments = self._layout.segments(chunk)
        for segment, crc in zip(segments, crcs, strict=True):
            if segment.entry is not None:
                self._entry_crcs[segment.entry] = combine(
                    self._entry_crcs[segment.entry], crc, segment.nbytes
                )
        if fields := self.index.fields[chunk]:
            known = tuple(map(self._entry_crcs.__getitem__, fields.entries))
            verified = tuple(map(crcs.__getitem__, fields.segments))
            for number, crc in patch_chunk(memory, self.index, chunk, known, verified, key=self._key):
                crcs[number] = crc
        total = combine_all((crc, segment.nbytes) for segment, crc in zip(segments, crcs, strict=True))
        self._chunk_crcs.append(total)
        return total

    def finished(self) -> Finished:
        """The part of the manifest that is known after the last chunk."""
        assert self.chunk == self._layout.chunks
        image_crc = combine_all(
            (crc, self._layout.chunk_extent(chunk).nbytes) for chunk, crc in enumerate(self._chunk_crcs)
        )
        return Finished(self._key, self.index, image_crc, tuple(self._chunk_crcs), tuple(self._entry_crcs))


def publish_image(
    ours: LeasedRun,
    key: CheckpointId,
    image: Image,
    read: Read,
    *,
    progress: Callable[[int], None] | None,
    facts: ManifestFacts,
) -> Manifest:
    """Publish an image as a portable file, and then its manifest. Blocks; memory is two parts of the upload,
    and to S3 one for each connection that makes it faster (image_writing.py).

    Args:
        ours: The run, whose claim is checked before each part and each visible act.
        key: Name that it is published under.
        image: The image.
        read: Handed on to `image.read_frame`.
        progress: Called from the calling thread with the bytes newly written.
        facts: Further fields of the manifest.

    Returns:
        The manifest, as it stands in the store: durable, not read back.

    Raises:
        DamageError: A frame is not what it should be; nothing is published.
        BusyError: This checkpoint is already published.
        FencedError: The run is another's.
        StoreError: The store failed.
    """
    store, attempt, check = ours
    layout = image.layout
    begun = time.monotonic()
    file, write_id = choose_name(store, key, ()), f"{ASSEMBLY}{writer_id(attempt)}"
    check()
    sizes = {"nbytes": layout.image_bytes, "chunk_bytes": layout.chunk_bytes}
    upload = store.begin(file, **sizes, write_id=write_id)
    try:
        Intent.to_publish(file, upload, **sizes, write_id=write_id).write(store)
        limits = (
            (reading(store.url), writing(store.url))
            if is_s3(store.url)
            else (ConcurrencyLimit(_READERS), ConcurrencyLimit(1))
        )
        with contextlib.closing(write_parts(upload, image, read, *limits)) as parts:
            for nbytes in parts:
                check()
                if progress is not None:
                    progress(nbytes)
        check()
        upload.publish()
    except BaseException:
        with contextlib.suppress(HoldfastError):
            upload.abort()
            take_back(store, write_id)
        raise
    reach(Point.IMAGE_NAMED)
    check()
    manifest = build_manifest(
        image.finished(),
        run=store.url.rstrip("/").rpartition("/")[2],
        file=file,
        write_id=write_id,
        facts=facts,
        writer_record={"seconds": round(time.monotonic() - begun, 6)},
    )
    manifest = publish_manifest(store, manifest)
    forget_intent(store, write_id)
    return manifest
