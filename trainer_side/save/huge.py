"""Memory in huge pages, where the kernel has them: for what is copied from and read by another process, many times.

The stager reads a rank's payload out of the rank's memory, page by page; out of 2 MiB pages that costs about half the
CPU time of 4 KiB ones. Their first touch, too, is many times faster.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

__all__ = ["huge_buffer"]


def huge_buffer(nbytes: int) -> torch.Tensor:
    """`nbytes` (above 0) of zeroed memory as a one-dimensional uint8 tensor; all of it has been touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: pages are small, and all else is the same
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    return buffer.zero_()
