"""First touch of large host memory by several threads, because the kernel clears only 1.5 GB/s for one thread.

    anonymous memory   huge_buffer: pages of an area; huge ones if the kernel has them
    a file in memory   fill_file: pages of a new slot file, through a mapping: fallocate uses one thread and small pages
    a mapping          populate: no later access faults, and pages are locked sooner
    a part of one      make_pages: of a file on a tmpfs that has its size but no pages yet (slot_pages.py)

Threads are started for each call and end with it, so that a child inherits none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import torch

from holdfast.store.file_system import IN_MEMORY, file_system_of
from trainer_side.ranks.deadlines import run_in_threads

_RANKS_BESIDE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE")  # set by mpirun, by torchrun
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), Linux 5.14; Python has no names for them
_SECTION_BYTES = 64 << 20
# Measured on 16 cores (H100 VM, kernel 6.18): 8 make 4.3 to 5.4 GB/s of small pages, 16 make 3.2.
_THREADS_MAX = 8
# Beside training: each call keeps other threads from mapping memory until it returns, and training needs the cores.
_BESIDE_SECTION_BYTES, _BESIDE_THREADS_MAX = 4 << 20, 2
_BLOCK_BYTES = 512  # of `st_blocks`


def huge_buffer(nbytes: int, *, exclude_from_fork: bool = False) -> torch.Tensor:
    """Allocate `nbytes` (above 0) of zeroed memory, all of it touched, as a one-dimensional uint8 tensor.

    With `exclude_from_fork`, forked children do not inherit the memory. Raises `MemoryError` if there is less.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages uses small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
        if exclude_from_fork:
            memory.madvise(mmap.MADV_DONTFORK)
            _beside_children.add(memory)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        return buffer if populate(buffer.data_ptr(), nbytes) else buffer.zero_()
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes of host memory: {error.strerror}") from error


_beside_children: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_in_child() -> None:
    # The child may map something else at these addresses, so its copies of these objects must never unmap them.
    for memory in list(_beside_children):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_in_child)


def can_populate() -> bool:
    """Whether the kernel has the madvise calls of `populate` (5.14 and later)."""
    return _madvise()(mmap.PAGESIZE, 0, _POPULATE_WRITE) == 0


def populate(
    address: int, nbytes: int, *, write: bool = True, stopped: Callable[[], bool] | None = None
) -> bool:
    """Have the kernel map all pages of a mapping, with as many threads as this rank has cores. Any thread.

    With `write`, missing pages are made; without, pages are mapped for reading, so that pages of a file on a disk are
    not marked dirty. With `stopped`, few threads work beside training, in small steps, until it returns True.

    Returns False if the kernel has no such call. OSError: there is no memory (`ENOMEM`), or the file system of a mapped
    file is full (`EFAULT`).
    """
    if not can_populate():
        return False
    advice = _POPULATE_WRITE if write else _POPULATE_READ
    section_bytes, threads_max = _SECTION_BYTES, _THREADS_MAX
    if stopped is not None:
        section_bytes, threads_max = _BESIDE_SECTION_BYTES, _BESIDE_THREADS_MAX

    def touch(begin: int) -> None:
        if stopped is not None and stopped():
            return
        length = min(section_bytes, nbytes - begin)
        while (number := _advise(address + begin, length, advice)) in (errno.EINTR, errno.EAGAIN):
            pass
        if number:
            raise OSError(number, os.strerror(number))

    sections = range(0, nbytes, section_bytes)
    threads = min(len(sections), cores_of_rank(), threads_max)
    if threads <= 1:
        for begin in sections:
            touch(begin)
        return True
    done = run_in_threads(touch, sections, threads, "touch")
    wait(done)  # before the first error is raised, so that no thread touches memory that the caller frees
    for one in done:
        one.result()
    return True


def fill_file(descriptor: int, path: Path, nbytes: int) -> None:
    """Make the pages of a new file in memory, until memory runs out; elsewhere do nothing. `reserve` must follow."""
    if file_system_of(path) not in IN_MEMORY or not can_populate():
        return
    os.ftruncate(descriptor, nbytes)
    # `reserve` reports any error.
    with mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED) as mapped, contextlib.suppress(OSError):
        make_pages(mapped, 0, nbytes)


def make_pages(
    mapped: mmap.mmap, offset: int, nbytes: int, stopped: Callable[[], bool] | None = None
) -> None:
    """Make the missing pages in a part of a mapped file in memory; `stopped` as for `populate`.

    Existing pages keep their bytes. OSError: the file system is full (`ENOSPC`), or there is no memory.
    """
    with contextlib.suppress(OSError):  # a tmpfs without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE, offset, nbytes)
    place = ctypes.c_ubyte.from_buffer(mapped)
    try:
        populate(ctypes.addressof(place) + offset, nbytes, stopped=stopped)
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
    finally:
        del place  # else the mapping cannot be closed


def missing_bytes(path: Path) -> int:
    """Return for how many bytes a file on a tmpfs has no pages; 0 elsewhere, where that is unknown."""
    if file_system_of(path) != "tmpfs":
        return 0
    found = path.lstat()
    return max(0, found.st_size - found.st_blocks * _BLOCK_BYTES)


def has_hole(descriptor: int, begin: int, end: int) -> bool:
    """Whether pages are missing in this part of a file on a tmpfs."""
    return os.lseek(descriptor, begin, os.SEEK_HOLE) < end


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Return an error number, 0 for success. Unlike `mmap.madvise`, releases the GIL meanwhile."""
    return 0 if _madvise()(address, nbytes, advice) == 0 else ctypes.get_errno()


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


def cores_of_rank() -> int:
    """Return how many cores this rank may keep busy for a moment: those it is bound to, or its share of all."""
    usable = len(os.sched_getaffinity(0))
    if usable < (os.cpu_count() or 1):
        return usable  # the launcher has bound the ranks to cores
    beside = max((int(os.environ.get(name) or "1") for name in _RANKS_BESIDE), default=1)
    return max(1, usable // max(1, beside))
