"""A run in a directory: local disk, NFS, EFS, Lustre.

A big file gets its name by a link (posix_upload.py). That, and each write, creation and removal of a small file, is
relative to its directory, opened without following a link. Parts bypass the page cache where file system and buffers
allow (aligned addresses, offsets and sizes), which is several times faster and leaves the cache to the training.
"""

from __future__ import annotations

import builtins
import os
import secrets
import stat
from contextlib import AbstractContextManager
from pathlib import Path

from holdfast.errors import DamageError, StoreError
from holdfast.store.base import SMALL_BYTES_MAX, InterruptedUpload, ObjectInfo, reject_oversized
from holdfast.store.names import TEMPORARY, Keep, check_name, is_kept, temporary_name
from holdfast.store.posix_errors import is_full, translate_errors
from holdfast.store.posix_io import (
    make_directories,
    open_directory,
    open_regular,
    read_fully,
    reject_symlinks,
    sync_directory,
    write_all,
)
from holdfast.store.posix_upload import PosixUpload
from holdfast.store.spare_room import SpareFile

_REQUEST_BYTES = 4 << 20


class PosixStore:
    """A directory as a store. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))  # noqa: PTH100  (Path.absolute keeps "..")
        self._spare_file = SpareFile(self._root)

    def close(self) -> None:
        """Remove the file that was kept for its blocks."""
        with translate_errors("clear", self._root):
            self._spare_file.drop()

    @property
    def url(self) -> str:
        return str(self._root)

    @property
    def request_bytes(self) -> int:
        """4 MiB: a few of them in flight are enough for a disk."""
        return _REQUEST_BYTES

    def check(self, *, write: bool) -> None:
        """Check that the directory can be read, and with `write` be made and written. A missing one is a new run."""
        with translate_errors("read", self._root):
            place = next(place for place in (self._root, *self._root.parents) if place.exists())
            os.listdir(place)  # noqa: PTH208  (only to see that it answers)
        if not write:
            return
        name, data = f"check-{secrets.token_hex(8)}", b"holdfast check\n"
        with translate_errors("write in", self._root, needed_bytes=len(data)):
            temporary = self._write_temporary(name, data)
            try:
                back = temporary.read_bytes()
            finally:
                temporary.unlink()
        if back != data:
            raise DamageError(
                f"{temporary}: the disk returned other bytes than were written; repair it before you train on it"
            )

    def list(self) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []

        def stop(error: OSError) -> None:
            raise error

        with translate_errors("list", self._root):
            if not self._root.exists():
                return []
            if not self._root.is_dir():
                raise NotADirectoryError(20, "Not a directory", str(self._root))
            for directory, below, files in os.walk(self._root, onerror=stop):
                inside = Path(directory).relative_to(self._root)
                if (inside / "_").as_posix().startswith(TEMPORARY):
                    below.clear()
                    continue
                for file in files:
                    try:
                        status = (Path(directory) / file).lstat()
                    except FileNotFoundError:
                        continue  # deleted while we looked
                    if stat.S_ISREG(status.st_mode):
                        found.append(ObjectInfo((inside / file).as_posix(), status.st_size))
        return sorted(found)

    def size(self, name: str) -> int:
        path = self._path(name)
        with translate_errors("read", path):
            status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(
                f"{path}: is no regular file; links below a run are not followed, put the file itself there"
            )
        return status.st_size

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        path = self._path(name)
        with (
            translate_errors("read", path),
            open(self._open_revalidated(path), "rb") as file,  # noqa: PTH123 (a descriptor)
        ):
            nbytes = os.fstat(file.fileno()).st_size
            reject_oversized(str(path), nbytes, bytes_max)
            data = file.read(nbytes + 1)
            if len(data) > nbytes:  # it has grown meanwhile
                data += file.read(bytes_max + 1)
        reject_oversized(str(path), len(data), bytes_max)
        return data

    def _open_revalidated(self, path: Path) -> int:
        try:
            return open_regular(path, 0)
        except FileNotFoundError:
            # An NFS client remembers for up to a minute that a name was missing; opening its directory asks the
            # server. Flushers of several stagers poll for files that another machine writes.
            with self._open_parent(path):
                return open_regular(path, 0)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`; page-aligned reads bypass the page cache."""
        path, view = self._path(name), buffer.cast("B")
        with translate_errors("read", path):
            if read_fully(path, offset, view) < view.nbytes:
                raise DamageError(
                    f"{path}: expected bytes {offset} to {offset + view.nbytes}, but the file ends at byte "
                    f"{path.stat().st_size}; it is truncated, take another checkpoint"
                )

    def write(self, name: str, data: bytes) -> None:
        """Write a small file: temporary name, fsync, rename, fsync of the directory."""
        path = self._path(name)
        temporary = self._prepare(path, name, data)
        with (
            translate_errors("write", path, needed_bytes=len(data), if_missing="swept"),
            self._open_parent(temporary) as temporary_fd,
            self._open_parent(path) as directory_fd,
        ):
            inode = os.stat(temporary.name, dir_fd=temporary_fd, follow_symlinks=False).st_ino
            try:
                os.rename(temporary.name, path.name, src_dir_fd=temporary_fd, dst_dir_fd=directory_fd)
            except FileNotFoundError:
                # NFS may lose the answer of a rename that was done.
                if os.stat(path.name, dir_fd=directory_fd, follow_symlinks=False).st_ino != inode:
                    raise
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            sync_directory(directory_fd)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file only if the name is free: a hard link to the finished temporary file, which is atomic."""
        path = self._path(name)
        temporary = self._prepare(path, name, data)
        with (
            translate_errors("create", path, needed_bytes=len(data), if_missing="swept"),
            self._open_parent(temporary) as temporary_fd,
            self._open_parent(path) as directory_fd,
        ):
            try:
                os.link(
                    temporary.name,
                    path.name,
                    src_dir_fd=temporary_fd,
                    dst_dir_fd=directory_fd,
                    follow_symlinks=False,
                )
                created = True
            except FileExistsError:
                # NFS may lose the answer of a link that was made: then the file has two names by now, and one
                # is ours.
                created = temporary.stat().st_nlink == 2
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(directory_fd)
        return created

    def delete(self, name: str) -> None:
        path = self._path(name)
        with translate_errors("delete", path):
            try:
                with self._open_parent(path) as directory_fd:
                    os.unlink(path.name, dir_fd=directory_fd)
                    sync_directory(directory_fd)
            except (FileNotFoundError, NotADirectoryError):
                return

    def retire(self, name: str) -> None:
        """Remove a file, durably; the next upload may reuse its blocks."""
        path = self._path(name)
        with translate_errors("delete", path):
            reject_symlinks(self._root, self._root / TEMPORARY)
            kept = self._spare_file.keep(path)
        if not kept:
            self.delete(name)

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> PosixUpload:
        """Start a big file; its space is reserved before the first byte is sent."""
        return PosixUpload(
            root=self._root,
            path=self._path(name),
            temporary=self._temporary_path(write_id, name),
            nbytes=nbytes,
            part_bytes=chunk_bytes,
            spare_file=self._spare_file,
        )

    def resume(self, name: str, interrupted: InterruptedUpload) -> PosixUpload:
        """Resume a file; only the caller's own record knows which of its parts were written."""
        return PosixUpload(
            root=self._root,
            path=self._path(name),
            temporary=self._temporary_path(interrupted.write_id, name),
            nbytes=interrupted.nbytes,
            part_bytes=interrupted.part_bytes,
            token=interrupted.token,
        )

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        removed = []
        directory = self._root / TEMPORARY
        with translate_errors("sweep", directory):
            reject_symlinks(self._root, directory)
            try:
                entries = sorted(directory.iterdir())
            except FileNotFoundError:
                return []
            for entry in entries:
                if is_kept(f"{TEMPORARY}{entry.name}", keep):
                    continue
                try:
                    size_bytes = entry.lstat().st_size
                    entry.unlink()
                except FileNotFoundError:
                    continue
                removed.append(f"temporary file {entry} ({size_bytes} bytes)")
            sync_directory(directory)
        return removed

    def _open_parent(self, path: Path) -> AbstractContextManager[int]:
        return open_directory(self._root, path.parent)

    def _path(self, name: str) -> Path:
        return self._resolve(check_name(name))

    def _temporary_path(self, write_id: str, name: str) -> Path:
        return self._resolve(temporary_name(write_id, name))

    def _resolve(self, name: str) -> Path:
        path = self._root / name
        with translate_errors("reach", path):
            reject_symlinks(self._root, path.parent)
        return path

    def _prepare(self, path: Path, name: str, data: bytes) -> Path:
        """Write the temporary file of a small file, and make its final directory."""
        with translate_errors("write", path, needed_bytes=len(data)):
            make_directories(path.parent)
            try:
                return self._write_temporary(name, data)
            except OSError as error:
                if not is_full(error) or not self._spare_file.drop():
                    raise
                return self._write_temporary(name, data)

    def _write_temporary(self, name: str, data: bytes) -> Path:
        temporary = self._temporary_path(f"small.{secrets.token_hex(8)}", name)
        make_directories(temporary.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, memoryview(data), 0)
            os.fsync(descriptor)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return temporary
