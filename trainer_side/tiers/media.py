"""The ways to write a slot file: bytes go to a place, and after a call of `flush` they stay.

    Medium ─┬─ MappedFile   memory: tmpfs, mapped; what is stored there outlives the process as it is
            ├─ CachedFile   file:   pwrite through the page cache, fdatasync
            └─ DirectFile   nvme:   pwrite past it (O_DIRECT), fdatasync for the device's own cache
               PmFile       pm:     trainer_side/tiers/pm.py

No write counts before `flush` returns: until then a power loss may take any part of the bytes, in any order, and leave
half a sector. `slot_file.py` copes with that; `tests/simulation/device.py` simulates it.
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
from trainer_side.tiers.first_touch import can_populate, populate

Copy = Callable[[int, int, int], object]  # (to address, from address, bytes), like ctypes.memmove


class Medium(Protocol):
    """A file of fixed size, all of its room reserved. Any thread."""

    @property
    def how(self) -> str:
        """The way of writing that it uses, in a few words."""
        ...

    @property
    def copy(self) -> Copy | None:
        """The best way to put bytes into `memory`; None where there is no memory."""
        ...

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        """A part of the file as writable memory; None where there is none."""
        ...

    def write(self, offset: int, view: memoryview) -> None:
        """Write at this offset. A view that is this very part of `memory` is only made ready for `flush`.

        Raises:
            StoreError: The device refused.
        """
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes at this offset, flushed or not; fewer at the end of the file."""
        ...

    def flush(self) -> None:
        """Make every earlier write, of any thread, survive a power loss.

        Raises:
            StoreError: The device refused. Nobody knows which bytes stay, and a second call does not mend that.
        """
        ...

    def close(self) -> None: ...


def address_of(view: memoryview) -> int:
    """The address of the first byte of a view in this process."""
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
        return "page cache, fdatasync"

    @property
    def copy(self) -> Copy | None:
        return None

    def memory(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        return None

    def write(self, offset: int, view: memoryview) -> None:
        with translated("write", self.path, needed_bytes=view.nbytes):
            write_all(self._file, view, offset)

    def read(self, offset: int, nbytes: int) -> bytes:
        with translated("read", self.path):
            return os.pread(self._file, nbytes, offset)

    def flush(self) -> None:
        with translated("flush", self.path):
            os.fdatasync(self._file)

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class DirectFile(CachedFile):
    """A file, written past the page cache where the file system allows that; otherwise like `CachedFile`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._refused = False
        with translated("open", path):
            self._direct = open_direct(path)

    @property
    def how(self) -> str:
        if self._direct < 0 or self._refused:
            return "page cache, fdatasync: the file system refuses O_DIRECT"
        return "O_DIRECT, fdatasync"

    def write(self, offset: int, view: memoryview) -> None:
        # Only whole pages from page-aligned memory can go past the cache.
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
        super().close()
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)


class _RefusedError(Exception):
    pass


class MappedFile:
    """A file on a tmpfs, mapped: bytes are put straight into it, and a kill of the process takes nothing away.

    Memory does not survive a power loss, so a flush has nothing to do. The processor keeps the order of stores as every
    other process sees them, also the stores of a process that was killed.

    Args:
        path: A file that exists, with all of its room reserved: a missing page would be a SIGBUS.
    """

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
            self._touch()

    def _mapped(self, file: int, nbytes: int) -> mmap.mmap:
        # The first touch of a page costs more than the copy. By several threads in `_touch`, where the kernel can.
        populated = 0 if can_populate() else getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | populated)

    def _touch(self) -> None:
        """Have all pages mapped now."""
        populate(self._address, len(self._view), write=False)

    @property
    def how(self) -> str:
        return "mapped memory"

    @property
    def copy(self) -> Copy | None:
        return ctypes.memmove

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        return self._view[offset : offset + nbytes]

    def write(self, offset: int, view: memoryview) -> None:
        place, source = self._address + offset, address_of(view)
        if place != source and view.nbytes:
            ctypes.memmove(place, source, view.nbytes)  # unlike an assignment, it gives the GIL back

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._view[offset : offset + nbytes])

    def flush(self) -> None:
        """Nothing to do: there is no power loss to survive."""

    def close(self) -> None:
        # Memory that somebody still holds stays mapped until they let go of it.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
