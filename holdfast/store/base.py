"""The interface of a store, which every backend keeps and the conformance suite checks.

A store is one run's prefix (`/mnt/nfs/run`, `s3://bucket/run`, any fsspec URL). Names are relative to it,
`/`-separated and never lead out of it. Big files go through an `Upload`: parts in any order from several threads,
invisible until `publish`. Small ones are written whole: they are there completely or not at all.

    begin ─► Upload ─► token, kept by the caller ─┬─► write_part ... ─► publish
                                       (process dies)
                                                  └─► resume(token) in the next process ─► Upload, with the parts so far


Errors: `StoreMissing` for what is not there, `StoreError` (with `retriable` and `begin_anew`) for all else; never a
    backend's own type.
Backends do not retry: `holdfast.store.retrying` wraps any of them.
"""

from __future__ import annotations

import builtins  # `list` is a method of the classes below
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from holdfast.errors import DamageError
from holdfast.store.names import Keep

SMALL_BYTES_MAX = 1 << 28
"""No object that is read whole is larger: manifests and layouts of over a million tensors are not."""


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

    @property
    def token(self) -> str | None:
        """Token with which `Store.resume` continues this upload in another process; None where it cannot."""
        ...

    @property
    def published(self) -> bool:
        """The file is in place, whole and ours: `publish` has nothing left to do."""
        ...

    def written(self) -> frozenset[int]:
        """Parts that the store has; all once published. After `Store.resume`: those that the server lists; a file knows
        nothing of parts, so POSIX gives all not known to be missing, and the caller's own record is the truth.
        """
        ...

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        """Write part `index` (from 0), whose bytes are `buffers` back to back, with CRC-32 `crc32`. Any order, any
        thread; the same part again replaces it. Page-aligned buffers of whole pages go past the page cache if possible.
        """
        ...

    def publish(self) -> None:
        """Make the file visible under its name, all at once, durable and read back, however many answers were lost. May
        be called again after a retriable error. Where another file stands, a backend that can refuse does (POSIX);
        names are unique to an attempt, so it is a stranger's.
        """
        ...

    def hand_over(self) -> None:
        """Make what was written durable, and let go: a process that resumes it will publish. May be called again."""
        ...

    def abort(self) -> None:
        """Take back everything that was written. Nothing stays; may be called twice, never raises `StoreMissing`."""
        ...


class BegunUpload(NamedTuple):
    """An upload that a dead process began, as far as it is known."""

    nbytes: int
    part_bytes: int  # the upload's `part_bytes`
    write_id: str
    token: str
    # CRC-32 of parts as the caller recorded them; a part that the store is known to hold with another one does not
    # count as written
    crc32s: Mapping[int, int] = MappingProxyType({})


class Store(Protocol):
    """One run's place in persistent storage. All methods may be called from any thread."""

    @property
    def url(self) -> str:
        """The URL as people write it, without secrets."""
        ...

    @property
    def request_bytes(self) -> int:
        """How much to ask for in one `read_into` of a long read, a multiple of the page size: more where each request
        has its price, else so little that the bytes stay in the processor's cache.
        """
        ...

    def close(self) -> None:
        """Give back what the store holds open; it is not used afterwards."""

    def check(self, *, write: bool) -> None:
        """Check that the store answers, and with `write` that it takes, returns and deletes a small object. Raises
        `StoreError`: naming URL, cause and what to do; not retriable for missing bucket, credentials, permission.
        """
        ...

    def list(self) -> list[ObjectInfo]:
        """All visible objects of the run, sorted by name, recursively; without temporary files. [] for a new run."""
        ...

    def size(self, name: str) -> int:
        """Size in bytes. Raises `StoreMissing`."""
        ...

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """The whole of a small object. Raises `StoreMissing`; `DamageError`: above `bytes_max`, before it is read."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, past the page cache if aligned. Raises `DamageError`: the object ends before."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a small object whole and durably, replacing what was there."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """As `write`, but only if nothing is there; False if something is. `data` must be the caller's own (hold a
        write-id): where answers get lost, what stands there decides.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        ...

    def retire(self, name: str) -> None:
        """As `delete`, of a big object: a backend may keep its room for the next `begin`, until `close`."""
        ...

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> Upload:
        """Start an upload of `nbytes` that `publish` will make visible as `name`. Raises `StoreError`: not retriable
        when there is no room (needed and free bytes in the message) or no permission.
        """
        ...

    def resume(self, name: str, begun: BegunUpload) -> Upload:
        """Go on with an upload of a dead process, under the same name; only for the run's single writer. Parts that
        were still being sent may or may not count. Raises `StoreMissing`: nothing is left, or the token is another
        upload's: `begin_anew`; `StoreError`: not retriable: the backend cannot resume.
        """
        ...

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        """Remove what unfinished uploads left; returns it in words. All that `resume` needs for a write-id in `keep`
        stays. Only for the run's single writer.
        """
        ...


def refuse_large(what: str, nbytes: int, bytes_max: int) -> None:
    """Refuse an object by its size before it is read whole. Raises `DamageError`: it is above `bytes_max`."""
    if nbytes > bytes_max:
        raise DamageError(
            f"{what}: {nbytes} bytes, expected at most {bytes_max}; not read, since holdfast writes no such file: "
            "find out who did, and move it away"
        )
