"""Bare disk: writes the bytes of one image with O_DIRECT from touched memory, then syncs.

The file is preallocated, and one or two threads write it chunk by chunk; the caller takes the better.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.ring.pages import aligned_buffer

__all__ = ["DirectWriter", "direct_file", "read_direct", "whole_pages"]

_ALIGNMENT_BYTES = 4096
_SOURCE_BYTES_MAX = 512 * 1024 * 1024


@contextlib.contextmanager
def direct_file(path: Path, nbytes: int, *, truncate: bool = True) -> Iterator[int]:
    """Open a preallocated file for O_DIRECT writes in whole pages; at the end, truncate it to `nbytes` and sync.

    Args:
        truncate: Whether to empty an existing file first.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC | (os.O_TRUNC if truncate else 0)
    fd = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, whole_pages(nbytes))
        yield fd
        os.ftruncate(fd, nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def whole_pages(nbytes: int) -> int:
    """Round up to the whole pages that O_DIRECT writes."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class DirectWriter:
    """Writes an image's bytes repeatedly from one buffer.

    Args:
        folder: Where the file is written; not a tmpfs.
        chunk_bytes: Size of one write; a multiple of 4096.
    """

    def __init__(self, folder: Path, nbytes: int, chunk_bytes: int) -> None:
        self._path, self._old = folder / "direct.bin", folder / "direct-over.bin"
        self._nbytes, self._chunk_bytes = nbytes, chunk_bytes
        self._slots = max(1, min(_SOURCE_BYTES_MAX, nbytes) // chunk_bytes)
        self._memory = aligned_buffer(self._slots * chunk_bytes)
        tile = os.urandom(chunk_bytes)
        for slot in range(self._slots):
            self._memory[slot * chunk_bytes : (slot + 1) * chunk_bytes] = tile

    def write(self, threads: int, *, truncate: bool = True) -> float:
        """Write and sync a new file, then remove it; or overwrite and sync the file of the previous such call.

        Returns:
            Seconds from open to the return of fsync.
        """
        pages = whole_pages(self._nbytes)
        chunks = -(-self._nbytes // self._chunk_bytes)
        view = self._memory[:]
        begin = time.monotonic()
        try:
            with direct_file(self._path if truncate else self._old, self._nbytes, truncate=truncate) as fd:

                def some(first: int) -> None:
                    for chunk in range(first, chunks, threads):
                        offset = chunk * self._chunk_bytes
                        length = min(self._chunk_bytes, pages - offset)
                        source = (chunk % self._slots) * self._chunk_bytes
                        written = os.pwrite(fd, view[source : source + length], offset)
                        assert written == length, (written, length)

                workers = [threading.Thread(target=some, args=(first,)) for first in range(threads)]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            return time.monotonic() - begin
        finally:
            view.release()
            if truncate:
                self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Free the buffer, and remove the file if one is left."""
        self._memory.release()
        for path in (self._path, self._old):
            path.unlink(missing_ok=True)


def read_direct(path: Path, chunk_bytes: int, threads: int) -> float:
    """Read a file past the page cache into touched memory, and discard the bytes: the lower bound of a restore.

    Args:
        chunk_bytes: Size of one read; a multiple of 4096.
        threads: Number of concurrent readers.

    Returns:
        Seconds from open to the last byte.
    """
    nbytes = path.stat().st_size
    chunks = -(-nbytes // chunk_bytes)
    view = aligned_buffer(threads * chunk_bytes)
    view[:] = bytes(len(view))
    got = [0] * threads
    begin = time.monotonic()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:

        def some(first: int) -> None:
            part = view[first * chunk_bytes : (first + 1) * chunk_bytes]
            for chunk in range(first, chunks, threads):
                got[first] += os.preadv(fd, [part], chunk * chunk_bytes)

        workers = [threading.Thread(target=some, args=(first,)) for first in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.monotonic() - begin
    finally:
        os.close(fd)
        view.release()
    assert sum(got) == nbytes, (sum(got), nbytes)
    return seconds
