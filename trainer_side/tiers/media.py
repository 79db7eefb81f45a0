"""What lies beneath a slot file: bytes written to a place, and a call after which they stay.

    Medium ─┬─ MappedFile   memory: tmpfs, mapped; what is stored there outlives the process as it is
            ├─ CachedFile   file:   pwrite through the page cache, fdatasync
            └─ DirectFile   nvme:   pwrite past it (O_DIRECT), fdatasync for the device's own cache
               PmFile       pm:     trainer_side/tiers/pm.py

Nothing that was written counts before `flush` returns: until then power may be lost with any part of it, in any order,
and with half a sector. What a slot file makes of that is in `slot_file.py`; a simulated medium under it in
`tests/simulation/device.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.store.posix_errors import translated
from holdfast.store.posix_io import is_aligned, open_direct, write_all

Copy = Callable[[int, int, int], object]  # (to address, from address, bytes), as ctypes.memmove


class Medium(Protocol):
    """A file of fixed size, all of its room reserved. Any thread."""

    @property
    def how(self) -> str:
        """Which way of writing it found and uses, in a few words."""
        ...

    @property
    def copy(self) -> Copy | None:
        """How bytes are best put into `memory`; None where there is no memory."""
        ...

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        """A part of the file that can be written to as memory; None where there is none."""
        ...

    def write(self, offset: int, view: memoryview) -> None:
        """Write there. A view that is this very part of `memory` is only made ready for `flush`.

        Raises:
            StoreError: The device refused.
        """
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """What is there now, flushed or not; shorter at the end of the file."""
        ...

    def flush(self) -> None:
        """All that was written before, by whomever, stays when power is lost.

        Raises:
            StoreError: The device refused. What of it stays is not known, and a second call does not mend that.
        """
        ...

    def close(self) -> None:
        """Let go of file and memory."""
        ...


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie in this process."""
    import numpy as np  # the one way to the address of a read-only buffer

    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


class CachedFile:
    """A file, written through the page cache.

    Args:
        path: A file that exists, with all of its room reserved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with translated("open", path):
            self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    @property
    def how(self) -> str:
        """See `Medium`."""
        return "page cache, fdatasync"

    @property
    def copy(self) -> Copy | None:
        """See `Medium`."""
        return None

    def memory(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """See `Medium`."""
        return None

    def write(self, offset: int, view: memoryview) -> None:
        """See `Medium`."""
        with translated("write", self.path, needed_bytes=view.nbytes):
            write_all(self._file, view, offset)

    def read(self, offset: int, nbytes: int) -> bytes:
        """See `Medium`."""
        with translated("read", self.path):
            return os.pread(self._file, nbytes, offset)

    def flush(self) -> None:
        """See `Medium`."""
        with translated("flush", self.path):
            os.fdatasync(self._file)

    def close(self) -> None:
        """See `Medium`."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class DirectFile(CachedFile):
    """A file, written past the page cache where the file system takes that; else as `CachedFile`, and `how` says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._refused = False
        with translated("open", path):
            self._direct = open_direct(path)

    @property
    def how(self) -> str:
        """See `Medium`."""
        if self._direct < 0 or self._refused:
            return "page cache, fdatasync: the file system refuses O_DIRECT"
        return "O_DIRECT, fdatasync"

    def write(self, offset: int, view: memoryview) -> None:
        """See `Medium`. Whole pages from page-aligned memory go past the cache."""
        if self._direct >= 0 and not view.nbytes % mmap.PAGESIZE and is_aligned([view], offset):
            try:
                with translated("write", self.path, needed_bytes=view.nbytes):
                    self._write_direct(offset, view)
                return
            except _RefusedError:
                self._refused = True
        super().write(offset, view)

    def _write_direct(self, offset: int, view: memoryview) -> None:
        try:
            write_all(self._direct, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems open with O_DIRECT and refuse the write, or want a larger alignment.
            raise _RefusedError from error

    def close(self) -> None:
        """See `Medium`."""
        super().close()
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)


class _RefusedError(Exception):
    pass


class MappedFile:
    """A file on a tmpfs, mapped: bytes are put straight into it, and a kill of the process takes nothing away.

    There is no power loss to survive: a flush has nothing to do. The processor keeps the order of stores as every other
    process sees them, also those of one that was killed.

    Args:
        path: A file that exists, with all of its room reserved: a page that is not there would be a SIGBUS.
    """

    _FLAGS = mmap.MAP_SHARED | getattr(
        mmap, "MAP_POPULATE", 0
    )  # the first touch of a page costs more than the copy

    def __init__(self, path: Path) -> None:
        self.path = path
        with translated("map", path):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._map = self._mapped(file, os.fstat(file).st_size)
            finally:
                os.close(file)
        self._view = memoryview(self._map)
        self._address = address_of(self._view)

    def _mapped(self, file: int, nbytes: int) -> mmap.mmap:
        return mmap.mmap(file, nbytes, flags=self._FLAGS)

    @property
    def how(self) -> str:
        """See `Medium`."""
        return "mapped memory"

    @property
    def copy(self) -> Copy | None:
        """See `Medium`."""
        return ctypes.memmove

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        """See `Medium`."""
        return self._view[offset : offset + nbytes]

    def write(self, offset: int, view: memoryview) -> None:
        """See `Medium`."""
        place, source = self._address + offset, address_of(view)
        if place != source and view.nbytes:
            ctypes.memmove(place, source, view.nbytes)  # unlike an assignment, it gives the GIL back

    def read(self, offset: int, nbytes: int) -> bytes:
        """See `Medium`."""
        return bytes(self._view[offset : offset + nbytes])

    def flush(self) -> None:
        """See `Medium`."""

    def close(self) -> None:
        """See `Medium`. Memory that somebody still holds stays mapped until he lets go."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
