"""What a store must do, and no more: the interface that every backend keeps and the conformance suite checks.

A store is one run's prefix (`/mnt/nfs/run`, `s3://bucket/run`, any fsspec URL). Names are relative to it,
`/`-separated and never lead out of it. Big files go through an `Upload`: parts in any order from several threads,
invisible until `publish`. Small ones are written whole: they are there completely or not at all.

Errors: `StoreMissing` for what is not there, `StoreError` (with `retriable`) for all else; never a backend's own
    type.
Backends do not retry: `holdfast.storage.retrying` wraps any of them.
"""

from __future__ import annotations

import builtins  # `list` is a method of the classes below
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

__all__ = ["ObjectInfo", "Store", "Upload"]


class ObjectInfo(NamedTuple):
    """One object of the run."""

    name: str
    nbytes: int


class Upload(Protocol):
    """One big file on its way in. Thread-safe for `write_part`."""

    @property
    def part_bytes(self) -> int:
        """Size of every part but the last: a multiple of the `chunk_bytes` given to `Store.begin`."""
        ...

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        """Write part `index` (from 0), whose bytes are `buffers` back to back and whose CRC-32 is `crc32`.

        Page-aligned buffers of whole pages (but for the last of the last part) go past the page cache where the
        backend can do that; others are written as well. Any order, any thread, the same part again replaces it.
        """
        ...

    def publish(self) -> None:
        """Make the file visible under its name, all at once.

        When this returns it is durable and read back: its size and write-id are what was meant, however many answers
        were lost on the way. May be called again after a retriable error.
        """
        ...

    def abort(self) -> None:
        """Take back everything that was written. Nothing stays; may be called twice, never raises `StoreMissing`."""
        ...


class Store(Protocol):
    """One run's place in persistent storage. All methods may be called from any thread."""

    @property
    def url(self) -> str:
        """The URL as people write it, without secrets."""
        ...

    def check(self, *, write: bool) -> None:
        """See that the store answers, and with `write` that it takes, returns and deletes a small object.

        Raises:
            StoreError: naming URL, cause and what to do; not retriable for missing bucket, credentials, permission.
        """
        ...

    def list(self) -> list[ObjectInfo]:
        """All visible objects of the run, sorted by name, recursively; without temporary files. [] for a new run."""
        ...

    def size(self, name: str) -> int:
        """Size in bytes. Raises `StoreMissing`."""
        ...

    def read(self, name: str) -> bytes:
        """The whole of a small object. Raises `StoreMissing`."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises `DamageError` when the object ends before the buffer is full."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a small object whole and durably, replacing what was there."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """As `write`, but only if nothing is there; False if something is. Exclusive as far as the backend can.

        `data` must be the caller's own (hold a write-id): where answers get lost, what stands there decides whose it
        is.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        ...

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> Upload:
        """Start an upload of `nbytes` that `publish` will make visible as `name`.

        Raises:
            StoreError: not retriable when there is no room (needed and free bytes in the message) or no permission.
        """
        ...

    def sweep(self, keep: Collection[str] = ()) -> builtins.list[str]:
        """Remove what unfinished uploads left (temporary files, open multipart uploads).

        Except those whose write-id is in `keep`. Only the run's single writer may call this. Returns what was
        removed, in words.
        """
        ...
