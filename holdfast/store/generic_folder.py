"""A folder of a file system of fsspec: one method for each call to the driver, with its errors translated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.errors import ConfigError, DamageError, StoreError, StoreMissing
from holdfast.store.base import reject_oversized


class GenericFolder:
    """A folder; methods take full paths, as from `path`. Any thread. Raises `ConfigError`: no driver, bad settings."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
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

    def path(self, name: str) -> str:
        """Return the full path of a name; "" is the folder."""
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    def check(self) -> None:
        """Check that the file system answers."""
        with self._translate_errors("list", self.url):
            self._fs.exists(self._root)

    def sizes(self, prefix: str) -> list[tuple[str, int]]:
        """Return the names of the files under a prefix, with the size of each."""
        base = self.path(prefix.rstrip("/"))
        with self._translate_errors("list", base):
            self._fs.invalidate_cache()
            try:
                found: dict[str, Any] = self._fs.find(base, detail=True)
            except FileNotFoundError:
                return []
        start = len(self._root.rstrip("/")) + 1
        return [(path[start:], int(info["size"])) for path, info in found.items() if info["type"] == "file"]

    def size_of(self, path: str) -> int:
        with self._translate_errors("read", path):
            self._fs.invalidate_cache()
            return int(self._fs.size(path))

    def size_or_none(self, path: str) -> int | None:
        try:
            return self.size_of(path)
        except StoreMissing:
            return None

    def get(self, path: str, bytes_max: int) -> bytes:
        """Read an object whole. Raises `DamageError` if it is above `bytes_max`."""
        reject_oversized(f"{path} in {self.url}", self.size_of(path), bytes_max)
        with self._translate_errors("read", path):
            return bytes(self._fs.cat_file(path))

    def put(self, path: str, data: bytes) -> None:
        with self._translate_errors("write", path):
            self._make_parent(path)
            self._fs.pipe_file(path, data)

    def join(self, sources: Sequence[str], target: str) -> None:
        """Write the objects `sources` one after the other as `target`."""
        with self._translate_errors("write", target), self._fs.open(target, "wb") as file:
            for source in sources:
                file.write(self._fs.cat_file(source))

    def move(self, source: str, target: str) -> None:
        with self._translate_errors("publish", target):
            self._make_parent(target)
            self._fs.mv(source, target)
            self._fs.invalidate_cache()

    def remove(self, path: str) -> None:
        """Remove an object; a missing one is ignored."""
        with self._translate_errors("delete", path):
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                return
            self._fs.invalidate_cache()

    def get_into(self, path: str, offset: int, view: memoryview) -> None:
        """Fill `view` with an object's bytes from `offset`."""
        with self._translate_errors("read", path):
            data = self._fs.cat_file(path, start=offset, end=offset + view.nbytes) if view.nbytes else b""
        if len(data) != view.nbytes:
            raise DamageError(
                f"{path}: expected bytes {offset} to {offset + view.nbytes}, only {len(data)} of them are there; "
                "the object is truncated, take another checkpoint"
            )
        view[:] = data

    def create(self, path: str, data: bytes) -> bool:
        """Write only if the path is free, as exclusively as the file system can; the content read back decides."""
        with self._translate_errors("create", path):
            if self._fs.exists(path):
                return self._holds(path, data)
            self._make_parent(path)
            try:
                self._fs.pipe_file(path, data, mode="create")
            except (FileExistsError, NotImplementedError, ValueError) as error:
                if not isinstance(error, FileExistsError):
                    self._fs.pipe_file(path, data)  # no exclusive mode there
            return self._holds(path, data)

    def _holds(self, path: str, data: bytes) -> bool:
        return self.size_of(path) == len(data) and self.get(path, len(data)) == data

    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _translate_errors(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise StoreMissing(f"{self.url}: there is no {path} ({operation})") from error
        except (
            PermissionError,
            IsADirectoryError,
            NotADirectoryError,
            NotImplementedError,
            ValueError,
        ) as error:
            raise StoreError(
                f"cannot {operation} {path} in {self.url}: {error}; see the driver's settings and permissions"
            ) from error
        except Exception as error:  # drivers raise anything; only our errors may leave this package
            raise StoreError(
                f"cannot {operation} {path} in {self.url}: {type(error).__name__}: {error}",
                retriable=isinstance(error, OSError),
            ) from error
