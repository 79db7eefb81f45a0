"""A store in memory whose calls can be made to fail, for tests of what uses a store."""

from __future__ import annotations

import builtins
import threading
import zlib
from collections.abc import Callable, Collection, Sequence

from holdfast.errors import DamageError, StoreMissing
from holdfast.storage.base import ObjectInfo


class MemoryStore:
    """Keeps objects in a dict.

    Attributes:
        objects: Name → bytes, all that is visible.
        open_uploads: Names of uploads that were neither published nor aborted.
        before: Called before each act with its name, such as `write_part`, and the object's name; may raise.
        part_chunks: Size of the parts of uploads.
    """

    url = "memory://store/run"

    def __init__(self, *, part_chunks: int = 1) -> None:
        self.objects: dict[str, bytes] = {}
        self.open_uploads: list[str] = []
        self.before: Callable[[str, str], None] = lambda act, name: None
        self.part_chunks = part_chunks
        self.lock = threading.Lock()

    def check(self, *, write: bool) -> None:
        self.before("check", "")

    def list(self) -> list[ObjectInfo]:
        with self.lock:
            return [ObjectInfo(name, len(data)) for name, data in sorted(self.objects.items())]

    def size(self, name: str) -> int:
        return len(self.read(name))

    def read(self, name: str) -> bytes:
        with self.lock:
            if name not in self.objects:
                raise StoreMissing(f"{self.url}/{name}: not there")
            return self.objects[name]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self.before("read_into", name)
        data = self.read(name)[offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise DamageError(f"{self.url}/{name}: ends early")
        buffer[:] = data

    def write(self, name: str, data: bytes) -> None:
        self.before("write", name)
        with self.lock:
            self.objects[name] = data

    def create(self, name: str, data: bytes) -> bool:
        with self.lock:
            return self.objects.setdefault(name, data) is data

    def delete(self, name: str) -> None:
        with self.lock:
            self.objects.pop(name, None)

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> MemoryUpload:
        self.before("begin", name)
        self.open_uploads.append(name)
        return MemoryUpload(self, name, nbytes, chunk_bytes * self.part_chunks)

    def sweep(self, keep: Collection[str] = ()) -> builtins.list[str]:
        return []


class MemoryUpload:
    """One upload into a `MemoryStore`."""

    def __init__(self, store: MemoryStore, name: str, nbytes: int, part_bytes: int) -> None:
        self._store, self._name, self._nbytes = store, name, nbytes
        self.part_bytes = part_bytes
        self._parts: dict[int, bytes] = {}

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        self._store.before("write_part", self._name)
        data = b"".join(bytes(buffer) for buffer in buffers)
        assert zlib.crc32(data) == crc32
        self._parts[index] = data

    def publish(self) -> None:
        self._store.before("publish", self._name)
        data = b"".join(self._parts[index] for index in range(len(self._parts)))
        assert len(data) == self._nbytes
        with self._store.lock:
            self._store.objects[self._name] = data
        self._store.open_uploads.remove(self._name)

    def abort(self) -> None:
        if self._name in self._store.open_uploads:
            self._store.open_uploads.remove(self._name)
