"""The file system that a path lies on, or will lie on."""

from __future__ import annotations

import os
import re
from pathlib import Path

IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_MOUNTS = Path("/proc/self/mounts")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in the name of a mount point is written \040


def file_system_of(path: Path) -> str:
    """The type of the file system, such as `ext4`; `unknown` where the kernel does not tell. The path need not exist.
    Symbolic links are followed: the mount under their end counts.
    """
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        mounts = _MOUNTS.read_text().splitlines()
    except OSError:
        return kind
    for line in mounts:
        _, escaped, found, *_ = line.split(" ")
        point = _ESCAPED.sub(lambda digits: chr(int(digits[1], 8)), escaped)
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two mounts at one place the later one is seen
            best, kind = point, found
    return kind
