"""PMDK's libpmem, loaded when a tier on persistent memory is opened: copies past the CPU's caches, and flushes of them.

Not a dependency: where `libpmem.so.1` (Debian, Ubuntu: package libpmem1) is not installed, `load` gives None, and the
tier maps its file the ordinary way and calls msync. All functions give the GIL back.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

_NAME = "libpmem.so.1"
_MAJOR, _MINOR_MIN = 1, 1  # pmem_memcpy with flags came in 1.1 of the interface
_NONTEMPORAL = 1 << 1  # PMEM_F_MEM_NONTEMPORAL


class Libpmem:
    """The functions that a tier needs. Addresses are those of mapped memory in this process.

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
def load() -> Libpmem | None:
    """The library; None where there is none, or where it is too old."""
    try:
        library = ctypes.CDLL(_NAME)
        library.pmem_check_version.argtypes = (ctypes.c_uint, ctypes.c_uint)
        library.pmem_check_version.restype = ctypes.c_char_p  # None, or what is wrong
        if library.pmem_check_version(_MAJOR, _MINOR_MIN) is not None:
            return None
        return Libpmem(library)
    except (OSError, AttributeError):
        return None
