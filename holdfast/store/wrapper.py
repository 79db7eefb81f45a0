"""Base of stores that wrap another one: `forward` makes each call, and a wrapper overrides it.

open_store ─► Retrying ─► GuardedStore ─► backend          uploads are wrapped the same way
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast.store.base import SMALL_BYTES_MAX, InterruptedUpload, ObjectInfo, Store, Upload
from holdfast.store.names import Keep

Result = TypeVar("Result")


class StoreWrapper:
    """Forwards every call to the wrapped store. Same interface, same threads."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def forward(self, method: str, call: Callable[[], Result], name: str = "") -> Result:  # noqa: ARG002
        """Make `call`, the method `method` of the wrapped store or upload, about the object `name`."""
        return call()

    def wrap(self, upload: Upload) -> Upload:
        """Wrap an upload of the wrapped store."""
        return UploadWrapper(upload, self)

    @property
    def inner(self) -> Store:
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def request_bytes(self) -> int:
        return self._inner.request_bytes

    def close(self) -> None:
        self._inner.close()

    def check(self, *, write: bool) -> None:
        self.forward("check", lambda: self._inner.check(write=write))

    def list(self) -> list[ObjectInfo]:
        return self.forward("list", self._inner.list)

    def size(self, name: str) -> int:
        return self.forward("size", lambda: self._inner.size(name), name)

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        return self.forward("read", lambda: self._inner.read(name, bytes_max), name)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self.forward("read_into", lambda: self._inner.read_into(name, offset, buffer), name)

    def write(self, name: str, data: bytes) -> None:
        self.forward("write", lambda: self._inner.write(name, data), name)

    def create(self, name: str, data: bytes) -> bool:
        return self.forward("create", lambda: self._inner.create(name, data), name)

    def delete(self, name: str) -> None:
        self.forward("delete", lambda: self._inner.delete(name), name)

    def retire(self, name: str) -> None:
        self.forward("retire", lambda: self._inner.retire(name), name)

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> Upload:
        def begin() -> Upload:
            return self._inner.begin(name, nbytes=nbytes, chunk_bytes=chunk_bytes, write_id=write_id)

        return self.wrap(self.forward("begin", begin, name))

    def resume(self, name: str, interrupted: InterruptedUpload) -> Upload:
        return self.wrap(self.forward("resume", lambda: self._inner.resume(name, interrupted), name))

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        return self.forward("sweep", lambda: self._inner.sweep(keep))


class UploadWrapper:
    """Forwards every call to the wrapped upload."""

    def __init__(self, inner: Upload, store: StoreWrapper) -> None:
        self._inner, self._store = inner, store

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    @property
    def token(self) -> str | None:
        return self._inner.token

    @property
    def published(self) -> bool:
        return self._inner.published

    def written(self) -> frozenset[int]:
        return self._inner.written()

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        self._store.forward("write_part", lambda: self._inner.write_part(index, buffers, crc32))

    def publish(self) -> None:
        self._store.forward("publish", self._inner.publish)

    def hand_over(self) -> None:
        self._store.forward("hand_over", self._inner.hand_over)

    def abort(self) -> None:
        self._store.forward("abort", self._inner.abort)


class ThrottledStore(StoreWrapper):
    """Store for long reads that give way. `wait`: returns when this many bytes may be read, or raises."""

    def __init__(self, inner: Store, wait: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._wait = wait

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._wait(len(buffer))
        super().read_into(name, offset, buffer)
