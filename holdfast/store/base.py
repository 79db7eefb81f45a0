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
        """Token with which `Store.resume` continues this upload in another process, beside the arguments of `begin`.

        None where the backend cannot. It does not change while the upload lives.
        """
        ...

    @property
    def published(self) -> bool:
        """The file is in place, whole and ours: `publish` has nothing left to do."""
        ...

    def written(self) -> frozenset[int]:
        """Parts that the store has, as far as the backend can tell; all of them once published.

        In the process that wrote them: those whose `write_part` returned. After `Store.resume`: what the server lists
        with the right size; a file knows nothing of parts, so POSIX gives all that are not known to be missing, and
        the caller's own record of what it wrote is the truth.
        """
        ...

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        """Write part `index` (from 0), whose bytes are `buffers` back to back and whose CRC-32 is `crc32`.

        Page-aligned buffers of whole pages (but for the last of the last part) go past the page cache where the
        backend can do that; others are written as well. Any order, any thread, the same part again replaces it.
        """
        ...

    def publish(self) -> None:
        """Make the file visible under its name, all at once.

        Where another file stands, a backend that can refuse does (POSIX); others replace it. Names are unique to an
        attempt, so it is a stranger's.

        When this returns it is durable and read back: its size and write-id are what was meant, however many answers
        were lost on the way. May be called again after a retriable error.
        """
        ...

    def hand_over(self) -> None:
        """Make durable what this process wrote, take no further parts, and let go of the upload, which stays: another
        one that resumes it will publish it. May be called again.
        """
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
        """How much to ask for in one `read_into` of a long read: a multiple of the page size.

        Where each request has its price, more; where it has none, so little that the bytes are still in the processor's
        cache when the reader looks at them.
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
        """The whole of a small object. Raises `StoreMissing`, and `DamageError` if it is larger than `bytes_max`: it
        may come from anybody, so no memory is allocated for it.
        """
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises `DamageError` when the object ends before the buffer is full.

        Into page-aligned memory, from a multiple of the page size on, it is read past the page cache where the backend
        can do that; other reads are right as well.
        """
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

    def retire(self, name: str) -> None:
        """As `delete`, of a big object: a backend may keep its room for the next `begin`, until `close`."""
        ...

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> Upload:
        """Start an upload of `nbytes` that `publish` will make visible as `name`. Raises `StoreError`: not retriable
        when there is no room (needed and free bytes in the message) or no permission.
        """
        ...

    def resume(self, name: str, begun: BegunUpload) -> Upload:
        """Go on with an upload that a dead process began with `begin`, under the same name.

        Only the run's single writer may call this. Parts that the dead process was still sending may or may not count.
        Raises `StoreMissing`: nothing of the upload is left (swept, aborted), or the token belongs to another one;
        `begin_anew`; `StoreError`: not retriable: the backend cannot resume.
        """
        ...

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        """Remove what unfinished uploads left (temporary files, open multipart uploads).

        Except those that `keep` names, by their write-id: of these everything stays that `resume` needs. Only the run's
        single writer may call this. Returns what was removed, in words.
        """
        ...


def refuse_large(what: str, nbytes: int, bytes_max: int) -> None:
    """Refuse an object that is to be read whole, by the size that its store tells. Raises `DamageError`: it is above
    `bytes_max`.
    """
    if nbytes > bytes_max:
        raise DamageError(
            f"{what}: {nbytes} bytes, expected at most {bytes_max}; not read, since holdfast writes no such file: "
            "find out who did, and move it away"
        )
