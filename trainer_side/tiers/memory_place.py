"""Sees that the directory of a memory tier lies in memory: a device copies straight into its slots.

CUDA locks the pages of a tmpfs. It refuses those of a mapped file on a disk, and copies into memory that is not locked
are slow and hold up the CPU. Without a device such a tier works, at the speed of the disk, and is named.
"""

from __future__ import annotations

import logging
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.store.file_system import IN_MEMORY, file_system_of
from trainer_side.state import accelerator

_log = logging.getLogger("holdfast.trainer")


def why_not_memory(name: str, directory: Path) -> str | None:
    """What is wrong with the directory of a memory tier, and what to do; None where it lies in memory."""
    kind = file_system_of(directory)
    if kind in IN_MEMORY:
        return None
    return (
        f"tier {name}: {directory} is on {kind}, which is not in memory; choose a directory on a tmpfs (`memory` alone "
        f"has one), or mount one (mount -t tmpfs -o size=SIZE tmpfs {directory}); for slices on a disk set "
        f"nvme:{directory} or file:{directory}"
    )


def refuse_disk(name: str, directory: Path, *, warn: bool = False) -> None:
    """Refuse a memory tier on a disk where this rank trains on a device; else only name it. Any thread.

    Args:
        name: The tier as it is set.
        directory: Its directory.
        warn: Name it in the log where it is not refused.

    Raises:
        ConfigError: A device is in use.
    """
    problem = why_not_memory(name, directory)
    if problem is None:
        return
    if accelerator.kind() is not None:
        raise ConfigError(f"{problem}. A device cannot copy into mapped files on {file_system_of(directory)}")
    if warn:
        _log.warning("%s. Each checkpoint goes through the page cache to the disk", problem)
