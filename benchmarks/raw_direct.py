"""What the disk can do: the bytes of one image written with O_DIRECT from touched memory, then synced.

The file is preallocated, and written in pieces of one chunk by one or two threads; the caller takes the
better.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

__all__ = ["DirectWriter"]

_ALIGNMENT_BYTES = 4096
_SOURCE_BYTES_MAX = 512 * 1024 * 1024


class DirectWriter:
    """Writes an image's bytes again and again from one buffer.

    Args:
        folder: Where the file is written; not a tmpfs.
        nbytes: Size of the image.
        chunk_bytes: Size of one write; a multiple of 4096.
    """

    def __init__(self, folder: Path, nbytes: int, chunk_bytes: int) -> None:
        self._path = folder / "direct.bin"
        self._nbytes, self._chunk_bytes = nbytes, chunk_bytes
        self._slots = max(1, min(_SOURCE_BYTES_MAX, nbytes) // chunk_bytes)
        self._memory = mmap.mmap(-1, self._slots * chunk_bytes)
        tile = os.urandom(chunk_bytes)
        for slot in range(self._slots):
            self._memory[slot * chunk_bytes : (slot + 1) * chunk_bytes] = tile

    def write(self, threads: int) -> float:
        """Write, sync and remove the file.

        Returns:
            Seconds from open to the return of fsync.
        """
        pages = -(-self._nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        chunks = -(-self._nbytes // self._chunk_bytes)
        view = memoryview(self._memory)
        begin = time.monotonic()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, pages)

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
            os.ftruncate(fd, self._nbytes)
            os.fsync(fd)
            return time.monotonic() - begin
        finally:
            os.close(fd)
            view.release()
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._memory.close()
