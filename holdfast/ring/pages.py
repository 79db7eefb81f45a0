"""Memory that a store reads into or writes from, in huge pages where the kernel has them.

A direct read or write of 4 MiB in scattered small pages is a thousand pieces for kernel and device, and the kernel
splits the request when its list of pieces is full. Two huge pages are two pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable

_HUGE_BYTES = 2 << 20
_FAILURES_MAX = 8  # in a row: a page in use is skipped, but a kernel without huge pages fails on every page
# mmap(2), madvise(2), Linux 6.1; Python has no names for them.
_PROT_NONE, _MAP_FIXED, _MADV_COLLAPSE = 0, 0x10, 25


def aligned_buffer(nbytes: int) -> memoryview:
    """Return `nbytes` (above 0) of zeroed, page-aligned memory for reads past the page cache. Any thread.

    Memory of at least 2 MiB is aligned to a huge page. No more than `nbytes` ever becomes resident.
    """
    huge_bytes = nbytes // _HUGE_BYTES * _HUGE_BYTES
    room_bytes = nbytes + _HUGE_BYTES if huge_bytes else nbytes
    memory = mmap.mmap(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not huge_bytes:
        return memoryview(memory)
    begin = -ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) % _HUGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without them: the pages stay small
        memory.madvise(mmap.MADV_HUGEPAGE, begin, huge_bytes)
    return memoryview(memory)[begin : begin + nbytes]


def use_huge_pages(descriptor: int, nbytes: int, should_stop: Callable[[], bool]) -> int:
    """Move the first `nbytes` of a file in shared memory into huge pages, as far as the kernel has them; return how
    many bytes lie in huge pages. Its bytes stay; it may be in use. Any thread. `descriptor`: open for reading and
    writing; the file has all its pages. `should_stop`: called before each step; True ends the move.

    Shared memory mostly gets none by itself (`shmem_enabled`). This function asks for them, 2 MiB at a time, which
    takes some seconds per GiB. Every process that maps the file then has its bytes in few pieces.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    # A huge page needs an aligned address: reserve room for one, wherever the kernel puts it. The file is mapped there
    # one huge page after the other, so that the process never counts the whole file a second time.
    room_bytes = 2 * _HUGE_BYTES
    room = libc.mmap(None, room_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == ctypes.c_void_p(-1).value:
        return 0
    moved_bytes = failures = 0
    try:
        begin = -(-room // _HUGE_BYTES) * _HUGE_BYTES
        access, mapped = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        for offset in range(0, nbytes // _HUGE_BYTES * _HUGE_BYTES, _HUGE_BYTES):
            if should_stop() or failures == _FAILURES_MAX:
                break
            if libc.mmap(begin, _HUGE_BYTES, access, mapped, descriptor, offset) != begin:
                break
            moved = libc.madvise(begin, _HUGE_BYTES, _MADV_COLLAPSE) == 0
            moved_bytes += moved * _HUGE_BYTES
            failures = 0 if moved else failures + 1
    finally:
        libc.munmap(room, room_bytes)
    return moved_bytes
