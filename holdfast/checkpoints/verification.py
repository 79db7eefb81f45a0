"""Reads a published checkpoint back, and reports exactly which bytes differ from those that were written.

    file ─► windows of chunk_bytes ─► segments (cut where entries begin and end) ─► CRC-32 of each segment
                                                                                         │ combined, read once
                 image CRC  ◄──────── chunk CRCs  ◄──────── entry CRCs  ◄────────────────┘
                 zip directory (zip_directory.py, or zipfile): its CRC and size fields against the manifest's entries

The manifest has what the flusher computed from its memory, so a difference is damage on the way to the store or in it.
A chunk that differs is read again: damage on the way back is not damage of the checkpoint. `unzip -t` would believe the
zip's own fields, so they must agree.

Numbers that are not finite are counted in the same pass, while the bytes are in the cache: every checkpoint is read
back, whichever process wrote it, and no slot of the ring waits for it.
"""

from __future__ import annotations

import bisect
import logging
import struct
import zipfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

from holdfast import crc
from holdfast.checkpoints.chunk_sums import ChunkSums, EntryBounds, bytes_of_chunk, sums_of_chunk
from holdfast.checkpoints.nonfinite import float_formats, nonfinite_record
from holdfast.checkpoints.zip_directory import plain_directory
from holdfast.errors import DamageError, StoreMissing
from holdfast.image.manifest import EntryRecord, Manifest, NonfiniteRecord
from holdfast.ring.pages import aligned_buffer
from holdfast.store.base import Store
from holdfast.store.concurrency import ConcurrencyLimit, FailFastRequests, LimitedRequest, read_limit
from holdfast.store.ranged import RangedFile

_log = logging.getLogger("holdfast.verify")
_NAMES_SHOWN = 8
_BUFFERS_BYTES_MAX, _BUFFER_BYTES_MIN = 256 << 20, 1 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One difference from the manifest."""

    what: str  # `chunk 3`, `entry archive/data/17`, `image`, `directory of archive/data/17`, `file`, or `manifest`
    offset: int  # first byte in the file where the damage may lie
    nbytes: int  # how far it may reach
    expected: str  # the manifest's statement, in words
    got: str  # what was found
    tensors: tuple[str, ...] = ()  # paths of the tensors with bytes there

    def __str__(self) -> str:
        held = f", holding {_shorten(self.tensors)}" if self.tensors else ""
        last = self.offset + max(self.nbytes, 1) - 1
        place = f"bytes {self.offset}-{last}"
        return f"{self.what} ({place}{held}): expected {self.expected}, got {self.got}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome of reading one checkpoint back."""

    file: str
    step: int
    checked_bytes: int  # how many bytes were read and checked
    damage: tuple[Damage, ...]
    # numbers that are not finite; None if they could not be counted, as in a damaged file
    nonfinite: NonfiniteRecord | None = None

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.damage

    @property
    def tensors(self) -> tuple[str, ...]:
        """Paths of all damaged tensors, each once."""
        return tuple(dict.fromkeys(path for damage in self.damage for path in damage.tensors))

    def summary(self) -> str:
        if self.ok:
            return f"{self.file}: {self.checked_bytes} bytes are as they were written"
        names, faults = _shorten(self.tensors), len(self.damage)
        more = f" (and {faults - 1} more faults)" if faults > 1 else ""
        tensors = f"; damaged tensors: {names}" if names else "; no tensor is touched"
        return f"{self.file}: {self.damage[0]}{more}{tensors}"


def _shorten(names: Sequence[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def verify_file(
    store: Store,
    manifest: Manifest,
    *,
    threads: int | None = None,
    buffer_bytes: int = 16 * 1024 * 1024,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Read the file of `manifest` once, and check every chunk, every entry, the whole, and the zip's own CRC fields.

    `threads`: None: 2 from a directory, from S3 as many as make it faster. `buffer_bytes`: largest single read.
    `progress`: called in the calling thread with the bytes newly checked. Memory is 256 MiB at most. The report has a
    missing or short file as damage. Raises `StoreError` if the store fails.
    """

    def report(
        *damage: Damage, checked_bytes: int = 0, nonfinite: NonfiniteRecord | None = None
    ) -> VerifyReport:
        return VerifyReport(manifest.file, manifest.step, checked_bytes, damage, nonfinite)

    for entry, following in pairwise(manifest.entries):
        if following.offset < entry.offset + entry.nbytes:
            after = f"after {entry.name} ends at {entry.offset + entry.nbytes}"
            return report(Damage("manifest", 0, 0, f"{following.name} {after}", f"{following.offset}"))
    try:
        size_bytes = store.size(manifest.file)
    except StoreMissing:
        return report(Damage("file", 0, 0, f"{manifest.image_bytes} bytes", "no file"))
    if size_bytes != manifest.image_bytes:
        shorter, longer = sorted((size_bytes, manifest.image_bytes))
        lengths = f"{manifest.image_bytes} bytes", f"{size_bytes} bytes"
        tensors = _TensorIndex(manifest).between(shorter, longer)
        return report(Damage("file", shorter, longer - shorter, *lengths, tensors))
    found = _DamageFinder(manifest)
    try:
        limit = read_limit(store.url, threads)
        with closing(_chunk_sums(store, manifest, limit, buffer_bytes)) as chunks:
            for chunk, sums in enumerate(chunks):
                found.add(chunk, sums)
                if progress is not None:
                    progress(bytes_of_chunk(manifest, chunk))
    except DamageError as error:  # it became shorter after its size was read
        return report(Damage("file", 0, manifest.image_bytes, f"{manifest.image_bytes} bytes", str(error)))
    damage = found.damage()
    # The directory lies in the bytes just checked; damage there would only be reported again, less clearly.
    if not damage and _directory_damage(store, manifest):
        # Read again: the first read may have been damaged on its way.
        damage += _directory_damage(store, manifest)
    return report(
        *damage, checked_bytes=manifest.image_bytes, nonfinite=None if damage else found.nonfinite()
    )


def _chunk_sums(
    store: Store, manifest: Manifest, limit: ConcurrencyLimit, buffer_bytes: int
) -> Generator[ChunkSums, None, None]:
    """Yield the sums of each chunk, in order, each computed in a request of its own."""
    most_bytes = max(1, min(buffer_bytes, manifest.chunk_bytes, manifest.image_bytes))
    chunks = len(manifest.chunk_crc32s)
    buffers = _BufferPool(most_bytes)
    bounds = EntryBounds(manifest.entries)
    formats = float_formats(manifest)
    requests = FailFastRequests()

    def sums_of(chunk: int) -> ChunkSums:
        return requests.run(limit, lambda request: read(chunk, request))

    def read(chunk: int, request: LimitedRequest) -> ChunkSums:
        with buffers.borrow(limit.width) as buffer:
            sums = sums_of_chunk(store, manifest, chunk, (bounds, formats), buffer)
            request.nbytes = bytes_of_chunk(manifest, chunk)
            if sums.crc32 == manifest.chunk_crc32s[chunk]:
                return sums
            # A byte may have changed only on its way here; damage in the store is the same in every read.
            reread = sums_of_chunk(store, manifest, chunk, (bounds, formats), buffer)
            if reread.crc32 == manifest.chunk_crc32s[chunk]:
                _log.warning(
                    "%s: chunk %d was read wrong once and right the next time: the path from the store damages bytes",
                    manifest.file,
                    chunk,
                )
            return reread

    # Results that wait for earlier ones are small, and threads above the limit wait.
    with ThreadPoolExecutor(min(limit.maximum, chunks), thread_name_prefix="verify") as readers:
        try:
            yield from readers.map(sums_of, range(chunks))
        except CancelledError:
            requests.raise_if_failed()
        finally:
            requests.cancel_pending()


class _BufferPool:
    """One buffer per request; the more requests, the smaller, so that their sum stays below a bound."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: list[memoryview] = []

    @contextmanager
    def borrow(self, requests: int) -> Iterator[memoryview]:
        share_bytes = max(_BUFFER_BYTES_MIN, _BUFFERS_BYTES_MAX // requests & -_BUFFER_BYTES_MIN)
        nbytes = min(self._most_bytes, share_bytes)
        buffer = memoryview(b"")
        with suppress(IndexError):
            buffer = self._free.pop()
        if len(buffer) != nbytes:  # none is free, or the limit has changed
            buffer = aligned_buffer(nbytes)
        yield buffer
        self._free.append(buffer)


class _DamageFinder:
    """Gathers the sums of the chunks, in order, and compares them with the manifest at the end."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._image_crc32 = 0
        self._entry_crc32s = [0] * len(manifest.entries)
        self._bad_chunks: list[tuple[int, int]] = []
        self._nonfinite: dict[int, int] | None = {}

    def add(self, chunk: int, sums: ChunkSums) -> None:
        self._image_crc32 = crc.combine(self._image_crc32, sums.crc32, bytes_of_chunk(self._manifest, chunk))
        crc32s = self._entry_crc32s
        for entry, crc32, nbytes in zip(sums.entries, sums.crc32s, sums.sizes, strict=True):
            if entry is not None:
                before = crc32s[entry]
                crc32s[entry] = crc.combine(before, crc32, nbytes) if before else crc32
        if sums.nonfinite is None:
            self._nonfinite = None
        elif self._nonfinite is not None:
            for entry, count in sums.nonfinite.items():
                self._nonfinite[entry] = self._nonfinite.get(entry, 0) + count
        if sums.crc32 != self._manifest.chunk_crc32s[chunk]:
            self._bad_chunks.append((chunk, sums.crc32))

    def nonfinite(self) -> NonfiniteRecord | None:
        """Numbers that are not finite; None if a read has split a number."""
        return None if self._nonfinite is None else nonfinite_record(self._manifest, self._nonfinite)

    def damage(self) -> list[Damage]:
        """Return chunks first, for the place; then entries, for the meaning; the image only if neither differs."""
        manifest = self._manifest
        bad_entries = {
            index for index, entry in enumerate(manifest.entries) if self._entry_crc32s[index] != entry.crc32
        }
        if not bad_entries and not self._bad_chunks and self._image_crc32 == manifest.image_crc32:
            return []
        found: list[Damage] = []
        tensor_index = _TensorIndex(manifest)
        for chunk, got in self._bad_chunks:
            offset, nbytes = chunk * manifest.chunk_bytes, bytes_of_chunk(manifest, chunk)
            tensors = tensor_index.between(offset, offset + nbytes, only=bad_entries)
            found.append(
                _crc_damage(f"chunk {chunk}", offset, nbytes, manifest.chunk_crc32s[chunk], got, tensors)
            )
        for index in sorted(bad_entries):
            entry = manifest.entries[index]
            offset, end = self._narrow(entry)
            tensors = tensor_index.of(index)
            what, got = f"entry {entry.name}", self._entry_crc32s[index]
            found.append(_crc_damage(what, offset, end - offset, entry.crc32, got, tensors))
        if not found and self._image_crc32 != manifest.image_crc32:
            found.append(
                _crc_damage("image", 0, manifest.image_bytes, manifest.image_crc32, self._image_crc32, ())
            )
        return found

    def _narrow(self, entry: EntryRecord) -> tuple[int, int]:
        """Return first byte and end of the part of a damaged entry in damaged chunks; all of it without any."""
        chunk_bytes, begin, end = self._manifest.chunk_bytes, entry.offset, entry.offset + entry.nbytes
        first = bisect.bisect_left(self._bad_chunks, (begin // chunk_bytes, 0))
        last = bisect.bisect_left(self._bad_chunks, (-(-end // chunk_bytes), 0)) - 1
        if last < first:
            return begin, end
        return (
            max(begin, self._bad_chunks[first][0] * chunk_bytes),
            min(end, (self._bad_chunks[last][0] + 1) * chunk_bytes),
        )


def _crc_damage(
    what: str, offset: int, nbytes: int, expected: int, got: int, tensors: tuple[str, ...]
) -> Damage:
    return Damage(what, offset, nbytes, f"CRC-32 {expected:08x}", f"{got:08x}", tensors)


class _TensorIndex:
    """Paths of tensors by the place of their bytes. Indexed, because a file of zeros has a fault in every entry."""

    def __init__(self, manifest: Manifest) -> None:
        self._filled = [(index, entry) for index, entry in enumerate(manifest.entries) if entry.nbytes]
        self._ends = [entry.offset + entry.nbytes for _, entry in self._filled]
        self._paths: dict[int, list[str]] = {}
        for tensor in manifest.tensors:
            self._paths.setdefault(tensor.entry, []).append(tensor.path)

    def of(self, entry: int) -> tuple[str, ...]:
        """Return the tensors of one entry, by its index."""
        return tuple(self._paths.get(entry, ()))

    def between(self, begin: int, end: int, *, only: set[int] | None = None) -> tuple[str, ...]:
        """Return the tensors with bytes in `begin..end`, in entries of `only` if given."""
        paths: list[str] = []
        for position in range(bisect.bisect_right(self._ends, begin), len(self._filled)):
            index, entry = self._filled[position]
            if entry.offset >= end:
                break
            if only is None or index in only:
                paths += self._paths.get(index, ())
        return tuple(paths)


def _directory_damage(store: Store, manifest: Manifest) -> list[Damage]:
    """Check that the zip's central directory states the CRC and size of each entry; return the differences."""
    plain = plain_directory(store, manifest.file, manifest.image_bytes)
    if plain is not None:
        for entry in manifest.entries:
            if not entry.name.isascii():
                break
            if plain.get(entry.name.encode()) != (entry.crc32, entry.nbytes, zipfile.ZIP_STORED):
                break
        else:
            return []
    try:
        with zipfile.ZipFile(RangedFile(store, manifest.file, manifest.image_bytes)) as archive:
            infos = {info.filename: info for info in archive.infolist()}
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        return [Damage("directory", 0, manifest.image_bytes, "a zip file", str(error))]
    found: list[Damage] = []
    tensor_index: _TensorIndex | None = None
    for index, entry in enumerate(manifest.entries):
        info, wanted = infos.get(entry.name), (entry.crc32, entry.nbytes, zipfile.ZIP_STORED)
        if info is None:
            got = "no such entry"
        elif (info.CRC, info.file_size, info.compress_type) != wanted:
            got = f"{info.file_size} bytes with {info.CRC:08x}, compression {info.compress_type}"
        else:
            continue
        expected = f"{entry.nbytes} bytes with CRC-32 {entry.crc32:08x}"
        tensor_index = tensor_index or _TensorIndex(manifest)
        what, tensors = f"directory of {entry.name}", tensor_index.of(index)
        found.append(Damage(what, entry.offset, entry.nbytes, expected, got, tensors))
    return found
