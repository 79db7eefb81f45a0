"""Drops files from the page cache, so that the next read comes from the disk."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["forget"]


def forget(*paths: Path) -> None:
    """Write dirty pages of these files to the disk, and tell the kernel to drop their pages."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
