"""A store in memory whose calls can be made to fail."""

from __future__ import annotations

import builtins
import threading
import zlib
from collections.abc import Callable, Sequence

from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.store.base import SMALL_BYTES_MAX, InterruptedUpload, ObjectInfo, reject_oversized
from holdfast.store.names import Keep, is_kept


class MemoryStore:
    """Keeps objects in a dict.

    Attributes:
        objects: Name → bytes, all that is visible.
        open_uploads: Names of uploads that were neither published nor aborted.
        uploads: Token → the parts that an open upload has written, for `resume`.
        owners: Name → write-id of the upload that was published there.
        resumable: Whether uploads have a token.
        before: Called before each operation with its name, such as `write_part`, and the object's name; may raise.
        part_chunks: Size of the parts of uploads.
    """

    url = "memory://store/run"

    def __init__(self, *, part_chunks: int = 1) -> None:
        self.objects: dict[str, bytes] = {}
        self.open_uploads: list[str] = []
        self.before: Callable[[str, str], None] = lambda act, name: None
        self.part_chunks = part_chunks
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.owners: dict[str, str] = {}
        self.resumable = True
        self.begun = 0
        self.upload_names: dict[str, str] = {}
        self.lock = threading.Lock()

    @property
    def request_bytes(self) -> int:
        return 16 << 20

    def close(self) -> None: ...

    def check(self, *, write: bool) -> None:
        self.before("check", "")

    def list(self) -> list[ObjectInfo]:
        with self.lock:
            return [ObjectInfo(name, len(data)) for name, data in sorted(self.objects.items())]

    def size(self, name: str) -> int:
        return len(self._get(name))

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        data = self._get(name)
        reject_oversized(f"{self.url}/{name}", len(data), bytes_max)
        return data

    def _get(self, name: str) -> bytes:
        with self.lock:
            if name not in self.objects:
                raise StoreMissing(f"{self.url}/{name}: not there")
            return self.objects[name]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self.before("read_into", name)
        data = self._get(name)[offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise DamageError(f"{self.url}/{name}: ends early")
        buffer[:] = data

    def write(self, name: str, data: bytes) -> None:
        self.before("write", name)
        with self.lock:
            self.objects[name] = data

    def create(self, name: str, data: bytes) -> bool:
        self.before("create", name)
        with self.lock:
            return self.objects.setdefault(name, data) is data

    def delete(self, name: str) -> None:
        self.before("delete", name)
        with self.lock:
            self.objects.pop(name, None)

    def retire(self, name: str) -> None:
        """As `delete`."""
        self.delete(name)

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> MemoryUpload:
        self.before("begin", name)
        with self.lock:
            self.open_uploads.append(name)
            self.begun += 1
            key = f"{write_id}/{self.begun}"
            self.uploads[key], self.upload_names[key] = {}, name
        return MemoryUpload(self, name, nbytes, chunk_bytes * self.part_chunks, write_id, key)

    def resume(self, name: str, interrupted: InterruptedUpload) -> MemoryUpload:
        self.before("resume", name)
        nbytes, part_bytes, write_id, token, crc32s = interrupted
        with self.lock:
            published = self.owners.get(name) == write_id and len(self.objects.get(name, b"")) == nbytes
            parts = self.uploads.get(token)
            if not published and (parts is None or not token.startswith(f"{write_id}/")):
                raise StoreMissing(f"{self.url}/{name}: no upload {token!r}", begin_anew=True)
            for index, crc in crc32s.items():
                if parts and index in parts and zlib.crc32(parts[index]) != crc:
                    del parts[index]
        return MemoryUpload(self, name, nbytes, part_bytes, write_id, token, published=published)

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        with self.lock:
            swept = [key for key in self.uploads if not is_kept(f"{key.partition('/')[0]}-", keep)]
            for key in swept:
                del self.uploads[key]
                self.open_uploads.remove(self.upload_names.pop(key))
        return [f"upload {key}" for key in swept]


class MemoryUpload:
    """One upload into a `MemoryStore`."""

    def __init__(
        self,
        store: MemoryStore,
        name: str,
        nbytes: int,
        part_bytes: int,
        write_id: str,
        key: str,
        *,
        published: bool = False,
    ) -> None:
        self._store, self._name, self._nbytes = store, name, nbytes
        self.part_bytes = part_bytes
        self._write_id, self._key = write_id, key
        self.published = published

    @property
    def token(self) -> str | None:
        return self._key if self._store.resumable else None

    def written(self) -> frozenset[int]:
        if self.published:
            return frozenset(range(-(-self._nbytes // self.part_bytes)))
        with self._store.lock:
            return frozenset(self._store.uploads.get(self._key, {}))

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        self._store.before("write_part", self._name)
        data = b"".join(bytes(buffer) for buffer in buffers)
        assert zlib.crc32(data) == crc32
        with self._store.lock:
            self._parts()[index] = data

    def publish(self) -> None:
        if self.published:
            return
        self._store.before("publish", self._name)
        with self._store.lock:
            parts = self._parts()
            data = b"".join(parts[index] for index in range(len(parts)))
            assert len(data) == self._nbytes
            self._store.objects[self._name] = data
            self._store.owners[self._name] = self._write_id
            self._end()
        self.published = True

    def hand_over(self) -> None:
        self._store.before("hand_over", self._name)

    def abort(self) -> None:
        if not self.published:
            with self._store.lock:
                self._end()

    def _parts(self) -> dict[int, bytes]:
        parts = self._store.uploads.get(self._key)
        if parts is None:
            raise StoreError(f"{self._store.url}/{self._name}: the upload was swept", begin_anew=True)
        return parts

    def _end(self) -> None:
        if self._store.uploads.pop(self._key, None) is not None:
            self._store.open_uploads.remove(self._name)
