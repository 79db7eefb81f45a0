"""Interface of a store, which every backend implements and the conformance suite checks.

A store is one run's prefix (`/mnt/nfs/run`, `s3://bucket/run`, any fsspec URL). Names are relative to it,
`/`-separated and never lead out of it. Big files go through an `Upload`: parts in any order from several threads,
invisible until `publish`. Small files are written whole: completely or not at all.

    begin ─► Upload ─► token, kept by the caller ─┬─► write_part ... ─► publish
                                       (process dies)
                                                  └─► resume(token) in the next process ─► Upload, with the parts so far

A missing object raises `StoreMissing`, any other failure `StoreError` (with `retriable` and `begin_anew`), never a
backend's own type. Backends do not retry: `holdfast.store.retrying` wraps them.
"""

from __future__ import annotations

import builtins  # `list` is a method of the classes below
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from holdfast.errors import DamageError
from holdfast.store.names import Keep

SMALL_BYTES_MAX = 1 << 28
"""Limit for objects that are read whole; manifests and layouts of over a million tensors are smaller."""


class ObjectInfo(NamedTuple):
    """One object of the run."""

    name: str
    nbytes: int


class Upload(Protocol):
    """Upload of one big file. `write_part` is thread-safe."""

    @property
    def part_bytes(self) -> int:
        """Size of every part but the last: a multiple of the `chunk_bytes` given to `Store.begin`."""

    @property
    def token(self) -> str | None:
        """Token with which `Store.resume` continues this upload in another process; None: it cannot."""

    @property
    def published(self) -> bool:
        """Whether the file is in place, whole and ours, so that `publish` has nothing left to do."""

    def written(self) -> frozenset[int]:
        """Return the parts that the store has; all once published. After `Store.resume`, S3 returns those that the
        server lists. A file does not record its parts, so POSIX returns all, and the caller's own record decides.
        """

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        """Write part `index` (from 0), whose bytes are `buffers` back to back, with CRC-32 `crc32`. Any order, any
        thread; a repeated part replaces the first. Page-aligned buffers of whole pages bypass the page cache if
        possible.
        """

    def publish(self) -> None:
        """Make the file visible under its name, atomically, durable and checked, even if answers were lost. May be
        called again after a retriable error. If another file has the name, POSIX refuses: names are unique to an
        attempt, so that file is a stranger's.
        """

    def hand_over(self) -> None:
        """Make the written parts durable and release the upload for another process to resume. May be repeated."""

    def abort(self) -> None:
        """Remove everything that was written. May be called twice; never raises `StoreMissing`."""


class InterruptedUpload(NamedTuple):
    """An upload that a dead process began, as far as it is known."""

    nbytes: int
    part_bytes: int  # the upload's `part_bytes`
    write_id: str
    token: str
    # CRC-32 of parts as the caller recorded them; a part that the store has with another one does not count as written
    crc32s: Mapping[int, int] = MappingProxyType({})


class Store(Protocol):
    """One run's place in persistent storage. Thread-safe."""

    @property
    def url(self) -> str:
        """The URL as people write it, without secrets."""

    @property
    def request_bytes(self) -> int:
        """How many bytes to request per `read_into` of a long read, a multiple of the page size: many where each
        request has a price, else so few that they stay in the processor's cache.
        """

    def close(self) -> None:
        """Release what the store holds open; it must not be used afterwards."""

    def check(self, *, write: bool) -> None:
        """Check that the store answers, and with `write` that it accepts, returns and deletes a small object. Raises a
        `StoreError` with URL, cause and remedy; not retriable for missing bucket, credentials, permission.
        """

    def list(self) -> list[ObjectInfo]:
        """Return all visible objects of the run, sorted by name, recursively; no temporary ones; [] for a new run."""

    def size(self, name: str) -> int:
        """Return the size in bytes. Raises `StoreMissing`."""

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """Read a small object whole. Raises `StoreMissing`, and `DamageError` before reading one above `bytes_max`."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, past the page cache if aligned. Raises `DamageError` if it ends before."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small object whole and durably, replacing an existing one."""

    def create(self, name: str, data: bytes) -> bool:
        """Like `write`, but only if the name is free; return False if it is not. `data` must be unique to the caller
        (hold a write-id): if an answer is lost, the object that is there decides.
        """

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is ignored."""

    def retire(self, name: str) -> None:
        """Like `delete`, for a big object: until `close` a backend may keep its blocks for the next `begin`."""

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> Upload:
        """Start an upload of `nbytes` that `publish` will make visible as `name`. Raises a `StoreError` that is not
        retriable when there is no room (needed and free bytes in the message) or no permission.
        """

    def resume(self, name: str, interrupted: InterruptedUpload) -> Upload:
        """Resume a dead process's upload under the same name; only for the run's single writer. Parts that were in
        flight may or may not count. Raises `StoreMissing` with `begin_anew` if nothing is left or the token is another
        upload's, and a `StoreError` that is not retriable if the backend cannot resume.
        """

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        """Remove leftovers of unfinished uploads, and return descriptions of them. Uploads whose write-id is in `keep`
        stay resumable. Only for the run's single writer.
        """


def reject_oversized(what: str, nbytes: int, bytes_max: int) -> None:
    """Raise `DamageError` if an object is larger than `bytes_max`, before it is read whole."""
    if nbytes > bytes_max:
        raise DamageError(
            f"{what}: {nbytes} bytes, expected at most {bytes_max}; not read, since holdfast writes no such file: "
            "find out who did, and move it away"
        )
