"""A run in anything that fsspec reaches: memory, GCS, Azure, SFTP, HDFS. The common ground, and no more.

    begin ─► parts as objects of their own under .holdfast/tmp/ ─► publish: joined under a temporary name ─► mv ─► size

What it cannot promise, since fsspec does not: that `write` and `publish` are on disk when they return (that
is the file system's own habit: object stores do it, SFTP may not), that `mv` is one step (object stores copy
and delete), that `create` is exclusive where the file system has no exclusive mode, and a write-id on the
object (size is compared instead). Parts may come in any order and again, as the interface asks, at the price
of writing everything twice, and of one part of memory per writing thread. Runs that matter belong on POSIX or
S3.
"""

from __future__ import annotations

import builtins
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.errors import ConfigError, DamageError, StoreError, StoreMissing
from holdfast.store.base import ObjectInfo
from holdfast.store.generic_upload import GenericUpload
from holdfast.store.names import TEMPORARY, Keep, check_name, is_kept, temporary_name

_log = logging.getLogger("holdfast.storage.generic")
_REQUEST_BYTES = 16 << 20


class GenericStore:
    """An fsspec file system's folder as a store. All methods may be called from any thread.

    Args:
        url: The URL, already normalised and without secrets.

    Raises:
        ConfigError: No driver for the scheme is installed, or its settings are refused.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self._url = url
        self._check_name = f"check-{secrets.token_hex(8)}"
        scheme = url.partition("://")[0]
        try:
            opened: tuple[Any, str] = fsspec.core.url_to_fs(url)  # type: ignore[no-untyped-call]
            self._fs, self._root = opened
        except ImportError as error:
            raise ConfigError(f"{url}: the driver for {scheme!r} is not installed: {error}") from error
        except ValueError as error:
            raise ConfigError(
                f"{url}: scheme {scheme!r} is not known to fsspec or its settings are refused: {error}"
            ) from error

    @property
    def url(self) -> str:
        """The URL."""
        return self._url

    @property
    def request_bytes(self) -> int:
        """16 MiB: behind most of these is a network."""
        return _REQUEST_BYTES

    def check(self, *, write: bool) -> None:
        """See that the file system answers, and with `write` that it takes, returns and deletes a small
        object.
        """
        with self._translated("list", self._url):
            self._fs.exists(self._root)
        if not write:
            return
        # A name that a second try has too: an object whose deletion failed is written over, and deleted then.
        path = self._path(f"{TEMPORARY}{self._check_name}-{threading.get_ident()}")
        data = b"holdfast check\n"
        with self._translated("write", path):
            self._make_parent(path)
            self._fs.pipe_file(path, data)
            back = self._fs.cat_file(path)
            self._fs.rm_file(path)
        if back != data:
            raise DamageError(
                f"{self._url}: the store returned other bytes than were written; repair the store first"
            )

    def list(self) -> list[ObjectInfo]:
        """All visible objects, sorted by name."""
        return sorted(info for info in self._find("") if not info.name.startswith(TEMPORARY))

    def size(self, name: str) -> int:
        """Size of an object in bytes."""
        return self.size_of(self._path(check_name(name)))

    def read(self, name: str) -> bytes:
        """The whole of a small object."""
        return self.get(self._path(check_name(name)))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`."""
        path, view = self._path(check_name(name)), buffer.cast("B")
        with self._translated("read", path):
            data = self._fs.cat_file(path, start=offset, end=offset + view.nbytes) if view.nbytes else b""
        if len(data) != view.nbytes:
            raise DamageError(
                f"{path}: expected bytes {offset} to {offset + view.nbytes}, only {len(data)} of them are there; "
                "the object is truncated, take another checkpoint"
            )
        view[:] = data

    def write(self, name: str, data: bytes) -> None:
        """Write a small object under a temporary name, and move it."""
        path, temporary = (
            self._path(check_name(name)),
            self._path(temporary_name(f"small.{secrets.token_hex(8)}", name)),
        )
        with self._translated("write", path):
            self._make_parent(temporary)
            self._fs.pipe_file(temporary, data)
        self.move(temporary, path)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object only if none is there, as exclusively as the file system can; what is read
        back decides.

        So `data` must be the caller's own (hold its write-id).
        """
        path = self._path(check_name(name))
        with self._translated("create", path):
            if self._fs.exists(path):
                return bool(self._fs.cat_file(path) == data)
            self._make_parent(path)
            try:
                self._fs.pipe_file(path, data, mode="create")
            except (FileExistsError, NotImplementedError, ValueError) as error:
                if not isinstance(error, FileExistsError):
                    self._fs.pipe_file(path, data)  # no exclusive mode there
            return bool(self._fs.cat_file(path) == data)

    def delete(self, name: str) -> None:
        """Remove an object."""
        self.remove(self._path(check_name(name)))

    def retire(self, name: str) -> None:
        """As `delete`."""
        self.delete(name)

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> GenericUpload:
        """Start a big object."""
        temporary = self._path(temporary_name(write_id, name))
        return GenericUpload(
            self, self._path(check_name(name)), temporary, nbytes=nbytes, part_bytes=chunk_bytes
        )

    def resume(
        self,
        name: str,
        *,
        nbytes: int,
        chunk_bytes: int,  # noqa: ARG002
        part_bytes: int,
        write_id: str,
        token: str,
        crc32s: Mapping[int, int] | None = None,
    ) -> GenericUpload:
        """Go on with the parts that lie there with their right size; those in `crc32s` are read and compared."""
        temporary = self._path(temporary_name(write_id, name))
        return GenericUpload(
            self,
            self._path(check_name(name)),
            temporary,
            nbytes=nbytes,
            part_bytes=part_bytes,
            token=token,
            crc32s=crc32s,
        )

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        """Remove temporary objects."""
        removed = []
        for info in sorted(self._find(TEMPORARY)):
            if not is_kept(info.name, keep):
                self.remove(self._path(info.name))
                removed.append(f"temporary object {self._path(info.name)} ({info.nbytes} bytes)")
        return removed

    def size_of(self, path: str) -> int:
        """Size of the object at a full path."""
        with self._translated("read", path):
            self._fs.invalidate_cache()
            return int(self._fs.size(path))

    def size_or_none(self, path: str) -> int | None:
        """Size of the object at a full path, None if there is none."""
        try:
            return self.size_of(path)
        except StoreMissing:
            return None

    def get(self, path: str) -> bytes:
        """The whole of the object at a full path."""
        with self._translated("read", path):
            return bytes(self._fs.cat_file(path))

    def put(self, path: str, data: bytes) -> None:
        """Write a whole temporary object."""
        with self._translated("write", path):
            self._make_parent(path)
            self._fs.pipe_file(path, data)

    def join(self, sources: Sequence[str], target: str) -> None:
        """Write the objects `sources` one after the other as `target`."""
        with self._translated("write", target), self._fs.open(target, "wb") as file:
            for source in sources:
                file.write(self._fs.cat_file(source))

    def move(self, source: str, target: str) -> None:
        """Give a finished object its name."""
        with self._translated("publish", target):
            self._make_parent(target)
            self._fs.mv(source, target)
            self._fs.invalidate_cache()

    def remove(self, path: str) -> None:
        """Remove the object at a full path; nothing happens if it is not there."""
        with self._translated("delete", path):
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                return
            self._fs.invalidate_cache()

    def _find(self, prefix: str) -> builtins.list[ObjectInfo]:
        base = self._path(prefix.rstrip("/"))
        with self._translated("list", base):
            self._fs.invalidate_cache()
            try:
                found: dict[str, Any] = self._fs.find(base, detail=True)
            except FileNotFoundError:
                return []
        start = len(self._root.rstrip("/")) + 1
        return [
            ObjectInfo(path[start:], int(info["size"]))
            for path, info in found.items()
            if info["type"] == "file"
        ]

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _translated(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise StoreMissing(f"{self._url}: there is no {path} ({doing})") from error
        except (
            PermissionError,
            IsADirectoryError,
            NotADirectoryError,
            NotImplementedError,
            ValueError,
        ) as error:
            raise StoreError(
                f"cannot {doing} {path} in {self._url}: {error}; see the driver's settings and permissions"
            ) from error
        except Exception as error:  # drivers raise what they like; none of it may leave this package
            raise StoreError(
                f"cannot {doing} {path} in {self._url}: {type(error).__name__}: {error}",
                retriable=isinstance(error, OSError),
            ) from error
