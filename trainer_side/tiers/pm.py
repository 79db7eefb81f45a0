"""A slot file on persistent memory: mapped, written past the CPU's caches, durable without a system call.

    DAX, and libpmem         MAP_SYNC; copies by libpmem, durable when `write` returns; flush: nothing is left to do
    no DAX, or no libpmem    an ordinary mapping; flush: msync
    PMEM_IS_PMEM_FORCE=1     like the first on any file system: a stand-in for measuring, and `how` says so

MAP_SYNC needs libpmem: pages that are mapped with it are not marked dirty, so msync would leave bytes in the caches
that only libpmem can write back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from holdfast.store.posix_errors import translated
from trainer_side.tiers.first_touch import populate
from trainer_side.tiers.media import Copy, MappedFile, address_of

_log = logging.getLogger("holdfast.trainer")
_MAP_SHARED_VALIDATE, _MAP_SYNC = 0x03, 0x80000  # linux/mman.h; Python does not name them
_MS_SYNC = 4
_FORCE = "PMEM_IS_PMEM_FORCE"  # PMDK's own variable
_LIBRARY = "libpmem.so.1"
_MAJOR, _MINOR_MIN = 1, 1  # pmem_memcpy with flags came in 1.1 of the interface
_NONTEMPORAL = 1 << 1  # PMEM_F_MEM_NONTEMPORAL


class Libpmem:
    """The functions that a tier needs; all release the GIL. Addresses are those of mapped memory in this process.

    Attributes:
        copy: (to, from, bytes), past the caches where that is faster; durable on return. A C function, so that `map`
            over many pieces costs little more than their bytes.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.copy: Any = library.pmem_memcpy_persist
        self.copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self.copy.restype = ctypes.c_void_p
        self._memcpy = library.pmem_memcpy
        self._memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._memcpy.restype = ctypes.c_void_p
        self._persist = library.pmem_persist
        self._persist.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._persist.restype = None
        self._drain = library.pmem_drain
        self._drain.argtypes = ()
        self._drain.restype = None

    def copy_past_caches(self, to: int, source: int, nbytes: int) -> None:
        """Copy by non-temporal stores, and wait for them: only the thread that made the stores can do that."""
        self._memcpy(to, source, nbytes, _NONTEMPORAL)

    def persist(self, address: int, nbytes: int) -> None:
        """Write these bytes back from the caches, and wait."""
        self._persist(address, nbytes)

    def drain(self) -> None:
        """Wait for this thread's stores past the caches."""
        self._drain()


@lru_cache(maxsize=1)
def load_libpmem() -> Libpmem | None:
    """PMDK's libpmem; None if it is not installed, or too old. Not a dependency (Debian, Ubuntu: package libpmem1)."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        library.pmem_check_version.argtypes = (ctypes.c_uint, ctypes.c_uint)
        library.pmem_check_version.restype = ctypes.c_char_p  # None, or what is wrong
        if library.pmem_check_version(_MAJOR, _MINOR_MIN) is not None:
            return None
        return Libpmem(library)
    except (OSError, AttributeError):
        return None


class PmFile(MappedFile):
    """As `Medium`. `how` names the one of the three ways that it uses.

    Args:
        path: A file that exists, with all of its room reserved.
    """

    def __init__(self, path: Path) -> None:
        self._pmem = load_libpmem()
        self._how = ""
        super().__init__(path)

    def _touch(self) -> None:
        if self._pmem is not None:
            # Each page is written to once, now: its first store would otherwise come in the middle of a checkpoint.
            with contextlib.suppress(OSError):
                populate(self._address, len(self._view))

    def _mapped(self, file: int, nbytes: int) -> mmap.mmap:
        if self._pmem is None:
            self._fall_back("libpmem.so.1 is not installed")
        elif os.environ.get(_FORCE) == "1":
            self._how = f"libpmem, a stand-in: {_FORCE}=1 and no persistent memory"
        else:
            try:
                found = mmap.mmap(file, nbytes, flags=_MAP_SHARED_VALIDATE | _MAP_SYNC)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._pmem = None
                self._fall_back("the file system has no DAX")
            else:
                self._how = "libpmem, MAP_SYNC"
                return found
        return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED)

    def _fall_back(self, why: str) -> None:
        self._how = f"msync: {why}"
        _log.warning(
            "%s: %s; slices are kept there by an ordinary mapping and msync. On persistent memory, mount with -o dax "
            "and install libpmem1",
            self.path,
            why,
        )

    @property
    def how(self) -> str:
        return self._how

    @property
    def copy(self) -> Copy | None:
        # With libpmem it goes past the caches, and is durable on return.
        return ctypes.memmove if self._pmem is None else self._pmem.copy

    def write(self, offset: int, view: memoryview) -> None:
        # With libpmem this is durable on return, also for bytes that were put into `memory` in another way.
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
        msync = ctypes.CDLL(None, use_errno=True).msync  # mmap's own holds the GIL while the device works
        msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        with translated("flush", self.path):
            if msync(self._address, len(self._view), _MS_SYNC) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
