"""Memory that a store reads into, in huge pages where the kernel has them.

A direct read of 4 MiB into small pages that lie anywhere is a thousand pieces, for the kernel and for the device: it
cuts the request where its list of pieces is full. Into two huge pages it is two pieces, whatever else is the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

__all__ = ["direct_window"]

_HUGE_BYTES = 2 << 20


def direct_window(nbytes: int) -> memoryview:
    """`nbytes` (above 0) of zeroed memory that begins where a page does, for reads past the page cache. Any thread.

    What is at least 2 MiB begins where a huge page does. No more than `nbytes` ever becomes resident.
    """
    huge_bytes = nbytes // _HUGE_BYTES * _HUGE_BYTES
    room_bytes = nbytes + _HUGE_BYTES if huge_bytes else nbytes
    memory = mmap.mmap(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not huge_bytes:
        return memoryview(memory)
    begin = -ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) % _HUGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without them: pages are small, and all else is the same
        memory.madvise(mmap.MADV_HUGEPAGE, begin, huge_bytes)
    return memoryview(memory)[begin : begin + nbytes]
