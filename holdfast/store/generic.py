"""A run in any file system of fsspec: memory, GCS, Azure, SFTP, HDFS.

fsspec does not promise, and so neither does this store, that `write` and `publish` are on disk when they return (object
stores do it, SFTP may not), that `mv` is one step (object stores copy and delete), or that `create` is exclusive where
the file system has no exclusive mode. Objects have no write-id: the size is compared instead. Parts may arrive in any
order and again, at the cost of writing everything twice, and of one part of memory per writing thread. Runs that matter
belong on POSIX or S3.
"""

from __future__ import annotations

import builtins
import secrets
import threading

from holdfast.errors import DamageError
from holdfast.store.base import SMALL_BYTES_MAX, InterruptedUpload, ObjectInfo
from holdfast.store.generic_folder import GenericFolder
from holdfast.store.generic_upload import GenericUpload
from holdfast.store.names import TEMPORARY, Keep, check_name, is_kept, temporary_name

_REQUEST_BYTES = 16 << 20  # most of these are behind a network


class GenericStore:
    """An fsspec file system's folder as a store. Any thread. Raises `ConfigError`: no driver, or settings refused."""

    def __init__(self, url: str) -> None:
        self._folder = GenericFolder(url)
        self._check_name = f"check-{secrets.token_hex(8)}"

    @property
    def url(self) -> str:
        return self._folder.url

    @property
    def request_bytes(self) -> int:
        return _REQUEST_BYTES

    def close(self) -> None:
        """Nothing is held open."""

    def check(self, *, write: bool) -> None:
        self._folder.check()
        if not write:
            return
        # A retry uses the same name: it overwrites, and deletes, an object whose deletion failed.
        path = self._folder.path(f"{TEMPORARY}{self._check_name}-{threading.get_ident()}")
        data = b"holdfast check\n"
        self._folder.put(path, data)
        back = self._folder.get(path, SMALL_BYTES_MAX)
        self._folder.remove(path)
        if back != data:
            raise DamageError(
                f"{self.url}: the store returned other bytes than were written; repair the store first"
            )

    def list(self) -> list[ObjectInfo]:
        found = [ObjectInfo(*one) for one in self._folder.sizes("")]
        return sorted(info for info in found if not info.name.startswith(TEMPORARY))

    def size(self, name: str) -> int:
        return self._folder.size_of(self._path(name))

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        return self._folder.get(self._path(name), bytes_max)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._folder.get_into(self._path(name), offset, buffer.cast("B"))

    def write(self, name: str, data: bytes) -> None:
        """Write a small object under a temporary name, and move it."""
        path = self._path(name)
        temporary = self._temporary_path(f"small.{secrets.token_hex(8)}", name)
        self._folder.put(temporary, data)
        self._folder.move(temporary, path)

    def create(self, name: str, data: bytes) -> bool:
        return self._folder.create(self._path(name), data)

    def delete(self, name: str) -> None:
        self._folder.remove(self._path(name))

    retire = delete

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> GenericUpload:
        path, temporary = self._path(name), self._temporary_path(write_id, name)
        return GenericUpload(self._folder, path, temporary, nbytes=nbytes, part_bytes=chunk_bytes)

    def resume(self, name: str, interrupted: InterruptedUpload) -> GenericUpload:
        """Resume with the parts that are there with the right size; those in `crc32s` are read and compared."""
        return GenericUpload(
            self._folder,
            self._path(name),
            self._temporary_path(interrupted.write_id, name),
            nbytes=interrupted.nbytes,
            part_bytes=interrupted.part_bytes,
            token=interrupted.token,
            crc32s=interrupted.crc32s,
        )

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        removed = []
        for name, nbytes in sorted(self._folder.sizes(TEMPORARY)):
            if not is_kept(name, keep):
                path = self._folder.path(name)
                self._folder.remove(path)
                removed.append(f"temporary object {path} ({nbytes} bytes)")
        return removed

    def _path(self, name: str) -> str:
        return self._folder.path(check_name(name))

    def _temporary_path(self, write_id: str, name: str) -> str:
        return self._folder.path(temporary_name(write_id, name))
