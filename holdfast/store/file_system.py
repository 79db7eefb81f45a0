"""The file system that a path lies on, or will lie on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_MOUNTS = Path("/proc/self/mounts")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in the name of a mount point is written \040


class Mount(NamedTuple):
    """A mounted file system: where, its type such as `ext4`, and its options such as `rw,size=1g`."""

    point: str
    kind: str
    options: str


def file_system_of(path: Path) -> str:
    """Return the type of a path's file system, such as `ext4`, or `unknown`. Follows links; the path may be missing."""
    return mount_of(path).kind


def mount_of(path: Path) -> Mount:
    """Return the mount that a path lies on, or will lie on, as in `file_system_of`."""
    real = os.path.realpath(path)
    best = Mount("", "unknown", "")
    try:
        mounts = _MOUNTS.read_text().splitlines()
    except OSError:
        return best
    for line in mounts:
        _, escaped, kind, options, *_ = line.split(" ")
        point = _ESCAPED.sub(lambda digits: chr(int(digits[1], 8)), escaped)
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.point):  # of two mounts at one place the later one is seen
            best = Mount(point, kind, options)
    return best
