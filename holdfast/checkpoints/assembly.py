"""Slices that lie in the store become the portable file that the stager's way would have made: the same bytes.

    slices ─► frames of a part's chunks, checked and put in place ─► CRC fields filled in ─► part ─► upload
              └ several reads at once, while the part before is being written ┘               └─► publish ─► manifest

Chunks come in order here, so all that a CRC field states is known when its chunk is there
(docs/design/003-one-layout-torch-zip.md).
The order of the acts is the flusher's: file, then manifest; who calls removes the slices after that. Dying in between
leaves a good state each time: slices only; slices and a file that no manifest names; both. It is then done once more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpoints.image_writing import Image, Parts, Read, write_parts
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
from holdfast.checkpoints.slice_sets import LoadedSet, read_doubts_of
from holdfast.crc import combine, combine_all, crc32
from holdfast.errors import DamageError, HoldfastError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source, patch_chunk, verify_chunk
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.image.slices import SliceFrame, frames_of
from holdfast.ring.doubts import doubt_about
from holdfast.store import is_s3
from holdfast.store.base import Store
from holdfast.store.concurrency import ConcurrencyLimit, reading, writing

_log = logging.getLogger("holdfast.assembly")
_READERS = 4
_RECORD_BYTES_MAX = 1 << 16  # of one rank, in the manifest; it is input from outside


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
        """Fill the CRC fields of the next chunk.

        Args:
            memory: All of its bytes.
            sources: Each sender, and the CRC-32 of its frame.

        Returns:
            The CRC-32 of the chunk as it is then.

        Raises:
            DamageError: A frame has another CRC-32.
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


class Assembler:
    """Makes the chunks of one image, in order, from the slices of all ranks. No store, no threads of its own.

    Args:
        where: Names the place of a rank's slice, for messages.
    """

    def __init__(self, loaded: LoadedSet, where: Callable[[int], str]) -> None:
        self.layout, self._where = loaded.layout, where
        self._key = loaded.found.order
        self._finisher = ChunkFinisher(self._key, loaded.layout)
        self._seals = loaded.seals
        self._frames: tuple[dict[int, tuple[int, SliceFrame]], ...] = tuple(
            {frame.chunk: (number, frame) for number, frame in enumerate(frames_of(loaded.layout, rank))}
            for rank in range(loaded.layout.ranks)
        )

    def read_frame(self, chunk: int, rank: int, memory: memoryview, read: Read) -> None:
        """Copy the part of `chunk` that `rank` has to its place, and check it. Any thread.

        Raises:
            DamageError: Its bytes are not what was sealed: which rank and chunk, in which object, of which tensors.
            StoreError: The store failed.
        """
        number, frame = self._frames[rank][chunk]
        expected = self._seals[rank].frame_crc32s[number]
        base = chunk * self.layout.chunk_bytes
        whole = len(frame.extents) == 1
        begin = frame.extents[0].offset - base
        view = memory[begin : begin + frame.nbytes] if whole else memoryview(bytearray(frame.nbytes))
        for last_look in (False, True):
            read(rank, frame.offset, view)
            found = crc32(view)
            if found == expected:
                break
            if last_look:  # the first time it may have been flipped on its way to us
                raise DamageError(
                    f"{self._where(rank)}: bytes {frame.offset} to {frame.offset + frame.nbytes} (chunk {chunk} of "
                    f"{self._key} from rank {rank}): CRC-32 {found:#010x}, the rank sealed {expected:#010x}; they hold "
                    f"{self._finisher.index.contents(chunk, rank)}. Nothing of the step is published; take another step"
                )
        if not whole:
            at = 0
            for extent in frame.extents:
                memory[extent.offset - base : extent.end - base] = view[at : at + extent.nbytes]
                at += extent.nbytes

    def senders(self, chunk: int) -> tuple[int, ...]:
        return self.layout.senders(chunk)

    def finish_chunk(self, memory: memoryview) -> int:
        """Fill the CRC fields of the next chunk, all of whose frames are there; its CRC-32."""
        chunk = self._finisher.chunk
        sources = tuple(
            Source(rank, self._seals[rank].frame_crc32s[self._frames[rank][chunk][0]])
            for rank in self.senders(chunk)
        )
        return self._finisher.finish(memory, sources)

    def finished(self) -> Finished:
        return self._finisher.finished()


def assemble(
    store: Store,
    loaded: LoadedSet,
    *,
    attempt: int,
    check: Callable[[], None],
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Publish a complete set as a portable file; the slices stay. Blocks; memory is two parts of the upload,
    and to S3 one for each connection that makes it faster (image_writing.py).

    Args:
        store: The run.
        loaded: The set.
        attempt: Attempt of the writer, whose claim `check` looks at.
        check: Sees that the run is still ours, before each part and each visible act; raises `FencedError` if not.
        progress: Called from the calling thread with the bytes newly written.

    Returns:
        The manifest, as it stands in the store: durable, not read back.

    Raises:
        DamageError: A slice is not what was sealed; nothing is published.
        BusyError: This step of this attempt is already published.
        FencedError: The run is another's.
        StoreError: The store failed.
    """
    assembler, read = _assembler_of(store, loaded)
    # A slice in the store is durable at once: staged and durable are when the last rank had sealed its own.
    last = max(seal.sealed_at_unix for seal in loaded.seals) or time.time()
    manifest = publish_image(
        LeasedRun(store, attempt, check),
        loaded.found.order,
        assembler,
        read,
        progress=progress,
        facts=ManifestFacts(
            last,
            last,
            {"ranks": {str(seal.rank): _small(seal.record) for seal in loaded.seals}},
            "assembly",
            doubt_about(read_doubts_of(store, store.list()), loaded.found.order),
        ),
    )
    _log.info("%s: assembled from %d slices into %s", loaded.found.order, len(loaded.seals), manifest.file)
    return manifest


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
        DamageError, BusyError, FencedError, StoreError: As `assemble`.
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
    reach(Point.IMAGE_LISTED)
    forget_intent(store, write_id)
    return manifest


def copy_out(
    store: Store, loaded: LoadedSet, parts: Parts, *, progress: Callable[[int], None] | None = None
) -> int:
    """Give the parts of the portable file of a complete set to `parts`, in order; changes nothing in the store.

    Blocks; memory is two parts. The written parts count only when this has returned.

    Returns:
        CRC-32 of the file.

    Raises:
        DamageError: A slice is not what was sealed, or went while it was read.
        StoreError: The store failed.
    """
    assembler, read = _assembler_of(store, loaded)
    # A file takes its parts in their order, so one at a time.
    with contextlib.closing(
        write_parts(parts, assembler, read, reading(store.url, _READERS), ConcurrencyLimit(1))
    ) as written:
        for nbytes in written:
            if progress is not None:
                progress(nbytes)
    return assembler.finished().image_crc32


def _assembler_of(store: Store, loaded: LoadedSet) -> tuple[Assembler, Read]:
    def read(rank: int, offset: int, view: memoryview) -> None:
        try:
            store.read_into(loaded.found.name(rank).slice, offset, view)
        except StoreMissing as error:
            raise DamageError(
                f"{loaded.found.order}: a slice was removed while it was read, as a newer step is complete: {error}"
            ) from error

    return Assembler(loaded, lambda rank: f"{store.url}/{loaded.found.name(rank).slice}"), read


def _small(record: Mapping[str, Any]) -> dict[str, Any]:
    return dict(record) if len(json.dumps(record)) <= _RECORD_BYTES_MAX else {}
