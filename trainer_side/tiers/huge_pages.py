"""Huge pages for memory tiers: whether the tmpfs of a tier has them, and how to get them.

A tmpfs goes by its own mount option `huge`, which is `never` unless it is set; `shmem_enabled` of the kernel can only
forbid them (`deny`) or force them. A tier asks for them with each slot file, so `advise` is enough.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.store.file_system import mount_of

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_GIVE = frozenset({"always", "within_size", "advise"})


def why_small_pages(directory: Path) -> tuple[str, str] | None:
    """Why slots in this directory get small pages, and the command that changes it; None: huge ones, or no tmpfs."""
    mount, forced = mount_of(directory), _chosen(_SHMEM_ENABLED)
    if mount.kind != "tmpfs" or forced == "force":
        return None
    if forced == "deny":
        return f"{_SHMEM_ENABLED} is deny", f"echo never > {_SHMEM_ENABLED}"
    option = next((one[5:] for one in mount.options.split(",") if one.startswith("huge=")), "never")
    if option in _GIVE or forced is None:
        return None
    return f"{mount.point} is mounted with huge={option}", f"mount -o remount,huge=within_size {mount.point}"


def _chosen(setting: Path) -> str | None:
    """The choice in brackets; None on a kernel without huge pages for shared memory."""
    try:
        found = re.search(r"\[(\w+)\]", setting.read_text())
    except OSError:
        return None
    return found[1] if found else None
