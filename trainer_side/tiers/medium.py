"""The ways to write a slot file: bytes go to a place, and are durable once `flush` has returned.

    Medium ─┬─ MappedFile   memory: tmpfs, mapped; stored bytes outlive the process
            ├─ CachedFile   file:   pwrite through the page cache, fdatasync
            ├─ DirectFile   nvme:   pwrite past the page cache (O_DIRECT), fdatasync for the device's own cache
            └─ PmFile       pm:     mapped, by libpmem past the CPU's caches

Until `flush` returns, a power loss may lose any part of the written bytes, in any order, and leave half a sector.
`slot_file.py` copes with that; `tests/simulation/device.py` simulates it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from holdfast.store.posix_errors import translate_errors
from holdfast.store.posix_io import is_aligned, open_direct, write_all
from trainer_side.tiers.first_touch import can_populate, make_pages, missing_bytes, populate

_log = logging.getLogger("holdfast.trainer")

Copy = Callable[[int, int, int], object]  # (to address, from address, bytes), like ctypes.memmove
_REFUSED = "page cache, fdatasync: the file system refuses O_DIRECT"
_MAP_SHARED_VALIDATE, _MAP_SYNC = 0x03, 0x80000  # linux/mman.h; Python has no names for them
_MS_SYNC = 4
_FORCE = "PMEM_IS_PMEM_FORCE"  # PMDK's own variable
_LIBRARY = "libpmem.so.1"
_MAJOR, _MINOR_MIN = 1, 1  # pmem_memcpy with flags came in 1.1 of the interface
_NONTEMPORAL = 1 << 1  # PMEM_F_MEM_NONTEMPORAL


class Medium(Protocol):
    """A file of fixed size, all of its room reserved. Any thread. StoreError: the device refused."""

    @property
    def write_mode(self) -> str:
        """The way of writing, in a few words."""

    @property
    def copy(self) -> Copy | None:
        """The best way to put bytes into `memory`; None without memory."""

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        """Return a part of the file as writable memory; None if the file cannot be mapped."""

    def write(self, offset: int, view: memoryview) -> None:
        """Write at this offset. A view that is this part of `memory` itself is only prepared for `flush`."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at this offset, flushed or not; fewer at the end of the file."""

    def flush(self) -> None:
        """Make every earlier write, of any thread, survive a power loss.

        After a failure it is unknown which bytes are durable, and a second call does not help.
        """

    def close(self) -> None: ...


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a view in this process."""
    import numpy as np  # the only way to get the address of a read-only buffer

    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


class CachedFile:
    """An existing file, written through the page cache."""

    copy: Copy | None = None

    def __init__(self, path: Path) -> None:
        self.path, self.write_mode = path, "page cache, fdatasync"
        with translate_errors("open", path):
            self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def memory(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        return None

    def write(self, offset: int, view: memoryview) -> None:
        with translate_errors("write", self.path, needed_bytes=view.nbytes):
            write_all(self._file, view, offset)

    def read(self, offset: int, nbytes: int) -> bytes:
        with translate_errors("read", self.path):
            return os.pread(self._file, nbytes, offset)

    def flush(self) -> None:
        with translate_errors("flush", self.path):
            os.fdatasync(self._file)

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class DirectFile(CachedFile):
    """An existing file, written past the page cache if the file system allows it; otherwise like `CachedFile`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with translate_errors("open", path):
            self._direct = open_direct(path)
        self.write_mode = _REFUSED if self._direct < 0 else "O_DIRECT, fdatasync"

    def write(self, offset: int, view: memoryview) -> None:
        # Only whole pages from page-aligned memory can go past the cache.
        if self._direct >= 0 and not view.nbytes % mmap.PAGESIZE and is_aligned([view], offset):
            with translate_errors("write", self.path, needed_bytes=view.nbytes):
                try:
                    write_all(self._direct, view, offset)
                    return
                except OSError as error:
                    # Some file systems open with O_DIRECT but refuse the write, or need a larger alignment.
                    if error.errno != errno.EINVAL:
                        raise
                    self.write_mode = _REFUSED
        super().write(offset, view)

    def close(self) -> None:
        super().close()
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)


class MappedFile:
    """A mapped file on a tmpfs: bytes are stored straight into it, and survive a kill of the process.

    Memory does not survive a power loss, so a flush has nothing to do. The processor keeps the order of stores as every
    other process sees them, also the stores of a process that was killed. All room of the file must be reserved: a
    missing page would cause a SIGBUS. Pages that a file on a tmpfs lacks may only be touched after `make`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.write_mode = path, "mapped memory"
        self.copy: Copy | None = ctypes.memmove
        with translate_errors("map", path):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(file, "r+b"):
                self._map = self._mapped(file, os.fstat(file).st_size)
            self._view = memoryview(self._map)
            self._address = address_of(self._view)
            self._touch()

    def _mapped(self, file: int, nbytes: int) -> mmap.mmap:
        # The first touch of a page costs more than the copy. `_touch` does it in several threads, if the kernel can.
        populated = 0 if can_populate() else mmap.MAP_POPULATE
        return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | populated)

    def _touch(self) -> None:
        """Map all pages now; if some are missing, `make` does that later."""
        if not missing_bytes(self.path):
            populate(self._address, len(self._view), write=False)

    def make(self, offset: int, nbytes: int, stopped: Callable[[], bool] | None) -> None:
        make_pages(self._map, offset, nbytes, stopped)

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        return self._view[offset : offset + nbytes]

    def write(self, offset: int, view: memoryview) -> None:
        place, source = self._address + offset, address_of(view)
        if place != source and view.nbytes:
            ctypes.memmove(place, source, view.nbytes)  # unlike an assignment, releases the GIL

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._view[offset : offset + nbytes])

    def flush(self) -> None:
        """Do nothing: memory does not survive a power loss anyway."""

    def close(self) -> None:
        # Memory with views stays mapped until the last view is released.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()


class Libpmem:
    """The functions that a tier needs; all release the GIL. Addresses are those of mapped memory in this process.

    `copy`, `persist` and `drain` are C functions, so that `map` over many pieces costs little more than their bytes.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, name)
            found.argtypes, found.restype = arguments, result
            return found

        address, nbytes = ctypes.c_void_p, ctypes.c_size_t
        # (to, from, bytes), past the caches where that is faster; durable on return.
        self.copy = function("pmem_memcpy_persist", address, address, address, nbytes)
        self._memcpy = function("pmem_memcpy", address, address, address, nbytes, ctypes.c_uint)
        # (address, bytes): writes these bytes back from the caches, and waits.
        self.persist = function("pmem_persist", None, address, nbytes)
        self.drain = function("pmem_drain", None)  # waits for this thread's stores past the caches

    def copy_past_caches(self, to: int, source: int, nbytes: int) -> None:
        """Copy by non-temporal stores, and wait for them: only the thread that made the stores can do that."""
        self._memcpy(to, source, nbytes, _NONTEMPORAL)


@lru_cache(maxsize=1)
def load_libpmem() -> Libpmem | None:
    """Load PMDK's libpmem; None if missing or too old. Not a dependency (Debian, Ubuntu: package libpmem1)."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        library.pmem_check_version.argtypes = (ctypes.c_uint, ctypes.c_uint)
        library.pmem_check_version.restype = ctypes.c_char_p  # None, or the error
        if library.pmem_check_version(_MAJOR, _MINOR_MIN) is not None:
            return None
        return Libpmem(library)
    except (OSError, AttributeError):
        return None


class PmFile(MappedFile):
    """A file on persistent memory: mapped, written past the CPU's caches, durable without a system call.

    DAX, and libpmem         MAP_SYNC; copies by libpmem, durable when `write` returns; flush: nothing to do
    no DAX, or no libpmem    an ordinary mapping; flush: msync
    PMEM_IS_PMEM_FORCE=1     like the first on any file system: a stand-in for measuring, and `write_mode` says so

    MAP_SYNC needs libpmem: pages that are mapped with it are not marked dirty, so msync would leave bytes in the caches
    that only libpmem can write back.
    """

    def __init__(self, path: Path) -> None:
        self._pmem = load_libpmem()
        super().__init__(path)
        if self._pmem is not None:
            self.copy = self._pmem.copy  # past the caches, and durable on return

    def _touch(self) -> None:
        if self._pmem is not None:
            # Touch each page for writing now: its first store would otherwise fault in the middle of a checkpoint.
            with contextlib.suppress(OSError):
                populate(self._address, len(self._view))

    def _mapped(self, file: int, nbytes: int) -> mmap.mmap:
        if self._pmem is None:
            self._fall_back("libpmem.so.1 is not installed")
        elif os.environ.get(_FORCE) == "1":
            self.write_mode = f"libpmem, a stand-in: {_FORCE}=1 and no persistent memory"
        else:
            try:
                found = mmap.mmap(file, nbytes, flags=_MAP_SHARED_VALIDATE | _MAP_SYNC)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._pmem = None
                self._fall_back("the file system has no DAX")
            else:
                self.write_mode = "libpmem, MAP_SYNC"
                return found
        return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED)

    def _fall_back(self, why: str) -> None:
        self.write_mode = f"msync: {why}"
        _log.warning(
            "%s: %s; slices are kept there by an ordinary mapping and msync. On persistent memory, mount with -o dax "
            "and install libpmem1",
            self.path,
            why,
        )

    def write(self, offset: int, view: memoryview) -> None:
        # With libpmem the bytes are durable on return, even if they were stored into `memory` in another way.
        if self._pmem is None:
            super().write(offset, view)
            return
        place, source = self._address + offset, address_of(view)
        if place == source:
            self._pmem.persist(place, view.nbytes)
        elif view.nbytes:
            self._pmem.copy_past_caches(place, source, view.nbytes)

    def flush(self) -> None:
        if self._pmem is not None:
            self._pmem.drain()
            return
        msync = ctypes.CDLL(None, use_errno=True).msync  # mmap's own flush holds the GIL meanwhile
        msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        with translate_errors("flush", self.path):
            if msync(self._address, len(self._view), _MS_SYNC) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
